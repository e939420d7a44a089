"""Claims on pods with many devices, and on groups of pods over many nodes."""

from __future__ import annotations

from typing import Any

import pytest
from sluice_operator.children import manifests
from sluice_operator.cluster.observed import Pod, pod_of, rollout_of, with_followers
from unit.operator.observations import NOW, SETTINGS, create_service, pod_body

SHARED = {"name": "shm", "emptyDir": {"medium": "Memory"}}
ENGINES = ("VLLM", "SGLang", "TGI", "LlamaCpp", "Ollama", "Custom")
MIG = "nvidia.com/mig-1g.10gb"
GPUS = {"accelerator": "nvidia", "memory": "80Gi", "gpus": 4}


def workload(engine: str, hardware: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What makes the pods. `changes`: of the spec."""
    args, uri = changes.pop("args", []), {"model__uri": "file:///models/a.gguf"}
    named = {"name": engine, "image": "r/e:1", "args": args}
    service = create_service(engine=named, hardware=hardware, **{**uri, **changes})
    manifests.check(service, SETTINGS)
    return manifests.workload(service, SETTINGS, ceiling=8, replicas=2, live=None)


def engine_of(spec: dict[str, Any]) -> dict[str, Any]:
    """The engine's container of a pod, wherever it lies."""
    parts = [*spec.get("initContainers", []), *spec["containers"]]
    [found] = [one for one in parts if one["name"] == "engine"]
    return dict(found)


def args_of(engine: str, hardware: dict[str, Any], *args: str) -> list[str]:
    spec = workload(engine, hardware, args=list(args))["spec"]["template"]["spec"]
    return list(engine_of(spec)["args"])


@pytest.mark.parametrize(
    ("engine", "flag"),
    [("VLLM", "--tensor-parallel-size=4"), ("SGLang", "--tp-size=4"), ("TGI", "--num-shard=4")],
)
def test_devices_are_the_tensor_parallel_size(engine: str, flag: str) -> None:
    assert flag in args_of(engine, GPUS)
    alone = args_of(engine, {**GPUS, "gpus": 1})
    assert not {"--tensor-parallel-size", "--tp-size", "--num-shard"} & {
        arg.partition("=")[0] for arg in alone
    }


@pytest.mark.parametrize(
    ("engine", "given"),
    [
        ("VLLM", ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]),
        ("VLLM", ["-tp", "2", "-dp", "2"]),
        ("VLLM", ["--data_parallel_size", "4"]),
        ("SGLang", ["--tp=2", "--dp-size=2"]),
        ("TGI", ["--num-shard", "2"]),
    ],
)
def test_whoever_splits_the_model_by_hand_splits_all_of_it(engine: str, given: list[str]) -> None:
    others = [arg for arg in args_of(engine, GPUS, *given) if arg not in given]
    assert not [arg for arg in others if arg.startswith(("--tensor", "--tp", "--num-shard"))]


@pytest.mark.parametrize("engine", ENGINES)
def test_processes_on_many_devices_share_memory(engine: str) -> None:
    spec = workload(engine, GPUS)["spec"]["template"]["spec"]
    assert SHARED in spec["volumes"]
    mounts = engine_of(spec)["volumeMounts"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in mounts  # noqa: S108
    alone = workload(engine, {**GPUS, "gpus": 1})["spec"]["template"]["spec"]
    assert SHARED not in alone["volumes"]


def test_an_overlays_own_shared_memory_stays_alone() -> None:
    sized = {"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    mount = {"name": "dshm", "mountPath": "/dev/shm"}  # noqa: S108
    given = {"volumes": [sized], "containers": [{"name": "engine", "volumeMounts": [mount]}]}
    spec = workload("VLLM", GPUS, podTemplate={"spec": given})["spec"]["template"]["spec"]
    assert SHARED not in spec["volumes"]
    assert sized in spec["volumes"]
    assert mount in engine_of(spec)["volumeMounts"]


@pytest.mark.parametrize(
    ("hardware", "devices", "cpu"),
    [
        (GPUS, {"nvidia.com/gpu": "4"}, "6"),
        ({**GPUS, "gpus": 1, "resource": MIG}, {MIG: "1"}, "2"),
        ({**GPUS, "accelerator": "other", "resource": "amd.com/gpu"}, {"amd.com/gpu": "4"}, "6"),
        ({**GPUS, "accelerator": "other"}, {}, "6"),
        ({"accelerator": "other", "memory": "16Gi", "cpu": "3"}, {}, "3"),
    ],
)  # fmt: skip
def test_a_pod_asks_for_its_devices(
    hardware: dict[str, Any], devices: dict[str, str], cpu: str
) -> None:
    spec = workload("VLLM", hardware)["spec"]["template"]["spec"]
    limits = engine_of(spec)["resources"]["limits"]
    assert limits == {"cpu": cpu, **devices}


def test_a_group_is_a_gate_and_its_engine_and_engines_that_follow() -> None:
    made = workload("VLLM", {**GPUS, "nodes": 2})
    assert made["kind"] == "LeaderWorkerSet"
    assert made["metadata"]["name"] == "demo-group", "its own Service must not take ours' name"
    group = made["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    first, other = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    assert [one["name"] for one in first["containers"]] == ["gate"]
    assert [one["name"] for one in other["containers"]] == ["engine"]
    joined = {
        "--tensor-parallel-size=4", "--pipeline-parallel-size=2", "--nnodes=2",
        "--node-rank=$(LWS_WORKER_INDEX)", "--master-addr=$(LWS_LEADER_ADDRESS)",
    }  # fmt: skip
    for spec in (first, other):
        assert joined <= set(engine_of(spec)["args"])
        assert SHARED in spec["volumes"]
    assert "--headless" in engine_of(other)["args"]
    assert "--headless" not in engine_of(first)["args"]
    assert not {"livenessProbe", "restartPolicy"} & engine_of(other).keys()
    secrets = [volume for volume in other["volumes"] if "secret" in volume]
    assert not secrets, "the gate's token is the gate's"


def test_no_service_and_no_budget_is_for_the_pods_that_follow() -> None:
    service = create_service()
    group = workload("VLLM", {**GPUS, "nodes": 2})["spec"]["leaderWorkerTemplate"]
    first, other = (
        group[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate")
    )
    for picked in (
        manifests.kube_service(service)["spec"]["selector"],
        manifests.disruption_budget(service)["spec"]["selector"]["matchLabels"],
    ):
        assert picked.items() <= first.items()
        assert not picked.items() <= other.items()
    wanted = dict(pair.split("=") for pair in manifests.followers(service).split(","))
    assert wanted.items() <= other.items()
    assert not wanted.items() <= first.items()


def test_sglang_and_a_custom_engine_join_in_their_own_ways() -> None:
    group = workload("SGLang", {**GPUS, "nodes": 3})["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        args = engine_of(group[name]["spec"])["args"]
        assert {"--nnodes=3", "--tp-size=4", "--pp-size=3"} <= set(args)
        assert "--dist-init-addr=$(LWS_LEADER_ADDRESS):20000" in args
    own = workload("Custom", {**GPUS, "nodes": 3}, args=["--rank=$(LWS_WORKER_INDEX)"])
    group = own["spec"]["leaderWorkerTemplate"]
    assert engine_of(group["workerTemplate"]["spec"])["args"] == ["--rank=$(LWS_WORKER_INDEX)"]


def test_an_overlay_is_for_each_pod_of_a_group_and_the_gates_part_for_the_first() -> None:
    sidecar = {"name": "logs", "image": "r/l:1"}
    gate = {"name": "gate", "resources": {"limits": {"memory": "9Gi"}}}
    overlay = {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [gate, sidecar]}}
    made = workload("VLLM", {**GPUS, "nodes": 2}, podTemplate=overlay)
    group = made["spec"]["leaderWorkerTemplate"]
    for name, others in (("leaderTemplate", ["gate"]), ("workerTemplate", ["engine"])):
        assert group[name]["metadata"]["labels"]["team"] == "a"
        assert [one["name"] for one in group[name]["spec"]["containers"]] == [*others, "logs"]


def test_the_templates_of_a_group_stay_until_the_object_changes() -> None:
    live = workload("VLLM", {**GPUS, "nodes": 2})
    engine = {"name": "VLLM", "image": "r/e:1", "args": []}
    hardware, uri = {**GPUS, "nodes": 2}, "file:///models/a.gguf"
    service = create_service(engine=engine, hardware=hardware, model__uri=uri)
    again = manifests.workload(service, SETTINGS, ceiling=4, replicas=3, live=live)
    assert again["spec"] == {**live["spec"], "replicas": 3}


def _pod(name: str, **status: Any) -> Pod:
    return pod_of(pod_body(name, **status), NOW)


def test_a_first_pod_says_what_its_group_lacks() -> None:
    unready = {"conditions": [{"type": "Ready", "status": "False"}]}
    homeless = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/1 nodes: 1 Insufficient amd.com/gpu.",
                "lastTransitionTime": "2025-10-09T08:00:00Z"}  # fmt: skip
    pods = (_pod("demo-group-0", **unready), _pod("demo-group-1"))
    lost = [_pod(f"demo-group-{n}-1", conditions=[homeless]) for n in (0, 1)]
    first, second = with_followers(pods, lost)
    assert first.trouble is not None
    assert first.trouble.reason == "Unschedulable"
    assert first.trouble.message.startswith("demo-group-0-1 of its group: ")
    assert first.has_no_room
    assert first.lacks_room
    assert second.trouble is None, "it is ready"
    assert with_followers(pods, []) == pods


def test_groups_that_are_all_up_make_no_trouble() -> None:
    """A Deployment's Progressing is False when it is stuck, a LeaderWorkerSet's when all is up."""
    status = {
        "observedGeneration": 2, "replicas": 2, "updatedReplicas": 2, "readyReplicas": 2,
        "conditions": [{"type": "Progressing", "status": "False", "reason": "GroupsProgressing"}],
    }  # fmt: skip
    spec: dict[str, Any] = {"leaderWorkerTemplate": {}}
    rollout = rollout_of({"metadata": {"generation": 2}, "spec": spec, "status": status})
    assert (rollout.observed, rollout.ready, rollout.trouble) == (True, 2, None)
    stuck = rollout_of({"metadata": {"generation": 2}, "spec": {}, "status": status})
    assert stuck.trouble is not None
