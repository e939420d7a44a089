"""One real kube-apiserver for the whole session, and what the modules ask of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from integration.apiserver import ApiServer, running_apiserver
from integration.operator_runs import (
    KINDS,
    Namespace,
    OperatorProcess,
    administrator,
    create_namespace,
    running_operator,
    write_models,
)

_numbers = itertools.count()


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real etcd and kube-apiserver, with the kubeconfig of an administrator."""
    with running_apiserver(tmp_path_factory.mktemp("apiserver")) as server:
        yield server


@pytest.fixture(scope="module")
def client(apiserver: ApiServer) -> Iterator[httpx.Client]:
    """A connection with every right, the CRD in force. A module leaves no object behind, which the
    operators of others would look after too."""
    with administrator(apiserver) as connection:
        yield connection
        for plural in KINDS:
            answer = connection.get(f"/apis/sluice.dev/v1alpha1/{plural}")
            for left in answer.json()["items"] if answer.is_success else ():  # the CRD may be gone
                meta = left["metadata"]
                Namespace(connection, meta["namespace"]).delete(plural, meta["name"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that operators may read."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def operator(
    apiserver: ApiServer,
    client: httpx.Client,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    """One operator for all namespaces, and all tests of a module."""
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    with running_operator(apiserver, models, log) as process:
        yield process


@pytest.fixture
def space(client: httpx.Client) -> Iterator[Namespace]:
    """A namespace of its own for each test, without objects at the end."""
    space = create_namespace(client, f"space-{next(_numbers)}")
    yield space
    for plural in KINDS:
        for body in space.all(plural):
            space.delete(plural, body["metadata"]["name"])
