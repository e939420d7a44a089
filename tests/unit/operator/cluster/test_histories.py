"""What every condition says at every moment of what may become of a pod.

The moments are those of real pods, as the kubelet of Kubernetes 1.35 wrote them within three
minutes of one day; of a time minute and second are given, of a worker's last words what it writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from msgspec import structs
from sluice_core.contract import FirstTokens, Hung
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.cluster.observed import Pod, failure_of, pod_of
from sluice_operator.plan.observed import Observed
from sluice_operator.plan.plan import plan
from sluice_operator.pods.scrape import Scrape
from sluice_operator.spec.service import InferenceService
from sluice_operator.status.events import Notice
from sluice_operator.times import unix_time
from unit.operator.observations import (
    SETTINGS,
    create_config,
    create_evidence,
    create_observed,
    create_service,
    create_tick,
)

Object = dict[str, Any]
_ENDED_FOR_MEMORY = "its container worker was killed for memory at 2026-11-26T11:12:34Z"
_ENDED_BY_A_SIGNAL = "its container worker was ended by signal 9 (SIGKILL) at 2026-11-26T11:12:54Z"
_ENGINE = "the engine process ended at 2026-11-26T11:12:36Z by signal 9 (SIGKILL)"
_HANGS = "the engine process is hung: no step, though there is work, since 2026-11-26T11:12:21Z"
_KEYS = "spec.apiKeySecretRef: there is no Secret api-keys"


def _is_watched(body: Any) -> bool:
    """By `LIVE_PODS`."""
    return body["status"].get("phase") not in ("Succeeded", "Failed")


def _at(clock: str) -> str:
    return f"2026-11-26T11:{clock}Z"


def waits(reason: str, message: str = "") -> Object:
    """The container does not run."""
    return {"waiting": {"reason": reason, **({"message": message} if message else {})}}


def runs(since: str) -> Object:
    """It runs."""
    return {"running": {"startedAt": _at(since)}}


def ended(code: int, since: str, until: str, message: str = "", reason: str = "Error") -> Object:
    """A run that is over."""
    run = {"exitCode": code, "reason": reason, "startedAt": _at(since), "finishedAt": _at(until)}
    return {"terminated": {**run, **({"message": message} if message else {})}}


def pod(
    state: Object,
    ready: tuple[bool, str],
    last: Object | None = None,
    restarts: int = 0,
    *,
    name: str = "demo-1",
    leaves: str = "",
    **status: Any,
) -> Object:
    """A pod on its node. `ready`: whether it is, and since when; `leaves`: until when it may."""
    container = {
        "name": "worker", "ready": ready[0], "restartCount": restarts, "state": state,
        "lastState": last or {},
    }  # fmt: skip
    conditions = [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": _at("12:25")},
        {
            "type": "PodReadyToStartContainers",
            "status": str(state != waits("ContainerCreating")),
            "lastTransitionTime": _at(ready[1]),
        },
        {"type": "Ready", "status": str(ready[0]), "lastTransitionTime": _at(ready[1])},
    ]
    meta: Object = {"name": name, "uid": f"uid-{name}", "labels": {"pod-template-hash": name[:-2]}}
    if leaves:
        meta["deletionTimestamp"] = _at(leaves)
    stands = {"phase": "Running", "startTime": _at("12:25"), "podIP": "10.0.0.7"}
    return {
        "metadata": meta,
        "status": {**stands, "conditions": conditions, "containerStatuses": [container], **status},
    }


def scheduled(name: str = "demo-1") -> Object:
    """A pod that has a node, which has not looked at it yet."""
    made = pod({}, (False, "12:25"), name=name, startTime=None, phase="Pending")
    made["status"] |= {"conditions": made["status"]["conditions"][:1], "containerStatuses": []}
    return made


@dataclass(frozen=True)
class Moment:
    """What is seen at a time, and what is to be said then: `conditions`: of Ready, Reconciling and
    Stalled; `message`: Ready's; `events`: reasons of the warnings."""

    now: str
    pods: list[Object]
    conditions: str
    message: str
    events: str = ""
    desired: int = 1
    hung: str = ""
    problem: str | None = None
    keys_problem: str = ""
    outdated: int = 0


SERVING = "True/Serving False/Settled False/NotStalled"
STARTING = "False/Starting True/Scaling False/NotStalled"
RESTARTING = "False/Restarting True/Scaling False/NotStalled"
CRASHING = "False/CrashLoopBackOff False/CrashLoopBackOff True/CrashLoopBackOff"
NO_IMAGE = "False/ImagePullBackOff False/ImagePullBackOff True/ImagePullBackOff"
NONE_READY = "none of 1 pods is ready yet"
_SERVES = "1 of 1 pods serve"
_OF_ENGINE = f"its container worker ended with exit code 1 at {_at('12:36')}"
_AGAIN = f"its container worker ended with exit code 1 at {_at('12:46')}"
_LOG = '"ms": 12}\n{"event": "served", "ms": 12}\n'
"""The end of a log, as the kubelet gives it for one that wrote nothing."""
_OOM = ended(137, "12:26", "12:34", _LOG, "OOMKilled")
_FIRST, _SECOND = ended(1, "12:26", "12:36", _ENGINE), ended(1, "12:37", "12:46", _ENGINE)
_BACK_OFF = "back-off 10s restarting failed container=worker pod=demo-1_rec(51522980-007f-4fe4)"
_NOT_FOUND = 'rpc error: code = NotFound desc = failed to pull and unpack image "r/w:gone"'
_HEARD = "True/Feasible", "True/AllPodsHeard"
_UNHEARD = "Unknown/NoEvidence", "Unknown/NoReadyPods"
_UNFIT = "config.json: the architecture is not supported"
_BAD_START = ended(2, "12:26", "12:30", _UNFIT)
_BAD = f"its container worker ended with exit code 2 at {_at('12:30')}"
_OOM_AGAIN = ended(137, "12:35", "12:50", _LOG, "OOMKilled")
_EVICTED = "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "

HISTORIES: dict[str, list[Moment]] = {
    "it starts": [
        Moment("12:25", [], "False/Starting True/Scaling False/NotStalled", NONE_READY),
        Moment("12:26", [scheduled()], STARTING, NONE_READY),
        Moment("12:27", [pod(waits("ContainerCreating"), (False, "12:26"))], STARTING, NONE_READY),
        Moment("12:28", [pod(runs("12:27"), (False, "12:26"))], STARTING, NONE_READY),
        Moment("12:29", [pod(runs("12:27"), (True, "12:28"))], SERVING, _SERVES),
    ],
    "it is killed for memory once": [
        Moment("12:28", [pod(runs("12:26"), (True, "12:27"))], SERVING, _SERVES),
        Moment(
            "12:35", [pod(_OOM, (False, "12:35"))],
            "False/OOMKilled True/Scaling False/NotStalled",
            f"pod demo-1: OOMKilled: {_ENDED_FOR_MEMORY} (0 restarts in all)", "OOMKilled",
        ),
        Moment(
            "12:36", [pod(runs("12:35"), (False, "12:35"), _OOM, 1)],
            "False/OOMKilled True/Scaling False/NotStalled",
            f"pod demo-1: OOMKilled: {_ENDED_FOR_MEMORY} (1 restart in all)",
        ),
        Moment(
            "12:37", [pod(runs("12:35"), (True, "12:36"), _OOM, 1)], SERVING,
            f"{_SERVES}; pod demo-1 has restarted: {_ENDED_FOR_MEMORY} (1 restart in all)",
        ),
        Moment(
            "22:37", [pod(runs("12:35"), (True, "12:36"), _OOM, 1)], SERVING,
            f"{_SERVES}; pod demo-1 has restarted: {_ENDED_FOR_MEMORY} (1 restart in all)",
        ),
        Moment(  # not ready later, for another reason
            "22:47", [pod(runs("12:35"), (False, "22:46"), _OOM, 1)],
            "False/NotReady True/Scaling False/NotStalled",
            f"pod demo-1: NotReady: it was ready until {_at('22:46')}", "NotReady",
        ),
    ],
    "its process is killed from outside": [
        Moment("12:31", [pod(runs("12:29"), (True, "12:30"))], SERVING, _SERVES),
        Moment(
            "12:55", [pod(ended(137, "12:29", "12:54", _LOG), (False, "12:55"))], RESTARTING,
            f"pod demo-1: Restarting: {_ENDED_BY_A_SIGNAL} (0 restarts in all)", "Restarting",
        ),
        Moment(
            "12:56",
            [pod(runs("12:55"), (False, "12:55"), ended(137, "12:29", "12:54", _LOG), 1)],
            RESTARTING, f"pod demo-1: Restarting: {_ENDED_BY_A_SIGNAL} (1 restart in all)",
        ),
        Moment(
            "12:57", [pod(runs("12:55"), (True, "12:56"), ended(137, "12:29", "12:54", _LOG), 1)],
            SERVING,
            f"{_SERVES}; pod demo-1 has restarted: {_ENDED_BY_A_SIGNAL} (1 restart in all)",
        ),
    ],
    "its engine is killed twice in a minute": [
        Moment("12:33", [pod(runs("12:26"), (True, "12:32"))], SERVING, _SERVES),
        Moment(
            "12:37", [pod(_FIRST, (False, "12:37"))], RESTARTING,
            f"pod demo-1: Restarting: {_OF_ENGINE} (0 restarts in all): {_ENGINE}", "Restarting",
        ),
        Moment(
            "12:38", [pod(runs("12:37"), (False, "12:37"), _FIRST, 1)], RESTARTING,
            f"pod demo-1: Restarting: {_OF_ENGINE} (1 restart in all): {_ENGINE}",
        ),
        Moment(
            "12:41", [pod(runs("12:37"), (True, "12:41"), _FIRST, 1)], SERVING,
            f"{_SERVES}; pod demo-1 has restarted: {_OF_ENGINE} (1 restart in all): {_ENGINE}",
        ),
        Moment(
            "12:47", [pod(_SECOND, (False, "12:47"), _FIRST, 1)], RESTARTING,
            f"pod demo-1: Restarting: {_AGAIN} (1 restart in all): {_ENGINE}", "Restarting",
        ),
        Moment(
            "12:48", [pod(waits("CrashLoopBackOff", _BACK_OFF), (False, "12:47"), _SECOND, 1)],
            CRASHING, f"pod demo-1: CrashLoopBackOff: {_AGAIN} (1 restart in all): {_ENGINE}",
            "CrashLoopBackOff",
        ),
        Moment(  # it runs once more, and has not shown yet that it is over
            "12:59", [pod(runs("12:58"), (False, "12:47"), _SECOND, 2)], CRASHING,
            f"pod demo-1: CrashLoopBackOff: {_AGAIN} (2 restarts in all): {_ENGINE}",
        ),
        Moment(
            "13:03", [pod(runs("12:58"), (True, "13:02"), _SECOND, 2)], SERVING,
            f"{_SERVES}; pod demo-1 has restarted: {_AGAIN} (2 restarts in all): {_ENGINE}",
        ),
    ],
    "it cannot start": [
        Moment("12:28", [pod(runs("12:26"), (False, "12:25"))], STARTING, NONE_READY),
        Moment(
            "12:31", [pod(_BAD_START, (False, "12:25"))], RESTARTING,
            f"pod demo-1: Restarting: {_BAD} (0 restarts in all): {_UNFIT}", "Restarting",
        ),
        Moment(
            "12:32", [pod(runs("12:31"), (False, "12:25"), _BAD_START, 1)], RESTARTING,
            f"pod demo-1: Restarting: {_BAD} (1 restart in all): {_UNFIT}",
        ),
        Moment(
            "12:36",
            [pod(waits("CrashLoopBackOff", _BACK_OFF), (False, "12:25"),
                 ended(2, "12:31", "12:35", _UNFIT), 1)],
            CRASHING,
            "pod demo-1: CrashLoopBackOff: its container worker ended with exit code 2 at "
            f"{_at('12:35')} (1 restart in all): {_UNFIT}", "Restarting CrashLoopBackOff",
        ),
    ],
    "it is killed for memory again and again": [
        Moment(
            "12:37", [pod(runs("12:35"), (True, "12:36"), _OOM, 1)], SERVING,
            f"{_SERVES}; pod demo-1 has restarted: {_ENDED_FOR_MEMORY} (1 restart in all)",
        ),
        Moment(
            "12:51",
            [pod(waits("CrashLoopBackOff", _BACK_OFF), (False, "12:51"), _OOM_AGAIN, 1)],
            "False/OOMKilled False/OOMKilled True/OOMKilled",
            "pod demo-1: OOMKilled: its container worker was killed for memory at "
            f"{_at('12:50')} (1 restart in all)", "OOMKilled",
        ),
        Moment(
            "13:02", [pod(runs("13:01"), (False, "12:51"), _OOM_AGAIN, 2)],
            "False/OOMKilled False/OOMKilled True/OOMKilled",
            "pod demo-1: OOMKilled: its container worker was killed for memory at "
            f"{_at('12:50')} (2 restarts in all)",
        ),
        Moment(
            "13:05", [pod(runs("13:01"), (True, "13:05"), _OOM_AGAIN, 2)], SERVING,
            f"{_SERVES}; pod demo-1 has restarted: its container worker was killed for memory at "
            f"{_at('12:50')} (2 restarts in all)",
        ),
    ],
    "its engine hangs": [
        Moment("12:29", [pod(runs("12:27"), (True, "12:28"))], SERVING, _SERVES),
        Moment(  # the worker knows it before the kubelet has asked
            "12:37", [pod(runs("12:27"), (True, "12:28"))], SERVING,
            f"{_SERVES}; pod demo-1: Hung: {_HANGS}", "Hung", hung=_HANGS,
        ),
        Moment(
            "12:39", [pod(runs("12:27"), (False, "12:38"))],
            "False/Hung True/Scaling False/NotStalled", f"pod demo-1: Hung: {_HANGS}",
            "Hung", hung=_HANGS,
        ),
        Moment(
            "12:58", [pod(runs("12:27"), (False, "12:38"))],
            "False/Hung True/Scaling False/NotStalled", f"pod demo-1: Hung: {_HANGS}",
            hung=_HANGS,
        ),
        Moment(  # the kubelet has restarted it
            "12:59", [pod(runs("12:59"), (False, "12:38"), ended(1, "12:27", "12:59", _HANGS), 1)],
            RESTARTING,
            "pod demo-1: Restarting: its container worker ended with exit code 1 at "
            f"{_at('12:59')} (1 restart in all): {_HANGS}", "Restarting",
            problem="/v1/runtime_config answered 503",
        ),
        Moment(
            "13:01", [pod(runs("12:59"), (True, "13:00"), ended(1, "12:27", "12:59", _HANGS), 1)],
            SERVING,
            f"{_SERVES}; pod demo-1 has restarted: its container worker ended with exit code 1 at "
            f"{_at('12:59')} (1 restart in all): {_HANGS}",
        ),
    ],
    "its API process is stopped": [
        Moment("12:29", [pod(runs("12:27"), (True, "12:28"))], SERVING, _SERVES),
        Moment(
            "12:39", [pod(runs("12:27"), (False, "12:38"))],
            "False/NotReady True/Scaling False/NotStalled",
            f"pod demo-1: NotReady: it was ready until {_at('12:38')}; its admin port: "
            "no answer within 2 s", "NotReady", problem="no answer within 2 s",
        ),
        Moment("12:49", [pod(runs("12:27"), (True, "12:48"))], SERVING, _SERVES),
    ],
    "its image is gone and comes back": [
        Moment("12:28", [pod(waits("ContainerCreating"), (False, "12:27"))], STARTING, NONE_READY),
        Moment(
            "12:29", [pod(waits("ErrImagePull", _NOT_FOUND), (False, "12:27"))], NO_IMAGE,
            f"pod demo-1: ImagePullBackOff: {_NOT_FOUND}", "ImagePullBackOff",
        ),
        Moment(
            "12:30", [pod(waits("ImagePullBackOff", f"Back-off: {_NOT_FOUND}"), (False, "12:27"))],
            NO_IMAGE, f"pod demo-1: ImagePullBackOff: Back-off: {_NOT_FOUND}",
        ),
        Moment("14:00", [pod(runs("14:00"), (False, "12:27"))], STARTING, NONE_READY),
        Moment("14:01", [pod(runs("14:00"), (True, "14:00"))], SERVING, _SERVES),
    ],
    "it is evicted": [
        Moment("12:30", [pod(runs("12:27"), (True, "12:29"))], SERVING, _SERVES),
        Moment(
            "13:01",
            [pod(ended(137, "12:27", "13:01"), (False, "13:01"), phase="Failed", reason="Evicted",
                 message=_EVICTED)],
            "False/Evicted True/Scaling False/NotStalled",
            f"a pod that failed: Evicted: {_EVICTED.strip()}", "Evicted",
        ),
        Moment(
            "13:02",
            [pod(ended(137, "12:27", "13:01"), (False, "13:01"), phase="Failed", reason="Evicted",
                 message=_EVICTED), scheduled("demo-2")],
            "False/Evicted True/Scaling False/NotStalled",
            f"a pod that failed: Evicted: {_EVICTED.strip()}",
        ),
        Moment(
            "13:03",
            [pod(ended(137, "12:27", "13:01"), (False, "13:01"), phase="Failed", reason="Evicted",
                 message=_EVICTED), pod(runs("13:02"), (False, "13:01"), name="demo-2")],
            STARTING, f"{NONE_READY}; one failed before: Evicted: {_EVICTED.strip()}",
        ),
        Moment("13:04", [pod(runs("13:02"), (True, "13:03"), name="demo-2")], SERVING, _SERVES),
    ],
    "one of two is killed for memory": [
        Moment(
            "12:28",
            [pod(runs("12:26"), (True, "12:27"), name=name) for name in ("demo-1", "demo-2")],
            SERVING, "2 of 2 pods serve", desired=2,
        ),
        Moment(
            "12:35",
            [pod(_OOM, (False, "12:35")), pod(runs("12:26"), (True, "12:27"), name="demo-2")],
            "True/Serving True/Scaling False/NotStalled",
            f"1 of 2 pods serve; pod demo-1: OOMKilled: {_ENDED_FOR_MEMORY} (0 restarts in all)",
            "OOMKilled", desired=2,
        ),
        Moment(
            "12:37",
            [pod(runs("12:35"), (True, "12:36"), _OOM, 1),
             pod(runs("12:26"), (True, "12:27"), name="demo-2")],
            SERVING,
            "2 of 2 pods serve; pod demo-1 has restarted: "
            f"{_ENDED_FOR_MEMORY} (1 restart in all)", desired=2,
        ),
    ],
    "it is replaced by one of a newer template": [
        Moment("12:29", [pod(runs("12:27"), (True, "12:28"), name="old-1")], SERVING, _SERVES),
        Moment(
            "12:30", [pod(runs("12:27"), (True, "12:28"), name="old-1"), scheduled("new-1")],
            "True/Serving True/RollingOut False/NotStalled", _SERVES, outdated=1,
        ),
        Moment(
            "12:40",
            [pod(runs("12:27"), (True, "12:28"), name="old-1"),
             pod(runs("12:31"), (True, "12:39"), name="new-1")],
            "True/Serving True/RollingOut False/NotStalled", "2 of 1 pods serve", outdated=1,
        ),
        Moment(  # it leaves, is ready, and answers on the connections that it has
            "12:41",
            [pod(runs("12:27"), (True, "12:28"), name="old-1", leaves="13:20"),
             pod(runs("12:31"), (True, "12:39"), name="new-1")],
            "True/Serving True/RollingOut False/NotStalled", _SERVES,
        ),
        Moment(
            "12:46",
            [pod(runs("12:27"), (False, "12:46"), name="old-1", leaves="13:20"),
             pod(runs("12:31"), (True, "12:39"), name="new-1")],
            SERVING, _SERVES,
        ),
        Moment("12:50", [pod(runs("12:31"), (True, "12:39"), name="new-1")], SERVING, _SERVES),
    ],
    "the keys of its API are deleted": [
        Moment("12:29", [pod(runs("12:27"), (True, "12:28"))], SERVING, _SERVES),
        Moment(
            "12:40", [pod(runs("12:27"), (True, "12:28"))], SERVING, f"{_SERVES}; {_KEYS}",
            keys_problem=_KEYS,
        ),
        Moment(  # its container starts again, with the keys that it has
            "12:45", [pod(runs("12:44"), (False, "12:43"), ended(1, "12:27", "12:43"), 1)],
            RESTARTING,
            "pod demo-1: Restarting: its container worker ended with exit code 1 at "
            f"{_at('12:43')} (1 restart in all)", "Restarting", keys_problem=_KEYS,
        ),
        Moment(
            "12:50", [pod(waits("ContainerCreating"), (False, "12:49"), name="demo-2")],
            "False/KeysMissing False/KeysMissing True/KeysMissing", _KEYS, "KeysMissing",
            keys_problem=_KEYS,
        ),
        Moment(
            "12:55", [pod(waits("ContainerCreating"), (False, "12:49"), name="demo-2")],
            STARTING, NONE_READY,
        ),
        Moment("12:59", [pod(runs("12:57"), (True, "12:58"), name="demo-2")], SERVING, _SERVES),
    ],
}  # fmt: skip


@dataclass
class Walk:
    """The passes over one history."""

    service: InferenceService = field(default_factory=create_service)
    observed: Observed = field(init=False)

    def __post_init__(self) -> None:
        first = create_observed(self.service, runtime=DecidedRuntime(1, 4, 1))
        made = plan(self.service, first, SETTINGS, unix_time(_at("12:20")))
        live = {m["kind"]: json.loads(json.dumps(m)) for m in made.apply}
        for body in live.values():
            body["metadata"]["resourceVersion"] = "5"
        self.observed = replace(first, live=live, previous=made.status, unsaved_s=0.0)

    def go(self, moment: Moment) -> tuple[dict[str, Any], tuple[Notice, ...]]:
        """The conditions and the events of a pass at `moment`."""
        now = unix_time(_at(moment.now))
        wanted = structs.replace(self.service.spec, replicas=moment.desired)
        service = replace(self.service, spec=wanted)
        pods = tuple(pod_of(body, now) for body in moment.pods if _is_watched(body))
        serves = any(one.serving for one in pods)
        counted = [one for one in pods if not one.terminating]
        status = {
            "replicas": len(counted) or 1,
            "readyReplicas": sum(one.ready for one in counted),
            "updatedReplicas": (len(counted) or 1) - moment.outdated,
        }
        known = self.observed.scrapes
        scrapes = {
            **known,
            **{p.uid: _scrape(known.get(p.uid, Scrape()), p, moment, now) for p in pods},
        }
        made = self.observed.live["Deployment"]
        spec = {**made["spec"], "replicas": moment.desired}
        live = {**self.observed.live, "Deployment": {**made, "spec": spec, "status": status}}
        observed = replace(
            self.observed,
            live=live,
            pods=pods,
            scrapes=scrapes,
            failed=None if serves else failure_of(moment.pods, now),
            keys_problem=moment.keys_problem,
        )
        planned = plan(service, observed, SETTINGS, now)
        self.observed = replace(
            self.observed,
            scrapes=scrapes,
            previous=planned.status,
            former=planned.pods,
            runtime=planned.runtime,
        )
        conditions: Any = planned.status["conditions"]
        return {entry["type"]: entry for entry in conditions}, planned.noticed


def _scrape(held: Scrape, asked: Pod, moment: Moment, now: float) -> Scrape:
    """What is held of a pod: of one that does not answer, what it said before."""
    if moment.problem or not (asked.ready or asked.unready_s):
        return replace(held, problem=moment.problem or "/v1/runtime_config answered 503")
    hung = Hung(now - 16, moment.hung) if moment.hung else None
    served = {"arrivals": 20, "finished": 20, "good": 20, "smooth": 20, "steps": 100,
              "ttft": FirstTokens(20, 0, sketch={200: 20})}  # fmt: skip
    tick = create_tick(int(now), t_s=now, **served)
    return Scrape(create_evidence(ticks=[tick]), create_config(hung=hung), now)


@pytest.mark.parametrize("name", HISTORIES)
def test_every_condition_is_true_at_every_moment(name: str) -> None:
    walk, has_served = Walk(), False
    for moment in HISTORIES[name]:
        conditions, notices = walk.go(moment)
        has_served |= moment.conditions.startswith("True/")
        told = {kind: f"{entry['status']}/{entry['reason']}" for kind, entry in conditions.items()}
        core = " ".join(told.pop(kind) for kind in ("Ready", "Reconciling", "Stalled"))
        assert core == moment.conditions, (moment.now, conditions["Ready"]["message"])
        assert conditions["Ready"]["message"] == moment.message, moment.now
        assert " ".join(n.reason for n in notices if n.warning) == moment.events, moment.now
        assert told.pop("ModelFits") == "True/Fits"
        # Requests of the window count also where the pod that served them does not serve now.
        assert told.pop("SLOMet") == ("True/TargetsHold" if has_served else "Unknown/NoTraffic")
        succeeds = "True/RequestsSucceed" if has_served else "Unknown/NoTraffic"
        assert told.pop("RequestsSucceed") == succeeds
        assert tuple(told.values()) == (_HEARD if core.startswith("True/") else _UNHEARD), (
            moment.now
        )


def test_a_pass_that_sees_the_same_again_tells_nothing_and_changes_nothing() -> None:
    for moments in HISTORIES.values():
        walk = Walk()
        for moment in moments:
            first, _ = walk.go(moment)
            again, notices = walk.go(moment)
            assert (again, notices) == (first, ()), moment.now
