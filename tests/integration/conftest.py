"""`apiserver`: one real kube-apiserver for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.apiserver import ApiServer, running_apiserver


@pytest.fixture(scope="session")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A real etcd and kube-apiserver, with the kubeconfig of an administrator."""
    with running_apiserver(tmp_path_factory.mktemp("apiserver")) as server:
        yield server
