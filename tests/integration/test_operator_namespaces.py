"""A namespace whose Role is gone, or never was there, holds up no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import (
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


def _revoke(client: httpx.Client, space: Namespace) -> None:
    """As the deletion of the namespace would, which takes a controller manager."""
    for plural in ("rolebindings", "roles"):
        assert client.delete(f"{RIGHTS}/{space.name}/{plural}/{RELEASE}").is_success


def _await_served(operator: OperatorProcess, *spaces: Namespace) -> None:
    names = [space.name for space in spaces]
    operator.wait(f"{names} to be served",
                  lambda: operator.health().get("namespaces") == names, 60.0)  # fmt: skip


def test_namespaces_come_and_go_while_the_others_are_served(
    account: ApiServer,
    client: httpx.Client,
    roles: list[dict[str, Any]],
    spaces: tuple[Namespace, Namespace],
    tmp_path: Path,
) -> None:
    one, two = spaces
    models, log = write_models(tmp_path / "models"), tmp_path / "operator.log"
    with running_operator(account, models, log, "", *FLAGS) as operator:
        _await_served(operator)
        assert "no namespace can be watched" in log.read_text()
        assert set(operator.health()["namespacesLeftOut"]) == {one.name, two.name}
        _grant(client, roles, one)
        _await_served(operator, one)
        create_demo(one)
        operator.wait("the children of one", one.has_children)
        _grant(client, roles, two)
        _await_served(operator, one, two)
        create_demo(two)
        operator.wait("the children of two", two.has_children)
        _revoke(client, one)
        _await_served(operator, two)
        two.delete("services", "demo")
        operator.wait("the service of two", lambda: two.find("services", "demo") is not None)
        assert "namespace watched-one is left out" in log.read_text()
        assert operator.process.poll() is None
        said = operator.health()["namespacesLeftOut"]
        assert "cannot list resource" in said[one.name]
