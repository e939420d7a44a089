"""A real operator on a real API server: an object of another engine becomes pods with a gate."""

from __future__ import annotations

from pathlib import Path

import httpx
from integration.apiserver import ApiServer
from integration.operator_runs import create_demo, create_namespace, running_operator, settle


def test_a_vllm_object_becomes_a_deployment_with_a_gate(
    apiserver: ApiServer, client: httpx.Client, models: Path, tmp_path: Path
) -> None:
    space = create_namespace(client, "engines")
    flags = ("--gate-image=registry.invalid/operator:1", "--engine-image=VLLM=registry.invalid/v:1")
    log = tmp_path / "operator.log"
    with running_operator(apiserver, models, log, space.name, *flags) as operator:
        hardware = {"accelerator": "nvidia", "memory": "8Gi"}
        create_demo(space, engine={"name": "VLLM", "args": ["--seed=1"]}, hardware=hardware)
        settle(operator, space)
        pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
        [gate], [copy, engine] = pod["containers"], pod["initContainers"]
        assert (gate["name"], gate["image"]) == ("gate", "registry.invalid/operator:1")
        assert (engine["image"], engine["restartPolicy"]) == ("registry.invalid/v:1", "Always")
        assert "restartPolicy" not in copy
        assert engine["args"][0] == "/models/demo"
        assert "--host=127.0.0.1" in engine["args"]
        ceiling = space.get("inferenceservices", "demo")["status"]["batching"]["ceiling"]
        assert f"--max-num-seqs={ceiling}" in engine["args"]
        assert f"--max-num-seqs={ceiling}" in gate["args"]
        assert space.condition("ModelFits")["status"] == "True"
        writes = operator.writes()
        operator.await_passes(3)
        assert operator.writes() == writes, "what the API server stores is no drift"
        space.delete("inferenceservices", "demo")
