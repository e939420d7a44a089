"""The rights that the chart gives are enough, and an operator that loses them says so and waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import (
    CRD,
    as_account,
    create_demo,
    create_namespace,
    rendered_chart,
    running_operator,
    settle,
    write_models,
)

BINDINGS = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"


@pytest.fixture(scope="module")
def chart() -> list[dict[str, Any]]:
    """What `helm install` would create."""
    return rendered_chart("sluice")


@pytest.fixture(scope="module")
def restricted(
    apiserver: ApiServer,
    client: httpx.Client,
    chart: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ApiServer]:
    """The API server for one who is the chart's service account. What it needs for that is gone
    afterwards: Helm would find another owner of it."""
    paths = {
        "ServiceAccount": "/api/v1/namespaces/default/serviceaccounts",
        "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding": BINDINGS,
    }
    made = [body for body in chart if body["kind"] in paths]
    for body in made:
        assert client.post(paths[body["kind"]], json=body).is_success
    yield as_account(apiserver, client, "sluice", tmp_path_factory.mktemp("restricted"))
    for body in made:
        path = f"{paths[body['kind']]}/{body['metadata']['name']}"
        assert client.delete(path).is_success


def test_the_charts_rights_are_enough_and_their_loss_is_outlived(
    restricted: ApiServer, client: httpx.Client, tmp_path: Path, chart: list[dict[str, Any]]
) -> None:
    space = create_namespace(client, "rights")
    create_demo(space)
    models = write_models(tmp_path / "models")
    with running_operator(restricted, models, tmp_path / "operator.log") as operator:
        settle(operator, space)
        requests = "sluice_operator_api_requests_total"
        listed = {"verb": "GET", "kind": "Pod", "code": "200"}
        operator.wait("a second look for missed deletions",
                      lambda: operator.metric(requests, **listed) > 1)  # fmt: skip
        assert operator.metric(requests, code="403") == 0
        [binding] = [body for body in chart if body["kind"] == "ClusterRoleBinding"]
        assert client.delete(f"{BINDINGS}/{binding['metadata']['name']}").is_success
        space.delete("services", "demo")
        operator.wait(
            "a refusal",
            lambda: operator.metric(requests, code="403") > 0,
        )
        assert client.post(BINDINGS, json=binding).is_success
        operator.wait("the service", lambda: space.find("services", "demo") is not None, 90.0)


def test_writes_that_the_api_server_refuses_are_told_and_not_hammered(
    apiserver: ApiServer, client: httpx.Client, tmp_path: Path
) -> None:
    """After the third the next looks are 4, 8 and 16 s apart at least: three in half a minute, with
    five requests each. The operator itself asks now and then whether its kind is served."""
    space = create_namespace(client, "refused")
    create_demo(space, replicas=0)
    models, at_rest = write_models(tmp_path / "models"), "--resync-seconds=30"
    log = tmp_path / "operator.log"
    with running_operator(apiserver, models, log, space.name, at_rest) as operator:
        operator.wait("the children", space.has_children)
        operator.wait("a status", lambda: space.condition("Ready") != {})
        # Without a controller manager a deleted namespace ends never, and takes in nothing new.
        assert client.delete(f"/api/v1/namespaces/{space.name}").is_success
        space.delete("services", "demo")
        failed, requests = "sluice_operator_passes_total", "sluice_operator_api_requests_total"
        operator.wait("three refusals", lambda: operator.metric(failed, result="error") >= 3)
        said = space.condition("Stalled")
        assert (said["status"], said["reason"]) == ("True", "ApplyFailed")
        assert "being terminated" in said["message"]
        before = operator.metric(requests)
        time.sleep(30)
        assert operator.metric(requests) - before < 20


@pytest.fixture
def older_crd(client: httpx.Client) -> Iterator[None]:
    """A CRD without `status.url` and `status.batching.epoch`; put right afterwards."""
    status = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties"
    declared = {"/url": {"type": "string"}, "/batching/properties/epoch": {"type": "integer"}}

    def edit(operations: list[dict[str, Any]]) -> None:
        headers = {"Content-Type": "application/json-patch+json"}
        answer = client.patch(CRD, headers=headers, json=operations)
        assert answer.is_success, answer.text

    edit([{"op": "remove", "path": status + path} for path in declared])
    yield
    edit([{"op": "add", "path": status + path, "value": v} for path, v in declared.items()])


@pytest.mark.usefixtures("older_crd")
def test_an_operator_beside_an_older_crd_writes_all_of_its_status(
    restricted: ApiServer, client: httpx.Client, tmp_path: Path
) -> None:
    space = create_namespace(client, "older-crd")
    create_demo(space)
    models = write_models(tmp_path / "models")
    with running_operator(restricted, models, tmp_path / "operator.log", space.name) as operator:
        settle(operator, space)
        status = space.get("inferenceservices", "demo")["status"]
        assert (status["url"], status["batching"]["epoch"]) == ("http://demo.older-crd.svc", 0)


def test_no_right_is_a_wildcard_and_no_secret_can_be_listed(chart: list[dict[str, Any]]) -> None:
    [role] = [
        body
        for body in chart
        if body["kind"] == "ClusterRole" and body["metadata"]["name"] == "sluice"
    ]
    for rule in role["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert not {"list", "watch", "delete"} & set(rule["verbs"])
