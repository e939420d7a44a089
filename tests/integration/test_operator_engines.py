"""A real operator on a real API server: an object of another engine becomes pods with a gate."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from integration.apiserver import ApiServer
from integration.operator_runs import create_demo, create_namespace, running_operator, settle

COMPILATION = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": [*range(8, 736, 8)],
}
ARGS = [f"--compilation-config={json.dumps(COMPILATION)}", *(f"--flag-{n}=1" for n in range(67))]
"""Users give a JSON object as one value, and tools write 68 of them."""


def test_a_vllm_object_becomes_a_deployment_with_a_gate(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    space = create_namespace(client, "engines")
    flags = ("--gate-image=registry.invalid/operator:1", "--engine-image=VLLM=registry.invalid/v:1")
    log = tmp_path / "operator.log"
    with running_operator(apiserver, models, log, space.name, *flags) as operator:
        hardware = {"accelerator": "nvidia", "memory": "8Gi"}
        create_demo(space, engine={"name": "VLLM", "args": ARGS}, hardware=hardware)
        settle(operator, space)
        pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
        [gate], [copy, engine] = pod["containers"], pod["initContainers"]
        assert (gate["name"], gate["image"]) == ("gate", "registry.invalid/operator:1")
        assert (engine["image"], engine["restartPolicy"]) == ("registry.invalid/v:1", "Always")
        assert "restartPolicy" not in copy
        assert engine["args"][0] == "/models/demo"
        assert "--host=127.0.0.1" in engine["args"]
        assert set(ARGS) <= set(engine["args"])
        ceiling = space.get("inferenceservices", "demo")["status"]["batching"]["ceiling"]
        assert f"--max-num-seqs={ceiling}" in engine["args"]
        assert f"--max-num-seqs={ceiling}" in gate["args"]
        assert space.condition("ModelFits")["status"] == "True"
        writes = operator.writes()
        operator.await_passes(3)
        assert operator.writes() == writes, "what the API server stores is no drift"
        space.delete("inferenceservices", "demo")


def test_the_longest_arguments_that_are_taken_reach_the_pod(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    """Quotes are the worst of usual text: JSON doubles them."""
    space = create_namespace(client, "longest")
    engine = {"name": "Custom", "image": "r/e:1", "args": ['"' * 4096] * 16}
    with running_operator(apiserver, models, tmp_path / "operator.log", space.name) as operator:
        create_demo(space, engine=engine)
        operator.wait("the Deployment", lambda: space.find("deployments", "demo") is not None)
        pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
        assert pod["initContainers"][0]["args"] == engine["args"]
        space.delete("inferenceservices", "demo")
