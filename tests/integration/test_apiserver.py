"""The fixture is a real API server: it validates, stores and authorises."""

from __future__ import annotations

import json

import pytest
from integration.apiserver import ApiServer
from sluice_cluster.settings import LocalClusterError
from sluice_cluster.shell import Word, run

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "seen"}}


def _kubectl(server: ApiServer, *arguments: str, stdin: str | None = None) -> str:
    command: list[Word] = [server.kubectl, f"--kubeconfig={server.kubeconfig}", *arguments]
    return run(command, stdin=stdin)


def test_an_applied_object_can_be_read_back(apiserver: ApiServer) -> None:
    body = json.dumps({**CONFIG_MAP, "data": {"cap": "8"}})
    _kubectl(apiserver, "apply", "--server-side", "-f", "-", stdin=body)
    stored = json.loads(_kubectl(apiserver, "get", "configmap", "seen", "-o", "json"))
    assert stored["data"] == {"cap": "8"}


def test_an_object_that_breaks_the_schema_is_refused(apiserver: ApiServer) -> None:
    body = json.dumps({**CONFIG_MAP, "data": {"cap": 8}})
    with pytest.raises(LocalClusterError, match="data.cap"):
        _kubectl(apiserver, "apply", "--server-side", "-f", "-", stdin=body)


def test_a_stranger_may_not_write(apiserver: ApiServer) -> None:
    answer = "Forbidden|forbidden"
    with pytest.raises(LocalClusterError, match=answer):
        _kubectl(apiserver, "create", "configmap", "theirs", "--as=nobody")
