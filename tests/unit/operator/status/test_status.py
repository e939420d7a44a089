"""Claims on conditions and status: what a person reads in `kubectl get` and `kubectl describe`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from sluice_core.contract import Lengths
from sluice_core.errors import timestamp
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.cluster.ends import last_end
from sluice_operator.cluster.observed import (
    Pod,
    Rollout,
    Trouble,
    essence_of,
    failure_of,
    pod_of,
    rollout_of,
)
from sluice_operator.reasons import Foreign, Reason
from sluice_operator.status import compose, events
from sluice_operator.status.compose import Report, build, milliseconds
from sluice_operator.tuner import decide
from sluice_operator.tuner.types import CapChange, Past, ReplicaChange
from unit.operator.observations import (
    NOW,
    create_config,
    create_evidence,
    create_fit,
    create_pod,
    create_service,
    pod_body,
)
from unit.operator.tuner import made


def _report(**changes: Any) -> Report:
    service = create_service()
    report = Report(
        service=service,
        fit=create_fit(service.spec),
        commit="",
        rollout=Rollout(True, 1, 1, 1, None),
        pods=(create_pod(),),
        runtime=DecidedRuntime(1, 4, 1),
        desired=1,
        ceiling=32,
        decision=None,
        evidence=(),
        configs=(),
        problems=(),
    )
    return replace(report, **changes)


def test_the_commit_is_the_one_that_the_pods_are_pinned_to() -> None:
    report = _report()
    assert report.fit.checkpoint
    moved = replace(report.fit, checkpoint=replace(report.fit.checkpoint, commit="b" * 40))
    status = build(replace(report, fit=moved, commit="a" * 40), {}, NOW)
    assert status["model"]["resolvedRevision"] == "a" * 40


def _condition(report: Report, kind: str) -> dict[str, Any]:
    conditions = build(report, {}, NOW)["conditions"]
    found: dict[str, Any] = next(c for c in conditions if c["type"] == kind)
    return found


def _waiting(reason: str, message: str = "why") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"state": state, "restartCount": 3}], "conditions": []}


def _killed(reason: str) -> dict[str, Any]:
    """A pod whose container was killed for memory, and waits for that reason."""
    pod = _waiting(reason)
    ended = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2025-10-09T08:52:00Z"}
    pod["containerStatuses"][0]["lastState"] = {"terminated": ended}
    return pod


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (_waiting("ImagePullBackOff"), "ImagePullBackOff"),
        (_waiting("ErrImageNeverPull"), "ErrImageNeverPull"),
        (_waiting("ErrImagePull"), "ImagePullBackOff"),
        (_waiting("CrashLoopBackOff"), "CrashLoopBackOff"),
        (_waiting("CreateContainerConfigError"), "CreateContainerConfigError"),
        (
            {
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                    }
                ]
            },
            "Unschedulable",
        ),
    ],
)
def test_a_pod_that_does_not_start_is_the_reason_of_not_ready(
    pod: dict[str, Any], reason: str
) -> None:
    report = _report(pods=(create_pod(**pod),), rollout=Rollout(True, 1, 1, 0, None))
    ready = _condition(report, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert "demo-1" in ready["message"]
    assert _condition(report, "Stalled")["reason"] == reason


def test_a_container_that_comes_first_can_keep_a_pod_from_starting() -> None:
    """A webhook's, say."""
    pod = _waiting("PodInitializing")
    pod["initContainerStatuses"] = _waiting("ImagePullBackOff")["containerStatuses"]
    assert _condition(_report(pods=(create_pod(**pod),)), "Ready")["reason"] == "ImagePullBackOff"


def test_an_engine_that_crashes_beside_its_gate_is_named_then_and_after() -> None:
    """Its gate runs all the while, and is not ready."""
    killed = {"reason": "OOMKilled", "exitCode": 137, "finishedAt": "2025-10-09T08:52:00Z"}
    engine: dict[str, Any] = {
        "name": "engine", "restartCount": 1, "lastState": {"terminated": killed},
        "ready": False, "started": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    }  # fmt: skip
    gate = {"name": "gate", "state": {"running": {"startedAt": "2025-10-09T08:00:01Z"}}}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": "2025-10-09T08:52:01Z"}
    pod: dict[str, Any] = {
        "conditions": [unready], "containerStatuses": [gate], "initContainerStatuses": [engine],
    }  # fmt: skip
    ready = _condition(_report(pods=(create_pod(**pod),)), "Ready")
    assert ready["reason"] == "OOMKilled"
    assert "its container engine was killed for memory" in ready["message"]
    engine |= {"ready": True, "started": True, "state": {"running": {}}}
    pod["conditions"] = [{"type": "Ready", "status": "True"}]
    ready = _condition(_report(pods=(create_pod(**pod),)), "Ready")
    assert "its container engine was killed for memory" in ready["message"]


def test_a_crashing_worker_speaks_through_its_last_line() -> None:
    pod = _waiting("CrashLoopBackOff", "back-off 5m0s restarting failed container")
    said = "sluice-worker: --model /models/x is not a directory"
    ended = {"message": said, "exitCode": 2, "finishedAt": "2025-10-09T08:53:00Z"}
    pod["containerStatuses"][0]["lastState"] = {"terminated": ended}
    report = _report(pods=(create_pod(**pod),))
    assert said in _condition(report, "Ready")["message"]
    # Until the next crash: a run that began after a back-off.
    pod["containerStatuses"][0]["state"] = {"running": {"startedAt": "2025-10-09T08:53:10Z"}}
    assert _condition(_report(pods=(create_pod(**pod),)), "Ready") == _condition(report, "Ready")


def test_of_a_log_s_end_only_whole_sentences_are_told() -> None:
    """The kubelet gives it for a container that wrote no last words."""
    log = '"ms": 12}\n{"event": "served"}\nsluice-worker: out of file descriptors\n'
    ended = {"exitCode": 1, "message": log, "finishedAt": "2025-10-09T08:52:00Z"}
    known = last_end({"name": "worker", "state": {"terminated": ended}, "restartCount": 1})
    assert known
    assert known.words == "sluice-worker: out of file descriptors"
    killed = {**ended, "exitCode": 128 + 15, "message": "the middle of"}
    known = last_end({"name": "proxy", "state": {"terminated": killed}, "restartCount": 2})
    assert known
    assert known.sentence == (
        "its container proxy was ended by signal 15 (SIGTERM) at 2025-10-09T08:52:00Z "
        "(2 restarts in all)"
    )


def _deployment(kind: str, is_true: bool, reason: str, message: str) -> dict[str, Any]:
    """One that says so of itself."""
    said = {"type": kind, "status": str(is_true), "reason": reason, "message": message}
    return {"metadata": {"generation": 1}, "status": {"conditions": [said]}}


def test_pods_that_may_not_be_made_are_the_reason_of_not_ready() -> None:
    deployment = _deployment("ReplicaFailure", True, "FailedCreate", "exceeded quota")
    report = _report(pods=(), rollout=rollout_of(deployment))
    ready = _condition(report, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "FailedCreate")
    assert "exceeded quota" in ready["message"]


def test_a_rollout_that_makes_no_progress_is_the_reason_of_not_ready() -> None:
    said = 'ReplicaSet "demo-7f" has timed out progressing.'
    deployment = _deployment("Progressing", False, "ProgressDeadlineExceeded", said)
    report = _report(pods=(create_pod(conditions=[]),), rollout=rollout_of(deployment))
    assert _condition(report, "Ready")["reason"] == "ProgressDeadlineExceeded"
    assert _condition(report, "Stalled")["status"] == "True"


def _failed(seconds_ago: float, reason: str, **meta: Any) -> dict[str, Any]:
    """A pod that its node failed."""
    changed = {
        "type": "Ready",
        "status": "False",
        "lastTransitionTime": timestamp(NOW - seconds_ago),
    }
    said = f"{reason} it was"
    body = pod_body(phase="Failed", reason=reason, message=said, conditions=[changed])
    body["metadata"] |= {"creationTimestamp": timestamp(NOW - 86400), **meta}
    return body


def test_pods_that_fail_before_any_container_are_the_reason_of_not_ready() -> None:
    """Such as each that a node refuses; one after another, so it is not named."""
    bodies = [_failed(60, "Evicted"), _failed(2, "UnexpectedAdmissionError"), pod_body()]
    failed = failure_of(bodies, NOW)
    made = create_pod(conditions=[], startTime=None)
    report = _report(pods=(made,), failed=failed, rollout=Rollout(True, 1, 1, 0))
    said = "a pod that failed: UnexpectedAdmissionError: UnexpectedAdmissionError it was"
    for kind in ("Ready", "Stalled"):
        condition = _condition(report, kind)
        assert (condition["reason"], condition["message"]) == ("UnexpectedAdmissionError", said)
    assert _condition(_report(failed=failed), "Ready")["message"] == "1 of 1 pods serve"
    none_asked_for = _report(pods=(), failed=failed, desired=0)
    assert _condition(none_asked_for, "Ready")["reason"] == "ScaledToZero"
    started = replace(report, pods=(create_pod(conditions=[]),))
    assert _condition(started, "Ready")["reason"] == "Starting"
    assert _condition(started, "Ready")["message"] == (
        "none of 1 pods is ready yet; one failed before: UnexpectedAdmissionError: "
        "UnexpectedAdmissionError it was"
    )
    assert _condition(started, "Stalled")["status"] == "False"


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "Terminated"])
def test_a_pod_that_its_node_ended_is_replaced_and_stalls_nothing(reason: str) -> None:
    """Flux and Argo take Stalled for failed, for good."""
    failed = failure_of([_failed(2, reason)], NOW)
    for pods in ((), (_pending(),), (create_pod(conditions=[], startTime=None),)):
        report = _report(pods=pods, failed=failed, rollout=Rollout(True, 1, 1, 0))
        assert _condition(report, "Ready")["status"] == "False"
        assert _condition(report, "Stalled")["status"] == "False"
        assert _condition(report, "Reconciling")["status"] == "True"


@pytest.mark.parametrize("reason", ["Unschedulable", "SchedulingGated"])
def test_a_pod_that_a_node_may_yet_take_is_told_at_once_and_stalls_after_ten_minutes(
    reason: str,
) -> None:
    """An autoscaler adds one, or a queue lets it go."""

    def told(seconds: float) -> tuple[str, str, str]:
        why = {"type": "PodScheduled", "status": "False", "reason": reason,
               "lastTransitionTime": timestamp(NOW - seconds)}  # fmt: skip
        pods, rollout = (create_pod(conditions=[why]),), Rollout(True, 1, 1, 0)
        report = _report(pods=pods, rollout=rollout)
        ready, stalled, reconciling = (
            _condition(report, kind) for kind in ("Ready", "Stalled", "Reconciling")
        )
        assert ready["status"] == "False"
        return ready["reason"], stalled["reason"], reconciling["status"]

    assert told(590) == (reason, "NotStalled", "True")
    assert told(610) == (reason, reason, "False")


def test_a_quota_that_a_pod_which_drains_still_holds_stalls_nothing() -> None:
    deployment = _deployment("ReplicaFailure", True, "FailedCreate", "exceeded quota")
    full = rollout_of(deployment)
    drains = _report(pods=(_leaving(NOW + 60),), rollout=full)
    assert _condition(drains, "Ready")["reason"] == "Starting"
    assert _condition(drains, "Stalled")["status"] == "False"
    left = _report(pods=(), rollout=full)
    assert _condition(left, "Stalled")["reason"] == "FailedCreate"


@pytest.mark.parametrize(
    "body",
    [
        _failed(3600, "Evicted"),
        _failed(2, ""),
        pod_body(phase="Running"),
        pod_body(phase="Succeeded", reason="Completed"),
    ],
)
def test_a_failure_of_long_ago_or_of_no_reason_is_none(body: dict[str, Any]) -> None:
    assert failure_of([body], NOW) is None


def test_one_pod_of_two_serves_and_the_other_is_named() -> None:
    pods = (create_pod("demo-1"), create_pod("demo-2", **_waiting("ImagePullBackOff")))
    ready = _condition(_report(pods=pods, desired=2), "Ready")
    assert ready["status"] == "True"
    assert "1 of 2 pods serve" in ready["message"]
    assert "demo-2: ImagePullBackOff" in ready["message"]


@pytest.mark.parametrize(
    ("rollout", "reason", "state"),
    [
        (Rollout(False, 1, 1, 1), "RollingOut", "True"),
        (Rollout(True, 2, 2, 2), "Scaling", "True"),
        (Rollout(True, 2, 1, 2), "RollingOut", "True"),
        (Rollout(True, 1, 0, 1), "RollingOut", "True"),
        (Rollout(True, 1, 1, 1), "Settled", "False"),
    ],
)
def test_reconciling_follows_the_rollout(rollout: Rollout, reason: str, state: str) -> None:
    condition = _condition(_report(rollout=rollout), "Reconciling")
    assert (condition["status"], condition["reason"]) == (state, reason)


def _pending(name: str = "demo-new", length: int = 0) -> Pod:
    said = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu" + length * ", and so on"
    why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said,
           "lastTransitionTime": timestamp(NOW - 60)}  # fmt: skip
    return create_pod(name, conditions=[why])


def _leaving(ends_s: float) -> Pod:
    """A pod that drains until `ends_s`."""
    body = pod_body("demo-old")
    body["metadata"]["deletionTimestamp"] = timestamp(ends_s)
    return pod_of(body, NOW)


_SURGES = Rollout(True, replicas=2, updated=1, ready=1)


def test_a_new_pod_without_room_beside_the_old_ones_says_what_to_do() -> None:
    """Where all GPUs are in use this lasts for ever; it was told as `1 of 1 pods are ready`."""
    report = _report(pods=(create_pod("demo-old"), _pending()), rollout=_SURGES)
    condition = _condition(report, "Reconciling")
    assert (condition["status"], condition["reason"]) == ("True", "NoRoomToSurge")
    assert condition["message"] == (
        "no node has room for the new pod demo-new beside those of the older spec (1), which go on "
        "serving: add room, or set spec.rollout to Replace, which stops one first"
    )
    assert "Insufficient nvidia.com/gpu" in _condition(report, "Ready")["message"]
    before, after = build(_report(), {}, NOW), build(report, {}, NOW + 5)
    told = [n for n in events.transitions(before, after) if n.reason == "NoRoomToSurge"]
    assert [(notice.warning, notice.message) for notice in told] == [
        (True, f"Reconciling=True: {condition['message']}")
    ]
    assert list(events.transitions(after, after)) == []
    replacing = replace(report, service=create_service(rollout="Replace"))
    assert _condition(replacing, "Reconciling")["reason"] == "RollingOut"
    long = replace(report, pods=(create_pod("demo-old"), _pending(length=50)))
    assert _condition(long, "Reconciling")["reason"] == "NoRoomToSurge", "however long it is said"


def test_a_replacement_that_lacks_room_for_long_is_told() -> None:
    def stalled(seconds: float) -> str:
        pods = (create_pod("demo-old"), replace(_pending(), roomless_s=NOW - seconds))
        service = create_service(rollout="Replace")
        report = _report(pods=pods, rollout=_SURGES, service=service)
        reason: str = _condition(report, "Stalled")["reason"]
        return reason

    assert (stalled(700), stalled(1300)) == ("NotStalled", "Unschedulable")


_ELSEWHERE = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."


@pytest.mark.parametrize("rollout", ["Surge", "Replace"])
def test_a_new_pod_that_no_node_would_take_with_more_room_stalls_after_ten_minutes(
    rollout: str,
) -> None:
    """An autoscaler may bring a node that does; and stopping a pod that serves is no help."""

    def told(seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
               "message": _ELSEWHERE, "lastTransitionTime": timestamp(NOW - seconds)}  # fmt: skip
        pods = (create_pod("demo-old"), create_pod("demo-new", conditions=[why]))
        report = _report(pods=pods, rollout=_SURGES, service=create_service(rollout=rollout))
        return _condition(report, "Stalled"), _condition(report, "Reconciling")

    stalled, reconciling = told(300)
    assert (stalled["status"], reconciling["reason"]) == ("False", "RollingOut")
    assert "didn't match" in reconciling["message"]
    assert "Replace" not in reconciling["message"]
    stalled, _ = told(660)
    assert (stalled["status"], stalled["reason"]) == ("True", "Unschedulable")
    assert "demo-new" in stalled["message"]
    assert "didn't match" in stalled["message"]


def test_a_deployment_that_is_paused_by_hand_is_told_with_what_waits_for_it() -> None:
    paused = {"type": "Progressing", "status": "Unknown", "reason": "DeploymentPaused"}
    live = {"metadata": {}, "status": {"replicas": 1, "readyReplicas": 1, "conditions": [paused]}}
    condition = _condition(_report(rollout=rollout_of(live)), "Stalled")
    assert (condition["status"], condition["reason"]) == ("True", "DeploymentPaused")
    assert "kubectl rollout resume" in condition["message"]


def test_scaling_to_zero_is_no_warning() -> None:
    serving, none = build(_report(), {}, NOW), _report(pods=(), desired=0, rollout=Rollout(True))
    ready = _condition(none, "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "ScaledToZero")  # as whoever waits wants
    unread = replace(none, fit=replace(none.fit, status="Unknown", is_pending=True))
    assert _condition(unread, "Ready") == ready  # by an operator that is new
    assert _condition(none, "Stalled")["status"] == _condition(none, "Reconciling")["status"]
    leaving = build(replace(none, pods=(_leaving(NOW + 60),)), serving, NOW + 5)
    ready = next(c for c in leaving["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Scaling")
    assert ready["message"] == "spec.replicas is 0; pods left: 1"
    gone = build(none, leaving, NOW + 65)
    told = [*events.transitions(serving, leaving), *events.transitions(leaving, gone)]
    assert not [notice for notice in told if notice.warning]


_DEADLINE = Trouble(Foreign("ProgressDeadlineExceeded"), "it has timed out progressing")


@pytest.mark.parametrize(
    ("new", "trouble", "reason"),
    [
        (_waiting("ErrImagePull"), None, "ImagePullBackOff"),
        (_waiting("CrashLoopBackOff"), None, "CrashLoopBackOff"),
        (_killed("CrashLoopBackOff"), None, "OOMKilled"),
        ({"conditions": []}, _DEADLINE, "ProgressDeadlineExceeded"),
    ],
)
def test_a_rollout_that_cannot_succeed_is_told_while_older_pods_serve(
    new: dict[str, Any], trouble: Trouble | None, reason: str
) -> None:
    pods = (create_pod("demo-old"), create_pod("demo-new", **new))
    report = _report(pods=pods, rollout=replace(_SURGES, trouble=trouble))
    assert _condition(report, "Ready")["status"] == "True"
    stalled, reconciling = (_condition(report, kind) for kind in ("Stalled", "Reconciling"))
    assert (stalled["status"], stalled["reason"]) == ("True", reason)
    assert (reconciling["status"], reconciling["reason"]) == ("False", reason)
    before, after = build(_report(), {}, NOW), build(report, {}, NOW + 5)
    told = list(events.transitions(before, after))
    assert [(notice.warning, notice.reason) for notice in told] == [(True, reason)]
    assert list(events.transitions(after, after)) == []


def test_what_is_no_fault_of_the_newest_spec_does_not_stall_its_rollout() -> None:
    old, killed = create_pod("demo-a"), create_pod("demo-b", **_killed("ContainerCreating"))
    pods = (old, killed, create_pod("demo-new", conditions=[]))
    report = _report(pods=pods, desired=2, rollout=Rollout(True, 3, 1, 2))
    assert _condition(report, "Reconciling")["reason"] == "RollingOut"
    waits = _report(pods=(old, _pending()), rollout=replace(_SURGES, trouble=_DEADLINE))
    assert _condition(waits, "Reconciling")["reason"] == "NoRoomToSurge"
    crashing = create_pod("demo-c", **_waiting("CrashLoopBackOff"))
    all_new = _report(pods=(old, crashing), desired=2, rollout=Rollout(True, 2, 2, 1))
    assert _condition(all_new, "Reconciling")["reason"] == "Scaling"
    for one in (report, waits, all_new):
        assert _condition(one, "Stalled")["status"] == "False"


def _starting(seconds: float, sandbox: str = "False") -> dict[str, Any]:
    """The body of a pod on a node, without its volumes or network for so long."""
    turned = {"lastTransitionTime": timestamp(NOW - seconds)}
    conditions = [
        {"type": "PodScheduled", "status": "True", **turned},
        {"type": "PodReadyToStartContainers", "status": sandbox, **turned},
    ]
    return pod_body(**{**_waiting("ContainerCreating"), "conditions": conditions})


def test_a_pod_that_gets_no_volume_or_no_network_is_named() -> None:
    pod = pod_of(_starting(130), NOW)
    assert pod.trouble
    assert pod.trouble.reason == "ContainerCreating"
    assert "without its volumes or its network since 2025-10-09T08:51:10Z" in pod.trouble.message
    assert _condition(_report(pods=(pod,)), "Stalled")["reason"] == "ContainerCreating"
    assert pod_of(_starting(130), NOW + 60) == pod  # or its status would change at each look
    assert pod_of(_starting(60), NOW).trouble is None
    assert pod_of(_starting(130, "True"), NOW).trouble is None  # its image is being pulled
    older_kubelet = _starting(130)
    del older_kubelet["status"]["conditions"][1]
    assert pod_of(older_kubelet, NOW).trouble is None


def test_of_a_pod_all_is_kept_that_is_read() -> None:
    conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": timestamp(NOW - 9)}]
    failed = pod_body(phase="Failed", reason="Evicted", message="disk", conditions=conditions)
    leaving = pod_body(**_waiting("ErrImagePull"))
    leaving["metadata"]["deletionTimestamp"] = timestamp(NOW + 9)
    for body in (failed, leaving, pod_body(), {"metadata": pod_body()["metadata"]}):
        body["metadata"] |= {"creationTimestamp": timestamp(NOW - 99), "managedFields": [{}]}
        body |= {"spec": {"containers": [{}]}}
        kept = essence_of(body)
        assert pod_of(kept, NOW) == pod_of(body, NOW)
        assert failure_of([kept], NOW) == failure_of([body], NOW)
        assert "spec" not in kept
        assert "managedFields" not in kept["metadata"]


def test_a_pod_that_waits_for_one_that_drains_is_no_trouble() -> None:
    """A replaced pod's GPU is free when it has drained; until then no other is to be looked for."""
    pods, rollout = (_leaving(NOW + 60), _pending()), Rollout(True, 1, 1, 0)
    report = _report(service=create_service(rollout="Replace"), pods=pods, rollout=rollout)
    assert _condition(report, "Stalled")["status"] == "False"
    assert _condition(report, "Ready")["reason"] == "Starting"
    surging = _report(pods=(create_pod("demo-1"), *pods), rollout=_SURGES)
    assert _condition(surging, "Reconciling")["reason"] == "RollingOut"


def test_a_pod_that_waits_for_one_that_never_leaves_is_told() -> None:
    """On a lost node a pod stays for ever, and so does what it holds."""
    pods = (_leaving(NOW - 60), _pending())
    report = _report(service=create_service(rollout="Replace"), pods=pods)
    assert _condition(report, "Ready")["reason"] == "Unschedulable"
    assert _condition(report, "Stalled")["status"] == "False"
    late = replace(report, pods=(pods[0], replace(pods[1], roomless_s=NOW - 600)))
    assert _condition(late, "Stalled")["reason"] == "Unschedulable"


def test_a_stalled_object_is_not_reconciling() -> None:
    report = _report(pods=(create_pod(**_waiting("ErrImagePull")),), rollout=Rollout())
    assert _condition(report, "Stalled")["status"] == "True"
    assert _condition(report, "Reconciling")["status"] == "False"


def test_a_transition_is_a_change_of_status_and_not_of_words() -> None:
    first = build(_report(), {}, NOW)
    later = build(_report(desired=2), first, NOW + 60)
    times = {c["type"]: c["lastTransitionTime"] for c in first["conditions"]}
    for condition in later["conditions"]:
        same = condition["type"] != "Reconciling"
        assert (condition["lastTransitionTime"] == times[condition["type"]]) is same


def test_the_status_says_where_the_cap_is_held_and_what_gaps_are_of() -> None:
    """With pods of two kinds, as in a rollout, the least precise one is told."""
    gate, live = create_config(cap_is="gate", gaps_from="chunks"), create_config()
    for configs, said in (((live,), ("live", "tokens")), ((live, gate), ("gate", "chunks"))):
        batching = build(_report(configs=configs), {}, NOW)["batching"]
        assert (batching["capIs"], batching["gapsFrom"]) == said
    assert "capIs" not in build(_report(), {}, NOW)["batching"]


def test_nothing_changes_in_the_status_while_nothing_happens() -> None:
    report = _report(evidence=(create_evidence(),), configs=(create_config(),))
    first = build(report, {}, NOW)
    assert build(report, first, NOW + 3600) == first


def test_an_unreadable_spec_keeps_what_was_known_and_says_every_problem() -> None:
    before = build(_report(), {}, NOW)
    said = "spec.slo: a; spec.model: b"
    last = {**before, "observedGeneration": 4}
    after = compose.fail(last, before, Reason.INVALID_SPEC, said, NOW + 5)
    conditions = {c["type"]: c for c in after["conditions"]}
    assert conditions["Ready"]["status"] == "True"
    assert conditions["Stalled"]["reason"] == "InvalidSpec"
    assert conditions["Stalled"]["message"] == said
    assert after["batching"] == before["batching"]
    assert after["observedGeneration"] == 4


def test_refused_writes_are_told_in_the_status() -> None:
    starting = build(_report(pods=()), {}, NOW)
    failed = compose.fail(starting, {}, Reason.APPLY_FAILED, "exceeded quota", NOW)
    conditions = {c["type"]: c for c in failed["conditions"]}
    assert (conditions["Stalled"]["status"], conditions["Stalled"]["message"]) == (
        "True",
        "exceeded quota",
    )
    assert conditions["Ready"]["message"] == "exceeded quota", "no pod starts"


def test_measured_memory_stands_beside_the_plan() -> None:
    memory = build(_report(evidence=(create_evidence(),)), {}, NOW)["memory"]
    assert memory["measured"] == {"weights_bytes": 110}
    assert memory["kvTokens"] == 4096
    planned = {key: int(value) for key, value in memory["planned"].items()}
    for_model = sum(planned.values()) - planned["total_bytes"] - planned["reserve_bytes"]
    missed = 110 - planned["weights_bytes"]
    assert float(memory["errorPercent"]) == pytest.approx(100 * missed / for_model, rel=0.01)


def test_observed_lengths_tell_what_memory_carries_and_how_often_it_overflows() -> None:
    evidence = create_evidence(lengths=Lengths(1000.0, 400.0, 50))
    memory = build(_report(evidence=(evidence,)), {}, NOW)["memory"]
    assert memory["sequences"] == 2
    assert float(memory["expectedPreemptions"]) > 1
    assert "sequences" not in build(_report(evidence=(create_evidence(),)), {}, NOW)["memory"]


def test_a_share_that_is_none_for_all_that_anyone_can_tell_is_0() -> None:
    evidence = create_evidence(lengths=Lengths(500.0, 200.0, 50))
    memory = build(_report(evidence=(evidence,)), {}, NOW)["memory"]
    assert memory["expectedPreemptions"] == "0"


def test_history_is_newest_first_and_bounded() -> None:
    history = tuple(ReplicaChange(NOW + i, i, i + 1, f"R{i}", 1.0) for i in range(8))
    change = CapChange(NOW, 8, 4, 2, "InterTokenBreach")
    past = Past(scale_history=history, last_change=change)
    built = build(_report(runtime=DecidedRuntime(2, 4, 1, past)), {}, NOW)
    assert [entry["reason"] for entry in built["scaling"]["history"]] == [
        "R7", "R6", "R5", "R4", "R3",
    ]  # fmt: skip
    assert built["batching"]["lastChange"]["from"] == 8


@pytest.mark.parametrize(
    ("value", "text"), [(0.4213, "0.421ms"), (51.27, "51.3ms"), (1234.0, "1230ms"), (5e6, "5000s")]
)
def test_times_are_texts_of_three_digits(value: float, text: str) -> None:
    assert milliseconds(value) == text


def test_a_condition_that_turns_is_told_once() -> None:
    before = build(_report(), {}, NOW)
    broken = build(_report(pods=(create_pod(**_waiting("ErrImagePull")),)), before, NOW + 5)
    told = list(events.transitions(before, broken))
    assert {notice.reason for notice in told} == {"ImagePullBackOff"}
    assert all(notice.warning for notice in told)
    assert list(events.transitions(broken, broken)) == []


def test_a_share_that_goes_over_what_is_allowed_and_back_is_told_once_in_ten_minutes() -> None:
    """Which is where a tuner steers."""

    def turned(before: Any, to: str, reason: str, now: float) -> Any:
        after = json.loads(json.dumps(before))
        [entry] = [c for c in after["conditions"] if c["type"] == "SLOMet"]
        entry |= {"status": to, "reason": reason, "lastTransitionTime": timestamp(now)}
        return after

    start = NOW - NOW % 600
    status, told = build(_report(), {}, start), []
    for minute in range(40):
        to, reason = ("False", "TargetMissed") if minute % 2 else ("True", "TargetsHold")
        after = turned(status, to, reason, start + 60 * minute)
        told += [notice.key for notice in events.transitions(status, after)]
        status = after
    assert len(told) == 39
    assert len(set(told)) == 8  # each way, in each of four times ten minutes


def test_unknown_turning_good_is_no_news() -> None:
    before = build(_report(), {}, NOW)
    after = json.loads(json.dumps(before))
    for entry in after["conditions"]:
        if entry["status"] == "Unknown":
            entry |= {"status": "True", "reason": "Feasible"}
    assert list(events.transitions(before, after)) == []


def test_serving_again_is_told() -> None:
    broken = build(_report(pods=(create_pod(**_waiting("ErrImagePull")),)), {}, NOW)
    told = list(events.transitions(broken, build(_report(), broken, NOW + 5)))
    assert ("Serving", False) in [(notice.reason, notice.warning) for notice in told]


def test_an_ordinary_start_is_no_warning() -> None:
    starting = build(_report(pods=(), rollout=Rollout()), {}, NOW)
    assert [n for n in events.transitions({}, starting) if n.warning] == []


def test_an_event_has_a_name_that_repeats_with_its_key() -> None:
    meta = {"name": "demo", "namespace": "default", "uid": "u"}
    notice = events.Notice(False, Reason.HEADROOM, "m", "epoch/3")
    one, two = events.manifest(meta, notice, NOW), events.manifest(meta, notice, NOW + 9)
    assert one["metadata"] == two["metadata"]
    other = events.manifest({**meta, "uid": "v"}, notice, NOW)
    assert other["metadata"] != one["metadata"]


def test_misses_of_before_the_targets_were_edited_are_not_told() -> None:
    """Ten ticks, of which three are of these targets. The newest might be a tick old, so two are
    counted."""
    ticks = [made.tick(seq, ttft=made.late(10, 4)) for seq in range(1, 11)]
    view = made.pod("a", ticks)
    _, decision = decide(Past(), made.observation(view))
    assert view.evidence is not None
    report = _report(decision=decision, evidence=(view.evidence,))
    told = [
        build(replace(report, runtime=DecidedRuntime(1, 4, 1, past)), {}, NOW)["load"]["misses"][
            "cap"
        ]
        for past in (Past(), Past(targets_since_s=NOW - 6))
    ]
    assert told == [40, 8]


def _asked(num: int, failed: dict[str, int], finished: int) -> Report:
    """An object whose pod serves, after so many ticks in each of which this came of requests."""
    n = finished
    ticks = [
        made.tick(seq, finished=n, good=n, smooth=n, ttft=made.late(n, 0), failed=failed)
        for seq in range(1, num + 1)
    ]
    return _report(decision=decide(Past(), made.observation(made.pod("a", ticks)))[1])


def test_an_engine_that_fails_all_is_not_ready_and_says_how_in_words_that_stay() -> None:
    """It answered 500 to all, and was Ready."""
    failing = [_asked(num, {"500": 5, "cut": 1}, 0) for num in (2, 3)]
    for kind in ("Ready", "RequestsSucceed", "SLOMet"):
        found = _condition(failing[0], kind)
        assert (found["status"], found["reason"]) == ("False", "RequestsFail")
    ready = [_condition(report, "Ready")["message"] for report in failing]
    assert set(ready) == {"1 of 1 pods serve, and each request fails: 500, cut"}
    stalled = [_condition(report, "Stalled")["status"] for report in failing]
    assert stalled == ["False", "False"], "it may be mended by itself"
    load = build(failing[0], {}, NOW)["load"]
    assert (load["failed"], load["failedPercent"]) == ({"500": 10, "cut": 2}, "100")


def test_an_engine_that_fails_some_is_ready_and_says_how_many() -> None:
    some = _asked(30, {"cut": 1}, 9)
    assert _condition(some, "Ready")["reason"] == "Serving"
    told = _condition(some, "RequestsSucceed")
    assert (told["status"], told["reason"]) == ("False", "RequestsFail")
    assert told["message"] == "30 of 300 requests failed: cut (30) in 600 s"
    assert build(some, {}, NOW)["load"]["failedPercent"] == "10"
    assert "failed" not in build(_asked(30, {}, 9), {}, NOW)["load"]


def test_a_rollout_that_cannot_succeed_is_told_where_the_older_engine_fails_too() -> None:
    stuck = replace(
        _asked(3, {"500": 5}, 0),
        rollout=_SURGES,
        pods=(create_pod(), create_pod("demo-2", **_waiting("ImagePullBackOff"))),
    )
    assert _condition(stuck, "Ready")["reason"] == "RequestsFail"
    assert _condition(stuck, "Stalled")["reason"] == "ImagePullBackOff"


def test_one_event_tells_that_requests_fail_and_one_that_they_succeed_again() -> None:
    sound, some = build(_asked(30, {}, 9), {}, NOW), build(_asked(30, {"500": 1}, 9), {}, NOW)
    (began,) = events.transitions(sound, some)
    assert (began.warning, began.reason) == (True, "RequestsFail")
    assert began.message.startswith("RequestsSucceed=False: 30 of 300 requests failed: 500 (30)")
    assert list(events.transitions(some, some)) == []
    ended = [n for n in events.transitions(some, sound) if n.message.startswith("RequestsSucceed")]
    (end,) = ended
    assert (end.warning, end.reason) == (False, "RequestsSucceed")
