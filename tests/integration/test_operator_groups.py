"""Devices, groups and queues on a real API server; nothing runs there."""

from __future__ import annotations

from integration.operator_runs import Namespace, OperatorProcess, create_demo, settle

VLLM = {"name": "VLLM", "image": "r/e:1"}
QUEUE = "kueue.x-k8s.io/queue-name"


def test_devices_of_any_name_are_asked_for_and_the_server_changes_nothing(
    operator: OperatorProcess, space: Namespace
) -> None:
    hardware = {"accelerator": "other", "resource": "amd.com/gpu", "gpus": 2, "memory": "64Gi"}
    create_demo(space, engine=VLLM, hardware=hardware)
    settle(operator, space)
    pod = space.get("deployments", "demo")["spec"]["template"]["spec"]
    engine = pod["initContainers"][-1]
    assert engine["resources"]["limits"]["amd.com/gpu"] == "2"
    assert {"name": "shm", "mountPath": "/dev/shm"} in engine["volumeMounts"]  # noqa: S108
    writes = operator.writes()
    operator.await_passes(3)
    assert operator.writes() == writes


def test_without_leader_worker_sets_a_condition_says_so(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, engine=VLLM, hardware__nodes=2)

    said = {"reason": "NoLeaderWorkerSets"}
    operator.wait("the condition", lambda: said.items() <= space.condition("Ready").items())
    assert "lws.sigs.k8s.io" in space.condition("Ready")["message"]
    assert space.find("deployments", "demo") is None


def test_one_node_and_many_are_different_objects(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, engine=VLLM)
    settle(operator, space)
    edit = {"spec": {"hardware": {"nodes": 2}}}
    refused = space.client.patch(
        space.path("inferenceservices", "demo"),
        json=edit,
        headers={"Content-Type": "application/merge-patch+json"},
    )
    assert refused.status_code == 422
    assert "an object on one node cannot become one on many" in refused.text


def test_a_suspended_object_has_no_pods_and_a_queue_reaches_the_deployment(
    operator: OperatorProcess, space: Namespace
) -> None:
    create_demo(space, scaling={"minReplicas": 2, "maxReplicas": 3})
    settle(operator, space)
    before = space.get("deployments", "demo")
    assert before["spec"]["replicas"] == 2
    space.patch("inferenceservices", "demo", {"metadata": {"labels": {QUEUE: "team-a"}}})
    operator.wait(
        "the queue",
        lambda: space.get("deployments", "demo")["metadata"]["labels"].get(QUEUE) == "team-a",
    )
    assert space.get("deployments", "demo")["spec"] == before["spec"]
    space.patch("inferenceservices", "demo", {"spec": {"suspend": True}})
    operator.wait("no pods", lambda: space.get("deployments", "demo")["spec"]["replicas"] == 0)
    operator.wait("the reason", lambda: space.condition("Ready")["reason"] == "Suspended")
    assert space.condition("Ready")["status"] == "False"
    space.patch("inferenceservices", "demo", {"spec": {"suspend": None}})
    operator.wait("the pods", lambda: space.get("deployments", "demo")["spec"]["replicas"] == 2)
    space.patch("inferenceservices", "demo", {"metadata": {"labels": {QUEUE: None}}})
    operator.wait(
        "no queue",
        lambda: QUEUE not in space.get("deployments", "demo")["metadata"]["labels"],
    )
