"""A namespace with rules, on a real API server: pods that the operator makes pass its admission,
and an HPA on the wrong object ends in a sentence."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from integration.operator_runs import (
    Namespace,
    OperatorProcess,
    create_demo,
    settle,
)

HPA = "kube-controller-manager/v1.35.4 (linux/amd64) horizontal-pod-autoscaler"


def autoscale(space: Namespace, replicas: int) -> None:
    """What an HPA with the Deployment for its target does each 15 s."""
    answer = space.client.patch(
        f"{space.path('deployments', 'demo')}/scale",
        json={"spec": {"replicas": replicas}},
        headers={"Content-Type": "application/merge-patch+json", "User-Agent": HPA},
    )
    assert answer.is_success, answer.text


def obey(space: Namespace) -> None:
    """What the Deployment's controller reports when all of its pods are ready."""
    live = space.get("deployments", "demo")
    number = live["spec"]["replicas"]
    counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas"), number)
    status = {**counts, "observedGeneration": live["metadata"]["generation"]}
    space.patch("deployments", "demo", {"status": status}, "status")


def replicas(space: Namespace) -> int:
    number: int = space.get("deployments", "demo")["spec"]["replicas"]
    return number


def test_an_hpa_on_the_deployment_keeps_it_and_the_object_names_it_and_its_right_target(
    operator: OperatorProcess, space: Namespace
) -> None:
    """LLMKube#484: a pod was made and ended each 15 s, while the object said Settled."""
    create_demo(space)
    settle(operator, space)
    assert replicas(space) == 1
    autoscale(space, 3)
    operator.wait("the first edit to be put back", lambda: replicas(space) == 1)
    autoscale(space, 3)
    operator.await_passes(2)
    assert replicas(space) == 3

    def is_said() -> bool:
        obey(space)  # a write of the operator may have come in between
        told = space.condition("Reconciling")
        said = str(told["message"]) if told.get("reason") == "ReplicasTaken" else ""
        who = "kube-controller-manager sets the replicas of Deployment demo to 3"
        what = "must name sluice.dev/v1alpha1 InferenceService demo in its scaleTargetRef"
        return said.startswith(who) and what in said

    operator.wait("the object to say so", is_said)
    operator.await_passes(5)
    assert replicas(space) == 3
    operator.wait("the object to say so still", is_said)
    assert space.events("ReplicasTaken")
    assert (
        space.get("inferenceservices", "demo")["status"]["scaling"]["replicasOwner"] == "External"
    )
    writes = operator.writes()
    for number in (2, 4):
        autoscale(space, number)
        operator.await_passes(3)
        assert replicas(space) == number, "what it sets is followed"
    assert space.events("ChildRestored") == ["Deployment demo was edited: put back spec.replicas"]
    assert operator.writes() > writes, "its number is remembered"
    space.patch("inferenceservices", "demo", {"spec": {"replicas": 2}}, "scale")
    operator.wait("the object's own number", lambda: replicas(space) == 2)
    operator.wait(
        "nobody to be named", lambda: space.condition("Reconciling")["reason"] != "ReplicasTaken"
    )


def test_an_edit_by_a_person_is_put_back(operator: OperatorProcess, space: Namespace) -> None:
    create_demo(space)
    settle(operator, space)
    space.patch("deployments", "demo", {"spec": {"replicas": 5}})
    operator.wait("the edit to be put back", lambda: replicas(space) == 1)
    operator.await_passes(3)
    assert space.condition("Reconciling")["reason"] != "ReplicasTaken"


QUOTA = dict.fromkeys(
    ("requests.cpu", "requests.memory", "limits.cpu", "limits.memory", "pods"), "1000Gi"
)
GPU = {"accelerator": "nvidia", "memory": "8Gi", "hostMemory": "8Gi"}
PODS: dict[str, dict[str, Any]] = {
    "Sluice": {},
    "Sluice on a GPU": {"hardware": GPU},
    "VLLM": {"engine": {"name": "VLLM"}, "hardware": GPU},
    "Custom": {"engine": {"name": "Custom", "image": "r/e:1"}},
}


def rule(space: Namespace, quota: dict[str, str]) -> None:
    """A namespace that enforces `restricted` and a quota."""
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    space.client.patch(
        f"/api/v1/namespaces/{space.name}",
        json={"metadata": {"labels": label}},
        headers={"Content-Type": "application/merge-patch+json"},
    ).raise_for_status()
    space.create("resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": quota}})
    # What the quota's controller writes; without it admission takes no notice of the quota.
    used = dict.fromkeys(quota, "0")
    space.patch("resourcequotas", "q", {"status": {"hard": quota, "used": used}}, "status")


def admit(space: Namespace) -> httpx.Response:
    """The Deployment's pod, as its ReplicaSet would make it."""
    template = space.get("deployments", "demo")["spec"]["template"]
    metadata = {**template["metadata"], "generateName": "demo-"}
    body = {"metadata": metadata, "spec": template["spec"]}
    return space.client.post(space.path("pods"), json=body, params={"dryRun": "All"})


@pytest.mark.parametrize("pods", PODS)
def test_each_pod_is_admitted_where_a_quota_demands_limits_of_every_container(
    operator: OperatorProcess, space: Namespace, pods: str
) -> None:
    rule(space, QUOTA)
    create_demo(space, **PODS[pods])
    operator.wait("the Deployment", lambda: space.find("deployments", "demo") is not None)
    answer = admit(space)
    assert answer.is_success, answer.text


def test_each_pod_is_admitted_within_bounds_for_a_container(
    operator: OperatorProcess, space: Namespace
) -> None:
    most = {"type": "Container", "max": {"cpu": "2", "memory": "8Gi"}, "min": {"cpu": "50m"}}
    space.create("limitranges", {"metadata": {"name": "l"}, "spec": {"limits": [most]}})
    create_demo(space, **PODS["VLLM"])
    operator.wait("the Deployment", lambda: space.find("deployments", "demo") is not None)
    answer = admit(space)
    assert answer.is_success, answer.text


def test_what_a_quota_refuses_is_said_with_the_field_that_mends_it(
    operator: OperatorProcess, space: Namespace
) -> None:
    """A GPU's pod has no limit of host memory unless the object gives one."""
    rule(space, QUOTA)
    create_demo(space, hardware={"accelerator": "nvidia", "memory": "8Gi"})
    operator.wait("the Deployment", lambda: space.find("deployments", "demo") is not None)
    answer = admit(space)
    assert answer.status_code == 403
    failure = {
        "type": "ReplicaFailure", "status": "True", "reason": "FailedCreate",
        "message": answer.json()["message"],
    }  # fmt: skip
    space.patch("deployments", "demo", {"status": {"conditions": [failure]}}, "status")
    operator.wait("the verdict", lambda: space.condition("Stalled").get("status") == "True")
    for kind in ("Ready", "Stalled"):
        said = space.condition(kind)["message"]
        assert "must specify limits.memory" in said
        assert said.endswith("spec.hardware.hostMemory sets it")
