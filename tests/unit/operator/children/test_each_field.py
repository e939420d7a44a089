"""Each field of the object reaches a child, or is listed as the operator's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from sluice_operator.children import manifests
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.spec.service import parse
from unit.operator.objects import changed, static_batches, valid_object
from unit.operator.observations import SETTINGS

CRD = Path(__file__).parents[4] / "crds/inferenceservices.yaml"
HUB = {"uri": "hf://a/b"}
GPU = {"accelerator": "nvidia", "memory": "24Gi"}
VLLM = {"engine": {"name": "VLLM"}, "hardware": GPU}
CUSTOM = {"engine": {"name": "Custom", "image": "r/e:1"}}
ENV = "engine.env"


class Field(NamedTuple):
    """A value of the field at a path, and a text that it puts into some child. `beside`: the rest
    of such a spec."""

    value: Any
    gives: str
    beside: Mapping[str, Any] = {}
    path: str = ""


def _taint(**given: Any) -> Field:
    whole = {"key": "a", **given}
    text = json.dumps(whole, sort_keys=True)[1:-1]
    return Field([whole], text, path="hardware.tolerations")


def _variable(kind: str, **given: Any) -> Field:
    source = {"name": "from-a", "key": "of-a", **given}
    text = json.dumps(source, sort_keys=True)[1:-1]
    return Field([{"name": "A", "valueFrom": {kind: source}}], text, CUSTOM, ENV)


FIELDS: dict[str, Field] = {
    "model.uri": Field("file:///models/other", "--model=/models/other"),
    "model.revision": Field("v1", "--revision=v1", {"model": HUB}),
    "model.name": Field("other", "--served-model-name=other"),
    "model.dtype": Field("float16", "--dtype=float16"),
    "model.maxModelLen": Field(512, "--max-model-len=512"),
    "model.secretRef.name": Field("a-secret", '"name": "a-secret"', {"model": HUB}),
    "model.secretRef.key": Field(
        {"name": "a", "key": "a-key"}, '"key": "a-key"', {"model": HUB}, "model.secretRef"
    ),
    "model.cache.pvc": Field("a-claim", '"claimName": "a-claim"', {"model": HUB}),
    "engine.name": Field({"name": "VLLM"}, '"vllm", "serve"', {"hardware": GPU}, "engine"),
    "engine.image": Field("r/e:2", '"image": "r/e:2"'),
    "engine.command": Field(["a-program"], '"command": ["a-program"]'),
    "engine.args": Field(["--seed=7"], "--seed=7"),
    "engine.env[].name": Field([{"name": "AN_A"}], '"name": "AN_A"', CUSTOM, ENV),
    "engine.env[].value": Field([{"name": "A", "value": "a-b"}], '"value": "a-b"', CUSTOM, ENV),
    "engine.env[].valueFrom.secretKeyRef.name": _variable("secretKeyRef"),
    "engine.env[].valueFrom.secretKeyRef.key": _variable("secretKeyRef"),
    "engine.env[].valueFrom.secretKeyRef.optional": _variable("secretKeyRef", optional=True),
    "engine.env[].valueFrom.configMapKeyRef.name": _variable("configMapKeyRef"),
    "engine.env[].valueFrom.configMapKeyRef.key": _variable("configMapKeyRef"),
    "engine.env[].valueFrom.configMapKeyRef.optional": _variable("configMapKeyRef", optional=True),
    "engine.port": Field(9000, "--upstream=http://127.0.0.1:9000", CUSTOM),
    "engine.healthPath": Field("/well", "--health-path=/well", CUSTOM),
    "hardware.accelerator": Field(
        {"accelerator": "nvidia", "memory": "24Gi"}, '"nvidia.com/gpu": "1"', path="hardware"
    ),
    "hardware.gpus": Field(4, "--tensor-parallel-size=4", VLLM),
    "hardware.resource": Field("amd.com/gpu", '"amd.com/gpu": "1"', VLLM),
    "hardware.nodes": Field(3, '"size": 3', VLLM),
    "hardware.memory": Field("3Gi", '"memory": "3Gi"'),
    "hardware.hostMemory": Field("5Gi", '"memory": "5Gi"', {"hardware": GPU}),
    "hardware.cpu": Field("3", '"cpu": "3"'),
    "hardware.nodeSelector": Field({"a": "b-c"}, '"nodeSelector": {"a": "b-c"}'),
    "hardware.tolerations[].key": _taint(operator="Exists"),
    "hardware.tolerations[].operator": _taint(operator="Exists"),
    "hardware.tolerations[].value": _taint(value="b"),
    "hardware.tolerations[].effect": _taint(effect="NoExecute", value="b"),
    "hardware.tolerations[].tolerationSeconds": _taint(
        effect="NoExecute", tolerationSeconds=5, value="b"
    ),
    "hardware.runtimeClassName": Field("a-class", '"runtimeClassName": "a-class"'),
    "batching.mode": Field(static_batches(8), "--batching-mode=static", path="batching"),
    "batching.static.size": Field(static_batches(7), "--static-batch-size=7", path="batching"),
    "batching.static.wait": Field(
        static_batches(8, "1.5s"), "--static-batch-timeout-ms=1500", path="batching"
    ),
    "batching.order": Field("FCFS", '"scheduling_policy": "fcfs"'),
    "batching.maxNumBatchedTokens": Field(64, "--max-num-batched-tokens=64"),
    "batching.memoryUtilization": Field("0.5", "--gpu-memory-utilization=0.5"),
    "batching.prefixCaching": Field(False, "--no-enable-prefix-caching"),
    "batching.speculation": Field(
        "Auto", "--speculative-config", {"batching": {"speculation": "Never"}}
    ),
    "slo.timeToFirstToken": Field("123ms", '"slo_ttft_ms": "123.0"'),
    "slo.interTokenLatency": Field("45ms", '"slo_itl_ms": "45.0"'),
    "slo.endToEnd": Field("9s", '"slo_e2e_ms": "9000.0"'),
    "slo.overload": Field("Shed", '"overload": "Shed"'),
    "slo.holdShare": Field("0.25", '"hold_share": "0.25"'),
    "rollout": Field("Replace", '"maxSurge": 0'),
    "drain.timeout": Field("77s", "--shutdown-timeout=77"),
    "apiKeySecretRef.name": Field("a-keys", '"secretName": "a-keys"'),
    "api.maxBodySize": Field("2Mi", "--max-body-bytes=2097152"),
    "api.keepAliveTimeout": Field("90s", "--keep-alive-timeout=90"),
    "api.trustedProxies": Field(["10.0.0.0/8"], "10.0.0.0/8"),
    "batches.claimName": Field("a-claim", '{"claimName": "a-claim"}'),
    "podTemplate.metadata.labels": Field({"a": "b-c"}, '"a": "b-c"'),
    "podTemplate.metadata.annotations": Field({"a": "b-c"}, '"a": "b-c"'),
    "podTemplate.spec": Field({"priorityClassName": "high"}, '"priorityClassName": "high"'),
}
OF_THE_OPERATOR = {
    "model.task": "the checkpoint is compared with it, and says it to the worker",
    "batching.maxNumSeqs": "a bound of the ceiling, which is given here",
    "batching.initialNumSeqs": "the first cap",
    "batching.minNumSeqs": "a bound of the cap",
    "slo.percentile": "of the tuner's verdicts",
    "slo.window": "of the tuner's verdicts",
    "slo.mode": "of the tuner's decisions",
    "scaling.minReplicas": "a bound of the replicas",
    "scaling.maxReplicas": "a bound of the replicas",
    "scaling.behavior.scaleUp.stabilizationWindowSeconds": "of the tuner's decisions",
    "scaling.behavior.scaleDown.stabilizationWindowSeconds": "of the tuner's decisions",
    "replicas": "replaces the tuner's number",
    "suspend": "replaces the tuner's number",
}
"""Fields that no child shows while cap and replicas are given, and what reads them."""


def _leaves(schema: Mapping[str, Any], path: str) -> Iterator[str]:
    if "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif "properties" in schema.get("items", {}):
        yield from _leaves(schema["items"], f"{path}[]")
    else:
        yield path


def _children(body: dict[str, Any]) -> str:
    """All children of an object as one text."""
    service = parse(body)
    made = [
        manifests.configmap(service, SETTINGS, DecidedRuntime(1, 4, 2)),
        manifests.secret(service, "token"),
        manifests.kube_service(service),
        manifests.disruption_budget(service),
        manifests.workload(service, SETTINGS, ceiling=8, replicas=2, live=None),
    ]
    for manifest in made:  # the template is there a second time
        manifest["metadata"]["annotations"] = {}
    return json.dumps(made, sort_keys=True)


def test_the_list_is_the_crds() -> None:
    root = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    told = FIELDS.keys() | OF_THE_OPERATOR.keys()
    assert set(_leaves(root["properties"]["spec"], "")) == told
    assert not FIELDS.keys() & OF_THE_OPERATOR.keys()


@pytest.mark.parametrize("path", FIELDS)
def test_each_field_reaches_a_child(path: str) -> None:
    field, before = FIELDS[path], valid_object()
    for part, value in field.beside.items():
        before = changed(before, f"spec.{part}", value)
    after = changed(before, f"spec.{field.path or path}", field.value)
    assert field.gives in _children(after)
    assert field.gives not in _children(before)


def test_the_queue_of_kueue_reaches_what_makes_the_pods_and_restarts_none() -> None:
    before, label = valid_object(), {"kueue.x-k8s.io/queue-name": "team-a"}
    after = changed(before, "metadata.labels", {**label, "other": "a"})
    plain, queued = (
        manifests.workload(parse(body), SETTINGS, ceiling=8, replicas=2, live=None)
        for body in (before, after)
    )
    assert queued["metadata"]["labels"] == {**plain["metadata"]["labels"], **label}
    assert queued["spec"] == plain["spec"]
