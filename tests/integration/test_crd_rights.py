"""The operator, with the rights of its chart and no others, does all that it does."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import Namespace, running_operator, write_models
from sluice_cluster import binaries
from sluice_cluster.settings import ClusterSettings
from sluice_cluster.shell import Word, run
from unit.operator.batches import valid_batch
from unit.operator.objects import changed, valid_object

CHART = Path(__file__).parents[2] / "charts" / "sluice"
SERVED = "rights-served"
HOME = "rights-home"


def kubectl(server: ApiServer, *arguments: str, stdin: str | None = None) -> str:
    command: list[Word] = [server.kubectl, f"--kubeconfig={server.kubeconfig}", *arguments]
    return run(command, stdin=stdin)


@pytest.fixture(scope="module")
def space(client: httpx.Client) -> Namespace:
    for name in (SERVED, HOME):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        assert client.post("/api/v1/namespaces", json=body).is_success
    return Namespace(client, SERVED)


@pytest.fixture(scope="module")
def as_operator(
    apiserver: ApiServer, space: Namespace, tmp_path_factory: pytest.TempPathFactory
) -> ApiServer:
    """The API server as the chart's service account sees it."""
    helm = binaries.ensure(ClusterSettings.from_environment().paths, ("helm",)) / "helm"
    rendered = run(
        [helm, "template", "sluice", CHART, "--namespace", HOME, "--set", "image=a",
         "--set", f"worker.image=b,watchNamespaces={{{space.name}}}",
         "--show-only", "templates/rbac.yaml"]
    )  # fmt: skip
    kubectl(apiserver, "apply", "-f", "-", stdin=rendered)
    token = kubectl(apiserver, "create", "token", "sluice", "-n", HOME).strip()
    path = tmp_path_factory.mktemp("rights") / "kubeconfig"
    path.write_text(json.dumps(_kubeconfig(apiserver, token)))
    return dataclasses.replace(apiserver, kubeconfig=path)


def _kubeconfig(server: ApiServer, token: str) -> dict[str, object]:
    cluster = {"server": server.url, "certificate-authority": str(server.certificate_authority)}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "a", "cluster": cluster}],
        "users": [{"name": "a", "user": {"token": token}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    }


def test_an_object_is_served_and_repaired_without_a_single_refusal(
    as_operator: ApiServer, space: Namespace, tmp_path: Path
) -> None:
    models = write_models(tmp_path / "models")
    log = tmp_path / "operator.log"
    with running_operator(as_operator, models, log, space.name) as operator:
        space.create("inferenceservices", changed(valid_object(), "metadata.namespace", space.name))
        operator.wait("the children", space.has_children)
        operator.wait("a status", lambda: space.condition("Ready") != {})
        batch = changed(valid_batch(), "metadata.namespace", space.name)
        space.create("inferencebatches", batch)
        accepted = partial(space.condition, "Accepted", "docs", "inferencebatches")
        operator.wait("a batch", lambda: accepted().get("status") == "True")
        space.patch("inferencebatches", "docs", {"spec": {"suspend": True}})
        operator.wait("its edit", lambda: space.get("jobs", "docs")["spec"]["suspend"])
        for plural, name in (("deployments", "demo"), ("secrets", "demo-admin")):
            space.delete(plural, name)
        operator.wait("repaired children", space.has_children)
        operator.wait("its events", lambda: len(space.events("ChildRestored")) >= 2)
        operator.await_passes(2)
        assert operator.metric("sluice_operator_api_requests_total", code="403") == 0
    assert "orbidden" not in log.read_text()
