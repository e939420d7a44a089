"""Claims on pods that no node has room for: they hold up neither a rollout nor a drained node."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sluice_core.errors import timestamp
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.cluster.observed import Pod, Rollout, essence_of, pod_of, rollout_of, unplaced
from sluice_operator.plan.observed import Observed
from sluice_operator.plan.plan import Plan, plan
from sluice_operator.spec.service import InferenceService
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_observed,
    create_pod,
    create_service,
    pod_body,
)

_HOUR_S = 3600.0


def _roomless(name: str, seconds: float = _HOUR_S) -> Pod:
    """A pod that no node has taken for so long."""
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
        "lastTransitionTime": timestamp(NOW - seconds),
    }
    return create_pod(name, conditions=[scheduled])


def _draining(name: str) -> Pod:
    body = pod_body(name)
    body["metadata"]["deletionTimestamp"] = timestamp(NOW + 30)
    return pod_of(body, NOW)


def _elsewhere(name: str) -> Pod:
    """A pod that no node would take with more room either."""
    return replace(_roomless(name), lacks_room=False)


def _newer(pod: Pod) -> Pod:
    """Made from a newer template."""
    return replace(pod, template="newer")


def _placed(*names: str) -> list[Pod]:
    return [create_pod(name) for name in names]


@pytest.mark.parametrize(
    ("pods", "wanted", "number"),
    [
        (_placed("a", "b"), 2, 0),
        ([*_placed("a", "b"), _roomless("c")], 3, 1),
        ([*_placed("a"), _roomless("b"), _roomless("c")], 3, 2),
        ([*_placed("a", "b"), _roomless("surge")], 2, 0),
        ([*_placed("a", "b"), _roomless("surge"), _roomless("c")], 3, 1),
        ([*_placed("a"), _draining("b"), _roomless("b-new"), _roomless("c")], 3, 1),
        ([*_placed("a", "b"), _roomless("c", seconds=30)], 3, 0),
        ([*_placed("a", "b"), _newer(_elsewhere("c"))], 3, 0),
        ([*_placed("a"), _newer(_elsewhere("b")), _newer(_elsewhere("c"))], 3, 0),
        ([*_placed("a", "b"), _newer(_roomless("c"))], 3, 1),
        ([*_placed("a"), _newer(_roomless("b")), _newer(_roomless("c"))], 3, 1),
        ([_placed("a")[0], _newer(_placed("b")[0]), _newer(_roomless("c"))], 3, 1),
        ([], 3, 0),
    ],
)
def test_pods_are_unplaced_where_no_node_will_take_them(
    pods: list[Pod], wanted: int, number: int
) -> None:
    """Not those of a surge, which are one too many, nor those that wait for one that drains, nor
    those of a template that no node may ever take: but for one, where it is room that lacks."""
    assert unplaced(pods, Rollout(), wanted, NOW, 600.0) == number


_QUOTA = 'pods "demo-x" is forbidden: exceeded quota: gpus, requested: pods=1, used: pods=2'
_WEBHOOK = "admission webhook denied the request"


def _refusal(updated: int, seconds: float, said: str) -> dict[str, Any]:
    """A Deployment's status: two pods are there, and no more of the newest spec can be made."""
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": said,
        "lastTransitionTime": timestamp(NOW - seconds),
    }
    return {"replicas": 2, "updatedReplicas": updated, "conditions": [failure]}


def _refused(updated: int, seconds: float = _HOUR_S, said: str = _QUOTA) -> Rollout:
    return rollout_of({"metadata": {}, "status": _refusal(updated, seconds, said)})


@pytest.mark.parametrize(
    ("pods", "rollout", "wanted", "number"),
    [
        (_placed("a", "b"), _refused(2), 3, 1),
        (_placed("a", "b"), _refused(2), 5, 3),
        (_placed("a", "b"), _refused(2), 2, 0),
        (_placed("a", "b"), _refused(2, seconds=30), 3, 0),
        (_placed("a", "b"), _refused(2, said=_WEBHOOK), 3, 0),
        ([*_placed("a"), _roomless("b")], _refused(2), 3, 2),
        ([*_placed("a"), _roomless("b", seconds=30)], _refused(2), 3, 1),
        ([*_placed("a", "b"), _draining("c")], _refused(2), 3, 0),
        (_placed("a", "b"), _refused(0), 5, 1),
        ([*_placed("a"), _newer(_placed("b")[0])], _refused(1), 5, 3),
        ([*_placed("a"), _newer(_roomless("b"))], _refused(1), 5, 1),
    ],
)
def test_pods_that_no_quota_allows_are_unplaced_too(
    pods: list[Pod], rollout: Rollout, wanted: int, number: int
) -> None:
    """They are never made. What is refused for another reason would be refused in the place of one
    that serves, too."""
    assert unplaced(pods, rollout, wanted, NOW, 600.0) == number


def _observed(service: InferenceService, *pods: Pod) -> Observed:
    return create_observed(service, pods=pods, runtime=DecidedRuntime(1, 4, 3))


def _service(**changes: Any) -> InferenceService:
    return create_service(rollout="Replace", replicas=3, **changes)


def _planned(service: InferenceService, observed: Observed) -> dict[str, Any]:
    planned = plan(service, observed, SETTINGS, NOW)
    return {manifest["kind"]: manifest["spec"] for manifest in planned.apply if "spec" in manifest}


def _after(planned: Plan, observed: Observed) -> Observed:
    """What the next pass sees once everything was written."""
    made = json.loads(json.dumps([*planned.apply]))
    live = {body["kind"]: body | {"metadata": {**body["metadata"], "resourceVersion": "5"}}
            for body in made}  # fmt: skip
    return replace(
        observed,
        live={**observed.live, **live},
        runtime=planned.runtime,
        previous=planned.status,
        unsaved_s=0.0,
    )


def test_a_replica_without_a_node_holds_up_neither_a_rollout_nor_a_drained_node() -> None:
    """The Deployment would take the one that may be away for the one that is away already."""
    pods = (*_placed("a", "b"), _roomless("c"))
    made = _planned(_service(), _observed(_service(), *pods))
    rolling = made["Deployment"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 2, "maxSurge": 0}
    assert made["PodDisruptionBudget"]["maxUnavailable"] == 2
    surging = create_service(replicas=3)
    made = _planned(surging, _observed(surging, *pods))
    assert made["Deployment"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert made["PodDisruptionBudget"]["maxUnavailable"] == 2


def test_a_replica_without_quota_holds_up_neither_a_rollout_nor_a_drained_node() -> None:
    calm = _observed(_service(), *_placed("a", "b"))
    first = plan(_service(), calm, SETTINGS, NOW)
    after = _after(first, calm)
    status = _refusal(2, _HOUR_S, _QUOTA)
    live = {**after.live, "Deployment": {**after.live["Deployment"], "status": status}}
    made = _planned(_service(), replace(after, live=live))
    rolling = made["Deployment"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 2, "maxSurge": 0}
    assert made["PodDisruptionBudget"]["maxUnavailable"] == 2


def test_a_new_pod_that_no_node_takes_costs_one_of_those_that_serve() -> None:
    """As many as Kubernetes itself would stop, however long it lasts."""
    service = _service()
    pods = (*_placed("a", "b"), _newer(_elsewhere("c-new")))
    made = _planned(service, _observed(service, *pods))
    assert made["Deployment"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
    assert made["PodDisruptionBudget"]["maxUnavailable"] == 1


def test_a_pod_tells_the_template_it_is_made_from() -> None:
    body = pod_body("a")
    body["metadata"]["labels"]["pod-template-hash"] = "5d4f"
    assert pod_of(essence_of(body), NOW).template == "5d4f"


def test_it_is_written_once_and_taken_back_and_restarts_no_pod() -> None:
    service = _service()
    calm = _observed(service, *_placed("a", "b", "c"))
    first = plan(service, calm, SETTINGS, NOW)
    template = _planned(service, calm)["Deployment"]["template"]
    without_room = replace(_after(first, calm), pods=(*_placed("a", "b"), _roomless("c")))
    changed = plan(service, without_room, SETTINGS, NOW + 30)
    assert [body["kind"] for body in changed.apply] == ["PodDisruptionBudget", "Deployment"]
    assert changed.apply[1]["spec"]["template"] == template
    after = _after(changed, without_room)
    assert plan(service, after, SETTINGS, NOW + 60).apply == ()
    again = replace(after, pods=calm.pods)
    assert _planned(service, again)["PodDisruptionBudget"]["maxUnavailable"] == 1


def test_a_pod_whose_room_another_is_leaving_is_given_the_time_that_this_takes() -> None:
    """Or, the moment that the other is gone, one more would have to go."""
    pods = (*_placed("a"), _roomless("b", seconds=1500), _roomless("c", seconds=1500))
    slow = _service(drain__timeout="30m")
    assert _planned(slow, _observed(slow, *pods))["PodDisruptionBudget"]["maxUnavailable"] == 1
    quick = _service()
    assert _planned(quick, _observed(quick, *pods))["PodDisruptionBudget"]["maxUnavailable"] == 3
