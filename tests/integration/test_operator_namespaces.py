"""An operator of some namespaces: it serves them all, or says which one it cannot watch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import (
    LONG_S,
    Namespace,
    OperatorProcess,
    as_account,
    create_demo,
    create_namespace,
    rendered_chart,
    running_operator,
    write_models,
)

RELEASE = "sluice-some"
RIGHTS = "/apis/rbac.authorization.k8s.io/v1/namespaces"
FLAGS = ("--namespace=watched-one", "--namespace=watched-two")


@pytest.fixture(scope="module")
def roles() -> list[dict[str, Any]]:
    """Roles and bindings that `helm install` would create in the two namespaces."""
    chart = rendered_chart(RELEASE, "--set=watchNamespaces={watched-one,watched-two}")
    return [body for body in chart if body["kind"] in ("Role", "RoleBinding")]


@pytest.fixture(scope="module")
def spaces(client: httpx.Client) -> tuple[Namespace, Namespace]:
    return create_namespace(client, "watched-one"), create_namespace(client, "watched-two")


@pytest.fixture(scope="module")
def account(
    apiserver: ApiServer, client: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> ApiServer:
    """The API server for the release's service account."""
    body = {"metadata": {"name": RELEASE}}
    assert client.post("/api/v1/namespaces/default/serviceaccounts", json=body).is_success
    return as_account(apiserver, client, RELEASE, tmp_path_factory.mktemp("account"))


def _grant(client: httpx.Client, roles: list[dict[str, Any]], space: Namespace) -> None:
    for body in roles:
        if body["metadata"]["namespace"] == space.name:
            path = f"{RIGHTS}/{space.name}/{body['kind'].lower()}s"
            assert client.post(path, json=body).is_success


def _recreated(operator: OperatorProcess, *spaces: Namespace) -> None:
    """Each space's Service comes back: the operator serves all of them."""
    for space in spaces:
        operator.wait(f"the children of {space.name}", space.has_children, 60.0)
        space.delete("services", "demo")
        operator.wait(f"the Service of {space.name}", space.has_children)


def test_a_namespace_that_cannot_be_watched_ends_the_operator_with_its_name(
    account: ApiServer,
    client: httpx.Client,
    roles: list[dict[str, Any]],
    spaces: tuple[Namespace, Namespace],
    tmp_path: Path,
) -> None:
    models, log = write_models(tmp_path / "models"), tmp_path / "operator.log"
    for space in spaces:
        create_demo(space)
    _grant(client, roles, spaces[1])
    with running_operator(account, models, log, "", *FLAGS) as operator:
        operator.wait("the children of watched-two", spaces[1].has_children)
        assert operator.process.wait(timeout=LONG_S) == 1
    [last] = [line for line in log.read_text().splitlines() if "it cannot go on" in line]
    assert "forbidden" in last
    assert 'in the namespace "watched-one"' in last
    _grant(client, roles, spaces[0])
    with running_operator(account, models, log, "", *FLAGS) as operator:  # as the kubelet does
        _recreated(operator, *spaces)
