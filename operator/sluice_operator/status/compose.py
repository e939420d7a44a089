"""The object's status: conditions first, then the evidence behind them. Pure.

Nothing in here changes while nothing happens, so an idle object's status is never written twice.
Shares and times are texts of three significant digits: the schema has no floats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_core.contract import Evidence, RuntimeConfig
from sluice_core.errors import timestamp
from sluice_core.model.sizing import carried_sequences, overflow_share
from sluice_core.words import clean, clean_all

from ..children.manifests import name_of, selector, workload_of
from ..children.runtime import DecidedRuntime
from ..cluster.observed import NODE_S, Object, Pod, Rollout, Trouble
from ..model.fit import Fit
from ..reasons import Foreign, Reason
from ..spec.service import API_VERSION, KIND, MAX_HISTORY, InferenceService
from ..tuner import Condition, Decision, TargetVerdict
from ..tuner.evidence import pooled
from ..tuner.types import EngineFailures, Move, ReplicaChange
from .usage import digits, step_times, work

_MAX_MESSAGE, _MAX_REASON = 2048, 1024
_OF_THE_NODES = frozenset({"Unschedulable", "SchedulingGated"})
"""Troubles of a new pod that say nothing about what it runs."""
_ENDED = frozenset({"Evicted", "Preempting", "Terminated"})
"""Ended by the node, which shuts down or lacks something: the next pod gets another node."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a status is made of. `desired`: replicas asked for; `commit`: the one that
    pods are pinned to, "" if they are not.

    `decision` is None before there is a cap. `problems`: sentences on pods that did not answer.
    `is_withheld`: an edit waits for its model to be read, or for its keys. `keys_problem`: why the
    Secret of the API's keys is unusable, "" if it is usable. `failed`: why the newest failed pod
    failed. `rival`: who keeps setting the Deployment's replicas, "" for nobody.
    """

    service: InferenceService
    fit: Fit
    commit: str
    rollout: Rollout
    pods: tuple[Pod, ...]
    runtime: DecidedRuntime
    desired: int
    ceiling: int | None
    decision: Decision | None
    evidence: tuple[Evidence, ...]
    configs: tuple[RuntimeConfig, ...]
    problems: tuple[str, ...]
    is_withheld: bool = False
    keys_problem: str = ""
    failed: Trouble | None = None
    rival: str = ""

    @property
    def has_owner(self) -> bool:
        """Whether somebody else sets the replicas."""
        spec = self.service.spec
        return bool(self.rival) or spec.suspend or spec.replicas is not None

    @property
    def drains(self) -> bool:
        """True while a pod leaves, whose room another one will get."""
        return any(pod.drains for pod in self.pods)


def num_serving(pods: Sequence[Pod]) -> int:
    """Pods that the Service sends requests to."""
    return sum(pod.serving for pod in pods)


def build(report: Report, previous: Object, now: float) -> dict[str, Any]:
    """The whole status of an object whose spec could be read. All of its texts are clean, also
    those that others wrote into the object, its ConfigMap or a pod's report."""
    service, rollout, decision = report.service, report.rollout, report.decision
    parts = {
        "model": _model(report),
        "memory": _memory(report),
        "batching": _batching(report),
        "scaling": _scaling(report),
    }
    if decision is not None:
        # spec.slo may have been removed; then there is nothing to report about it.
        slo = service.spec.slo
        parts["slo"] = _slo(decision, slo.percentile) if slo.has_target else {}
        parts |= {"load": _load(report, decision, now), "pods": _pods(decision)}
    status: dict[str, Any] = {
        "observedGeneration": service.generation,
        "url": f"http://{service.name}.{service.namespace}.svc",
        "replicas": rollout.replicas,
        "readyReplicas": rollout.ready,
        "selector": ",".join(f"{key}={value}" for key, value in selector(service).items()),
        **{name: part for name, part in parts.items() if part},
        "conditions": stamped(_conditions(report, now), previous, service.generation, now),
    }
    cleaned: dict[str, Any] = clean_all(status)
    return cleaned


def fail(
    status: dict[str, Any], previous: Object, reason: Reason, message: str, now: float
) -> dict[str, Any]:
    """`status` of a pass that could not read or write: an invalid spec, a quota, a policy, a
    missing right, a taken name."""
    conditions = kept_conditions(status)
    ready = conditions.get("Ready")
    if ready is None or ready.reason == Reason.STARTING:  # pods that cannot be made do not start
        conditions["Ready"] = Condition(False, reason, message)
    conditions["Reconciling"] = Condition(False, reason, "")
    conditions["Stalled"] = Condition(True, reason, message)
    return _with(status, conditions, previous, now)


def wait_for_deletion(
    status: dict[str, Any], previous: Object, names: str, now: float
) -> dict[str, Any]:
    """`status` while children, `names`, of a deleted object of this name still exist."""
    reason, message = Reason.AWAITING_DELETION, f"{names}: of a deleted object of this name"
    conditions = kept_conditions(status)
    conditions["Ready"] = Condition(False, reason, message)
    conditions["Reconciling"] = Condition(True, reason, message)
    conditions["Stalled"] = Condition(False, Reason.NOT_STALLED, "")
    return _with(status, conditions, previous, now)


def _with(
    status: dict[str, Any], conditions: Mapping[str, Condition], previous: Object, now: float
) -> dict[str, Any]:
    generation = status["observedGeneration"]
    return {**status, "conditions": stamped(conditions, previous, generation, now)}


def kept_conditions(previous: Object) -> dict[str, Condition]:
    answers = {"True": True, "False": False}
    return {
        entry["type"]: Condition(
            answers.get(entry["status"]),
            Foreign(entry.get("reason", "")),  # ours too, as it was written
            entry.get("message", ""),
        )
        for entry in previous.get("conditions") or ()
    }


def stamped(
    conditions: Mapping[str, Condition], previous: Object, generation: int, now: float
) -> list[dict[str, Any]]:
    """In the API's form; a transition is a change of the status, not of the message."""
    before = {entry["type"]: entry for entry in previous.get("conditions") or ()}
    stamped = []
    for kind, condition in conditions.items():
        status = {True: "True", False: "False", None: "Unknown"}[condition.holds]
        old = before.get(kind, {})
        unchanged = old.get("status") == status and "lastTransitionTime" in old
        stamped.append(
            {
                "type": kind,
                "status": status,
                "reason": clean(condition.reason, _MAX_REASON),
                "message": clean(condition.message, _MAX_MESSAGE),
                "lastTransitionTime": old["lastTransitionTime"] if unchanged else timestamp(now),
                "observedGeneration": generation,
            }
        )
    return stamped


def _conditions(report: Report, now: float) -> dict[str, Condition]:
    ready = _ready(report)
    stalled = _stalled(report, ready, now)
    fits = {"True": True, "False": False, "Unknown": None}[report.fit.status]
    return {
        "Ready": ready,
        "Reconciling": _reconciling(report, ready, stalled),
        "Stalled": stalled,
        "ModelFits": Condition(fits, report.fit.reason, report.fit.message),
        **_tuned(report),
    }


def _tuned(report: Report) -> dict[str, Condition]:
    decision = report.decision
    if decision is None:
        unknown = Condition(None, Reason.NO_PODS, "no pod has reported yet")
        kinds = ("SLOMet", "SLOFeasible", "MetricsAvailable", "RequestsSucceed")
        return dict.fromkeys(kinds, unknown)
    metrics = decision.metrics
    if report.problems:
        said = "; ".join([metrics.message, *report.problems])
        metrics = Condition(metrics.holds, metrics.reason, said)
    return {
        "SLOMet": decision.slo_met,
        "SLOFeasible": decision.slo_feasible,
        "MetricsAvailable": metrics,
        "RequestsSucceed": decision.succeed,
    }


def _ready(report: Report) -> Condition:
    """The Ready condition: True while a pod serves, unless its engine fails all that it is asked.
    Past troubles are reported as past."""
    trouble = _keys_trouble(report) or _first_trouble(report)
    if serving := num_serving(report.pods):
        told = trouble[1] if trouble else _last_restart(report.pods)
        message, failures = f"{serving} of {report.desired} pods serve", _if_all(report.decision)
        if failures is not None:
            # Without numbers: the status is written where its words change.
            message += f", and each request fails: {', '.join(sorted(failures.by))}"
        reason = Reason.SERVING if failures is None else Reason.REQUESTS_FAIL
        message = "; ".join(filter(None, (message, told)))
        return Condition(failures is None, reason, message)
    if report.fit.status == "False":
        return Condition(False, report.fit.reason, report.fit.message)
    if trouble:
        return Condition(False, *trouble)
    if report.fit.is_pending and not (report.pods or report.rollout.observed):
        return Condition(False, Reason.READING_MODEL, report.fit.message)
    if report.desired == 0:
        suspended = report.service.spec.suspend
        said = _taken(report) if report.rival else "spec.replicas is 0"
        said = "spec.suspend is true" if suspended else said
        if left := len(report.pods):
            return Condition(False, Reason.SCALING, f"{said}; pods left: {left}")
        reason = Reason.SUSPENDED if suspended else Reason.SCALED_TO_ZERO
        return Condition(not suspended, reason, said)
    failed = _sentence("one failed before", report.failed) if report.failed else ""
    message = f"none of {report.desired} pods is ready yet"
    return Condition(False, Reason.STARTING, "; ".join(filter(None, (message, failed))))


def _if_all(decision: Decision | None) -> EngineFailures | None:
    """The failures, if nothing else comes of requests now."""
    return decision.failures if decision is not None and decision.failures.is_all else None


def _last_restart(pods: Sequence[Pod]) -> str:
    """The last restart of the pods that serve; empty where none has restarted."""
    ends = [
        (pod.ended.at_s, pod.name, pod.ended.sentence) for pod in pods if pod.serving and pod.ended
    ]
    _, name, sentence = max(ends, default=(0.0, "", ""))
    return f"pod {name} has restarted: {sentence}" if ends else ""


def _keys_trouble(report: Report) -> tuple[Reason, str] | None:
    """None if pods have the keys, and none of them serves for another reason."""
    has_keys = any(pod.has_volumes and not pod.terminating for pod in report.pods)
    if not report.keys_problem or (has_keys and not num_serving(report.pods)):
        return None
    return Reason.KEYS_MISSING, report.keys_problem


def _first_trouble(report: Report) -> tuple[Reason | Foreign, str] | None:
    """Reason and sentence of the first pod, by name, that makes no progress. A pod that waits for
    the room of a draining one makes progress."""
    pods = [pod for pod in report.pods if not (report.drains and pod.has_no_room)]
    if told := _first_of(pods):
        return told
    return _of_failed(report) or _of_deployment(report)


def _first_of(pods: Sequence[Pod]) -> tuple[Reason | Foreign, str] | None:
    for pod in sorted(pods, key=lambda pod: pod.name):
        if pod.trouble and not pod.terminating:
            return pod.trouble.reason, _sentence(f"pod {pod.name}", pod.trouble)
    return None


def _of_failed(report: Report) -> tuple[Reason | Foreign, str] | None:
    """Why pods have failed, if none has got further since."""
    live = [pod for pod in report.pods if not pod.terminating]
    if not report.failed or not report.desired or any(pod.started_s for pod in live):
        return None
    # Without its name: if its node refuses each pod, another one fails every second.
    return report.failed.reason, _sentence("a pod that failed", report.failed)


def _of_deployment(report: Report) -> tuple[Reason | Foreign, str] | None:
    """The Deployment's own trouble; the quota that a pod lacks may be held by one that drains."""
    trouble = report.rollout.trouble
    if trouble is None or (report.drains and trouble.reason == "FailedCreate"):
        return None
    return trouble.reason, _sentence(f"the {workload_of(report.service)}", trouble)


def _sentence(who: str, trouble: Trouble) -> str:
    said = f"{who}: {trouble.reason}: {trouble.message}".rstrip(": ")
    advice = [field for lack, field in _MENDED_BY.items() if lack in trouble.message]
    return "; ".join([said, *advice])


_MENDED_BY = {
    "must specify limits.memory": "spec.hardware.hostMemory sets it",
    "Insufficient ephemeral-storage": "a claim in spec.model.cache.pvc takes its place",
}
"""By what Kubernetes lacks of a pod, the field that gives it."""


def _stalled(report: Report, ready: Condition, now: float) -> Condition:
    """The Stalled condition: True if the spec will not be reached by itself."""
    if report.fit.status == "False":
        return Condition(True, report.fit.reason, report.fit.message)
    if ready.reason == Reason.KEYS_MISSING or (report.is_withheld and report.keys_problem):
        return Condition(True, Reason.KEYS_MISSING, report.keys_problem)
    serves = ready.holds or num_serving(report.pods)
    trouble = _stuck_rollout(report, now) if serves else _stuck_start(report, now)
    if trouble:
        return Condition(True, *trouble)
    return Condition(False, Reason.NOT_STALLED, "")


def _stuck_start(report: Report, now: float) -> tuple[Reason | Foreign, str] | None:
    """Why no pod will serve by itself. A node may still take a pod, or be added for it."""
    live = [pod for pod in report.pods if not pod.terminating]
    waiting = [
        pod for pod in live if pod.roomless_s and (report.drains or now - pod.roomless_s < NODE_S)
    ]
    if told := _first_of([pod for pod in _stuck(live) if pod not in waiting]):
        return told
    # A pod that its node ended is replaced elsewhere.
    is_past = waiting or (report.failed and report.failed.reason in _ENDED)
    return (None if is_past else _of_failed(report)) or _of_deployment(report)


def _stuck(pods: Sequence[Pod]) -> list[Pod]:
    """Pods whose trouble does not pass by itself."""
    return [pod for pod in pods if pod.trouble and not pod.trouble.passes]


def _stuck_rollout(report: Report, now: float) -> tuple[Reason | Foreign, str] | None:
    """Why the newest spec cannot take over while pods of an older one serve. A ready pod does not
    block it, and `_rolling_out` reports nodes without room. If no node takes a pod for another
    reason, that is not a lack of room, unless an autoscaler adds a node."""
    if not report.rollout.outdated:
        return None
    starting = [pod for pod in report.pods if not pod.ready and not pod.terminating]
    waiting = [p for p in starting if p.trouble and p.trouble.reason in _OF_THE_NODES]
    late = [pod for pod in waiting if pod.has_no_room and _is_late(report, pod, now)]
    told = _first_of([*(pod for pod in _stuck(starting) if pod not in waiting), *late])
    return told or (None if waiting else _of_deployment(report))


def _is_late(report: Report, pod: Pod, now: float) -> bool:
    """True if no node will take a new pod by itself. A lack of room under Surge is reported
    elsewhere; under Replace the pod gets the room of the next one that stops."""
    waited_s = now - pod.roomless_s
    if not pod.lacks_room:
        return waited_s >= NODE_S
    return report.service.spec.rollout == "Replace" and waited_s >= 2 * NODE_S


def _reconciling(report: Report, ready: Condition, stalled: Condition) -> Condition:
    rollout, desired = report.rollout, report.desired
    if stalled.holds:
        return Condition(False, stalled.reason, "")
    if ready.reason in (Reason.READING_MODEL, Reason.SCALING):
        return Condition(True, ready.reason, ready.message)
    is_behind = not rollout.observed or rollout.updated < desired or rollout.outdated
    if is_behind or _serving_still(report):
        return _rolling_out(report)
    is_scaling = rollout.replicas != desired or rollout.ready < desired
    if report.rival:
        return Condition(is_scaling, Reason.REPLICAS_TAKEN, _taken(report))
    if is_scaling:
        return Condition(True, Reason.SCALING, f"{rollout.ready} of {desired} pods are ready")
    if report.is_withheld:
        message = "the pods stay as they are until the model that is asked for can be read"
        return Condition(True, Reason.HEADERS_UNAVAILABLE, message)
    return Condition(False, Reason.SETTLED, "")


def _taken(report: Report) -> str:
    """The sentence on an HPA, say, that has the Deployment for its target."""
    name, kind = report.service.name, workload_of(report.service)
    taken = f"{kind} {name_of(report.service, kind)}"
    return (
        f"{report.rival} sets the replicas of {taken} to {report.desired} and keeps "
        f"them: an HPA must name {API_VERSION} {KIND} {name} in its scaleTargetRef, not the "
        f"{kind}; the next edit of this object takes them back"
    )


def _serving_still(report: Report) -> int:
    """Pods of an older template that serve while they leave: the Deployment omits them."""
    newest = {pod.template for pod in report.pods if not pod.terminating}
    leaving = [pod for pod in report.pods if pod.terminating and pod.ready]
    return sum(pod.template not in newest for pod in leaving) if newest else 0


def _rolling_out(report: Report) -> Condition:
    """The progress of the rollout, and if it waits because no node takes one more pod."""
    rollout, old = report.rollout, report.rollout.outdated
    roomless = [pod for pod in report.pods if pod.has_no_room and not pod.terminating]
    waits = sorted(pod.name for pod in roomless if pod.lacks_room)
    if waits and old and not report.drains and report.service.spec.rollout == "Surge":
        message = (
            f"no node has room for the new pod {waits[0]} beside those of the older spec "
            f"({old}), which go on serving: add room, or set spec.rollout to Replace, which stops "
            "one first"
        )
        return Condition(True, Reason.NO_ROOM_TO_SURGE, message)
    message = f"{rollout.updated} of {report.desired} pods are up to date"
    left = f", {old} of an older spec are left" if old else ""
    if not old and (leaving := _serving_still(report)):
        left = f", and those of an older spec still serve while they leave: {leaving}"
    told = None if report.drains else _first_of(roomless)
    return Condition(True, Reason.ROLLING_OUT, message + left + (f"; {told[1]}" if told else ""))


def _model(report: Report) -> dict[str, Any]:
    found = report.fit.checkpoint
    name = {"name": report.service.spec.model.name}
    if found is None:
        return name
    sizes = {"parameters": found.num_parameters, "bytes": found.weights_bytes}
    pinned = {"resolvedRevision": report.commit} if report.commit else {}
    return {**name, **sizes, **pinned}


def _memory(report: Report) -> dict[str, Any]:
    memory = report.fit.memory
    measured = next((e.memory for e in report.evidence if e.memory.measured), None)
    planned = memory.as_dict() if memory else dict(measured.planned) if measured else {}
    if not planned:
        return {}
    part: dict[str, Any] = {"planned": planned}
    if memory:
        part["kvTokens"] = memory.kv_tokens
    if measured:
        part["measured"] = dict(measured.measured)
        part["kvTokens"] = measured.kv_tokens
        part["errorPercent"] = _error_percent(planned, measured.measured)
        part |= _observed(report, measured.kv_tokens)
    return part


def _observed(report: Report, kv_tokens: int) -> dict[str, Any]:
    """Sequences and expected preemptions in this memory at the observed lengths."""
    lengths = pooled(report.evidence)
    if not lengths.n or not kv_tokens:
        return {}
    share = overflow_share(report.runtime.cap or 0, kv_tokens, lengths.mean, lengths.sigma)
    return {
        "sequences": carried_sequences(kv_tokens, lengths.mean, lengths.sigma),
        "expectedPreemptions": _percent(share),
    }


def _error_percent(planned: Mapping[str, int], measured: Mapping[str, int]) -> str:
    """Deviation of weights and activations from the plan, as a share of all that the model gets.

    The reserve is the process's own and stands apart. The KV cache is made to fill what is left.
    """
    model = [key for key in ("weights_bytes", "activation_bytes") if key in measured]
    missed = sum(measured[key] - planned.get(key, 0) for key in model)
    apart = ("total_bytes", "reserve_bytes")
    plan = sum(size for key, size in planned.items() if key not in apart)
    return _percent(missed / plan) if plan > 0 else "0"


def _batching(report: Report) -> dict[str, Any]:
    runtime, decision, asked = report.runtime, report.decision, report.service.spec.batching
    part: dict[str, Any] = {
        "mode": asked.mode,
        "ceiling": report.ceiling,
        "cap": runtime.cap,
        "initialNumSeqs": asked.initial_num_seqs,
        "epoch": runtime.epoch,
        **_measured(report.configs),
    }
    if decision is not None:
        part |= _why(decision.cap_move, decision.cap)
        part["predicted"] = decision.predicted_cap
        part["effectiveBatch"] = f"{decision.effective_batch:.1f}"
        part["limitedBy"] = decision.limited_by
        part["step"] = step_times(report.evidence) or None
    change = runtime.past.last_change
    if change is not None:
        part["lastChange"] = {
            "time": timestamp(change.time_s),
            "from": change.from_cap,
            "to": change.to_cap,
            "epoch": change.epoch,
            "reason": change.reason,
        }
    return {key: value for key, value in part.items() if value is not None}


def _measured(configs: Sequence[RuntimeConfig]) -> dict[str, Any]:
    """Where pods hold the cap and what they measure gaps on: of the least precise pod."""
    if not configs:
        return {}
    gaps = {config.gaps_from for config in configs}
    return {
        "capIs": "gate" if any(config.cap_is == "gate" for config in configs) else "live",
        "gapsFrom": next(one for one in ("chunks", "tokens") if one in gaps),
    }


def _why(move: Move, now: int) -> dict[str, Any]:
    """The last pass's reason, and the change that it would make but may not."""
    why = {"reason": move.reason, "message": clean(move.message, _MAX_MESSAGE)}
    return why if move.to == now else {**why, "proposed": move.to}


def _slo(decision: Decision, percentile: str) -> dict[str, Any]:
    part: dict[str, Any] = {name: _target(verdict) for name, verdict in decision.verdicts.items()}
    part["percentile"] = percentile
    if decision.slo_met.holds is not None:
        part["met"] = decision.slo_met.holds
    for key, share in (("good", decision.good_share), ("smooth", decision.smooth_share)):
        if share is not None:
            part[f"{key}Percent"] = _percent(share)
    return part


def _target(verdict: TargetVerdict) -> dict[str, Any]:
    part: dict[str, Any] = {
        "target": milliseconds(verdict.target_ms),
        "samples": verdict.n,
        "over": verdict.over,
        "allowedPercent": _percent(verdict.allowed_share),
        "usedPercent": _percent(verdict.over_share),
        "verdict": verdict.verdict,
    }
    if verdict.quantile_ms is not None:
        part["measured"] = milliseconds(verdict.quantile_ms)
    if verdict.bound_ms is not None:
        part["bound"] = milliseconds(verdict.bound_ms)
    part["samplesNeeded"] = verdict.samples_needed
    part["verifiable"] = verdict.verifiable
    return part


def _scaling(report: Report) -> dict[str, Any]:
    decision, history = report.decision, report.runtime.past.scale_history
    part: dict[str, Any] = {"replicasOwner": "External" if report.has_owner else "Sluice"}
    if decision is not None:
        part |= _why(decision.replicas_move, decision.replicas)
        part["desired"] = decision.desired_replicas
        part["pending"] = decision.pending_replicas
    if history:
        newest = sorted(history, key=lambda change: -change.time_s)[:MAX_HISTORY]
        part["history"] = [_replica_change(change) for change in newest]
        part["lastDecision"] = part["history"][0]
    return part


def _replica_change(change: ReplicaChange) -> dict[str, Any]:
    return {
        "time": timestamp(change.time_s),
        "from": change.from_replicas,
        "to": change.to_replicas,
        "reason": change.reason,
    }


def _load(report: Report, decision: Decision, now: float) -> dict[str, Any]:
    same_targets_s = now - report.runtime.past.targets_since_s
    part: dict[str, Any] = {
        "arrivalsPerSecond": f"{decision.arrivals_per_s:.2f}",
        "running": sum(config.running for config in report.configs),
        "waiting": sum(config.waiting.total for config in report.configs),
        **work(report.evidence, report.service.spec.slo.window_s, same_targets_s),
        **_failed(decision.failures),
    }
    return {**part, "cause": decision.cause} if decision.cause != "none" else part


def _failed(failures: EngineFailures) -> dict[str, Any]:
    if not failures.num:
        return {}
    return {"failed": dict(failures.by), "failedPercent": _percent(failures.share)}


def _pods(decision: Decision) -> dict[str, Any]:
    named = {"silent": sorted(decision.silent_pods), "noisy": sorted(decision.noisy_pods)}
    return {key: names for key, names in named.items() if names}


def milliseconds(value: float) -> str:
    """A duration as text with three significant digits: 0.42ms, 51.3ms, 1230ms."""
    return f"{digits(value)}ms" if value < 1e6 else f"{value / 1000:.0f}s"


def _percent(share: float) -> str:
    """A share as percent; 0 below a thousandth of a percent, as no target allows so little."""
    percent = 100 * share
    return digits(percent) if abs(percent) >= 0.001 else "0"
