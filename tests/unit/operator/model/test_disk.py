"""Claims on the disk that a pod asks for, for a hub's model that it keeps on its node."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sluice_core.hub.listing import RemoteFile
from sluice_operator.children import manifests
from sluice_operator.model import hub as module
from sluice_operator.model.checkpoint import Unread
from sluice_operator.model.disk import Download, download_of, with_spare
from sluice_operator.model.fit import judge
from sluice_operator.model.hub import HubSource
from unit.operator.model.test_checkpoint import CONFIG
from unit.operator.model.test_operator_hub import header
from unit.operator.observations import SETTINGS, create_service
from unit.worker.hub.hub_server import REPO, Hub, running_hub, safetensors

GB = 10**9
HUB = {"uri": f"hf://{REPO}"}
LARGE = {"accelerator": "cpu", "memory": "1024Gi"}


def requested(files: dict[str, bytes], engine: str, **model: Any) -> str | None:
    """`ephemeral-storage` that the pod asks for, of a model that a real hub serves."""
    image = {} if engine == "Sluice" else {"image": "r/e:1"}
    service = create_service(
        model={**HUB, **model}, engine={"name": engine, **image}, hardware=LARGE
    )
    with running_hub(Hub(files)) as hub:
        fit = judge(
            service.spec, module.read(HubSource(hub.url, REPO, "main"), "auto", on_cpu=True)
        )
    made = manifests.workload(
        service, SETTINGS, ceiling=4, replicas=1, live=None, disk_bytes=fit.disk_bytes
    )
    pod = made["spec"]["template"]["spec"]
    asked = [
        one["resources"]["requests"]["ephemeral-storage"]
        for one in (*pod["containers"], *pod.get("initContainers", ()))
        if "ephemeral-storage" in one["resources"]["requests"]
    ]
    assert not any("ephemeral-storage" in one["resources"]["limits"] for one in pod["containers"])
    return asked[0] if asked else None


def of_140_gb() -> dict[str, bytes]:
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors(header(70 * GB), 1000),
    }


@pytest.mark.parametrize("engine", ["Sluice", "VLLM", "SGLang", "TGI", "Custom"])
def test_a_pod_asks_for_the_disk_that_its_model_takes(engine: str) -> None:
    """LLMKube#1452: without a request it filled the node, and the kubelet evicted others."""
    assert requested(of_140_gb(), engine) == "138Gi"


def test_a_claim_takes_none_of_the_nodes_disk() -> None:
    assert requested(of_140_gb(), "Sluice", cache={"pvc": "models"}) is None


def test_files_that_we_cannot_serve_take_disk_too() -> None:
    assert requested({"model-Q4_K_M.gguf": bytes(4 << 20)}, "LlamaCpp") == "2Gi"
    unknown = {"config.json": b"{}", "pytorch_model.bin": bytes(4 << 20)}
    assert requested(unknown, "VLLM") == "2Gi"


def test_a_model_that_is_not_read_asks_for_none() -> None:
    assert judge(create_service(model=HUB).spec, Unread("the hub is away")).disk_bytes == 0


def test_what_is_known_later_restarts_no_pod() -> None:
    service = create_service(model=HUB)
    first = manifests.workload(service, SETTINGS, ceiling=4, replicas=1, live=None)
    then = manifests.workload(
        service, SETTINGS, ceiling=4, replicas=1, live=first, disk_bytes=150 << 30
    )
    assert then == first


@pytest.mark.parametrize(
    ("sizes", "download"),
    [
        ({"a.safetensors": 3, "b.safetensors": 4, "a.bin": 9}, Download(7, 0)),
        ({"a.bin": 9, "b.pth": 1, "c.json": 5}, Download(10, 0)),
        ({"m-Q2_K.gguf": 2, "m-Q4_K_M.gguf": 4, "m-F16.gguf": 16}, Download(0, 4)),
        (
            {"q/m-q4_k_m-00001-of-00002.gguf": 4, "q/m-q4_k_m-00002-of-00002.gguf": 3},
            Download(0, 7),
        ),
        ({"m-Q8_0.gguf": 8, "m-F16.gguf": 16, "mmproj-F16.gguf": 1}, Download(0, 8)),
        ({"a.safetensors": None}, Download(0, 0)),
        ({}, Download(0, 0)),
    ],
)
def test_an_engine_fetches_one_format_and_one_quantisation(
    sizes: dict[str, int | None], download: Download
) -> None:
    assert download_of([RemoteFile(name, size, "") for name, size in sizes.items()]) == download


def test_a_download_gets_a_twentieth_and_a_gib_more() -> None:
    assert with_spare(0) == 0
    assert with_spare(1) == 2 << 30
    assert with_spare(140 * GB) == 138 << 30
