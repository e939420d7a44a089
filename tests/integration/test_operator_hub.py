"""A real operator and hf:// objects: sized before any pod, and started where the hub is away."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import (
    CHILDREN,
    Namespace,
    OperatorProcess,
    create_demo,
    running_operator,
    settle,
)
from sluice_core.hub.reference import HubModel
from sluice_worker.base import config
from unit.operator.model.test_checkpoint import CONFIG
from unit.worker.hub.hub_server import COMMIT, REPO, TOKEN, Hub, running_hub, safetensors

URI = f"hf://{REPO}"
TENSOR = {"w": {"dtype": "BF16", "shape": [1 << 23], "data_offsets": [0, 1 << 24]}}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A private model of 16 MiB, of which only the headers are there to be read."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors(TENSOR, 100_000),
    }
    with running_hub(Hub(files, needs_token=True)) as served:
        yield served


@pytest.fixture(scope="module")
def operator(
    apiserver: ApiServer,
    client: httpx.Client,
    hub: Hub,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[OperatorProcess]:
    folder = tmp_path_factory.mktemp("operator")
    flag = f"--hub-endpoint={hub.url}"
    with running_operator(apiserver, folder, folder / "operator.log", "", flag) as process:
        yield process


@pytest.fixture
def space(space: Namespace) -> Namespace:
    """With the token of the hub."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hf"}}
    space.create("secrets", {**secret, "stringData": {"token": TOKEN + "\n"}})
    return space


def container(space: Namespace) -> dict[str, Any]:
    """The worker's container."""
    pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
    found: dict[str, Any] = pod["containers"][0]
    return found


def test_a_gated_model_is_sized_from_its_headers_and_its_pods_are_pinned(
    operator: OperatorProcess, space: Namespace, hub: Hub, tmp_path: Path
) -> None:
    create_demo(space, model={"uri": URI, "secretRef": {"name": "hf"}, "cache": {"pvc": "models"}})
    settle(operator, space)
    assert space.condition("ModelFits")["status"] == "True"
    said = space.get("inferenceservices", "demo")["status"]["model"]
    assert (said["bytes"], said["resolvedRevision"]) == (1 << 24, COMMIT)
    made = container(space)
    assert "ephemeral-storage" not in made["resources"]["requests"]
    assert {"name": "HF_ENDPOINT", "value": hub.url} in made["env"]
    for old in ("/etc/sluice/admin", "/etc/sluice/runtime"):
        made["args"] = [argument.replace(old, str(tmp_path)) for argument in made["args"]]
    (tmp_path / "token").write_text("secret")
    parsed = config.parse(made["args"], {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN})
    assert parsed.hub is not None
    assert parsed.hub.model == HubModel(REPO, COMMIT)
    assert (parsed.model_name, parsed.hub.access.cache) == ("demo", Path("/mnt/cache"))
    everything = json.dumps([space.all(plural) for plural in CHILDREN if plural != "secrets"])
    assert TOKEN not in everything + operator.log.read_text()


def test_a_pod_without_a_claim_asks_for_its_nodes_disk_and_the_server_changes_nothing_of_it(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, model={"uri": URI, "secretRef": {"name": "hf"}})
    settle(operator, space)
    assert container(space)["resources"]["requests"]["ephemeral-storage"] == "2Gi"
    assert "ephemeral-storage" not in container(space)["resources"]["limits"]
    writes = operator.writes()
    operator.await_passes(3)
    assert operator.writes() == writes


def test_what_may_not_be_read_gets_no_pod_and_a_sentence(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, model={"uri": URI})
    operator.wait("the verdict", lambda: space.condition("ModelFits").get("status") == "False")
    operator.await_passes(3)
    assert space.find("deployments", "demo") is None
    assert "name in spec.model.secretRef" in space.condition("ModelFits")["message"]
    space.patch("inferenceservices", "demo", {"spec": {"model": {"secretRef": {"name": "hf"}}}})
    settle(operator, space)
    assert space.condition("ModelFits")["status"] == "True"


def test_a_secret_that_is_not_for_a_hub_is_not_sent_to_one(
    operator: OperatorProcess, space: Namespace, hub: Hub
) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"}}
    held = {"username": "somebody", "token": "canary"}
    space.create("secrets", {**secret, "type": "kubernetes.io/basic-auth", "stringData": held})
    create_demo(space, model={"uri": URI, "secretRef": {"name": "login"}})
    operator.wait("the verdict", lambda: space.condition("ModelFits").get("status") == "False")
    assert "login must be a Secret of type Opaque" in space.condition("ModelFits")["message"]
    assert space.find("deployments", "demo") is None


def test_while_the_hub_is_away_the_pods_size_themselves(
    operator: OperatorProcess, space: Namespace, hub: Hub
) -> None:
    hub.answers["/v2"] = [(503, {})] * 100
    create_demo(space, model={"uri": URI, "revision": "v2"})
    settle(operator, space)
    said = space.condition("ModelFits")
    assert (said["status"], said["reason"]) == ("Unknown", "HeadersUnavailable")
    made = container(space)
    assert "--revision=v2" in made["args"]
    assert not any(argument.startswith("--max-num-seqs=") for argument in made["args"])
