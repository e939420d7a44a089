"""Kubernetes events: only changes, each once, under stable reasons. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_core.errors import timestamp
from sluice_core.words import clean

from ..children.manifests import digest
from ..children.runtime import DecidedRuntime
from ..cluster.observed import Object, Pod
from ..reasons import Foreign, Reason
from ..settings import FIELD_MANAGER
from ..spec.service import API_VERSION, KIND
from ..tuner import Decision
from .compose import milliseconds

_MAX_MESSAGE, _MAX_REASON = 1024, 128
"""Characters: the API server's own limits."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One event to post, and to log. `key`: two with the same key are one, also across restarts."""

    warning: bool
    reason: Reason | Foreign
    message: str
    key: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", clean(self.message, _MAX_MESSAGE))


_GOOD = {
    "ModelFits": "True",
    "Accepted": "True",
    "Succeeded": "True",
    "RequestsSucceed": "True",
    "Ready": "True",
    "Stalled": "False",
    "SLOMet": "True",
    "SLOFeasible": "True",
    "MetricsAvailable": "True",
}
"""Conditions that are reported, the one that explains most first, and their good status."""
_QUIET = frozenset(
    {
        Reason.READING_MODEL,
        Reason.STARTING,
        Reason.SCALING,
        Reason.SCALED_TO_ZERO,
        Reason.NO_PODS,
    }
)
"""Reasons of normal operation, which need no event."""
_WAITS = frozenset({Reason.NO_ROOM_TO_SURGE, Reason.HEADERS_UNAVAILABLE, Reason.REPLICAS_TAKEN})
"""Reasons of `Reconciling` that may last for good, until somebody acts."""


def of_pods(before: Mapping[str, Pod], pods: Sequence[Pod]) -> Iterator[Notice]:
    """An event for each container that ended and each pod that hangs since `before`, by uid. Its
    object may have been Ready all the while."""
    for pod in pods:
        old = before.get(pod.uid)
        if old is None or pod.terminating:
            continue
        if pod.ended and pod.ended.at_s > (old.ended.at_s if old.ended else 0.0):
            text, key = pod.ended.sentence, f"ended/{pod.uid}/{pod.ended.at_s:.0f}"
            yield Notice(True, pod.ended.reason, f"pod {pod.name}: {text}", key)
        if pod.trouble and pod.trouble.reason == Reason.HUNG and pod.trouble != old.trouble:
            text = pod.trouble.message
            yield Notice(True, Reason.HUNG, f"pod {pod.name}: {text}", f"hung/{pod.uid}/{text}")


def transitions(
    previous: Object, status: Object, told: Collection[Reason | Foreign] = ()
) -> Iterator[Notice]:
    """An event for what turned bad, or bad for another reason, and for what is good again.

    One reason is reported once, even if it turns several conditions, and never if it is in `told`.
    From Unknown to good is no news.
    """
    before = {entry["type"]: entry for entry in previous.get("conditions") or ()}
    after = {entry["type"]: entry for entry in status["conditions"]}
    told = _QUIET.union(told)
    for kind in filter(after.__contains__, _GOOD):
        new, old = after[kind], before.get(kind, {})
        if new["status"] == "Unknown" or new["reason"] in told:
            continue
        bad = new["status"] != _GOOD[kind]
        turned = old.get("status") != new["status"] and (
            bad or old.get("status") in ("True", "False")
        )
        if turned or (bad and old.get("reason") != new["reason"]):
            told |= {new["reason"]}
            key = f"{kind}/{new['status']}/{new['reason']}/{_when(new)}"
            yield Notice(bad, new["reason"], _text(new), key)
    new, old = after.get("Reconciling", {}), before.get("Reconciling", {})
    if new.get("reason") in _WAITS - told and new["reason"] != old.get("reason"):
        key = f"Reconciling/{new['reason']}/{new['lastTransitionTime']}"
        yield Notice(True, new["reason"], _text(new), key)


def _when(entry: Object) -> str:
    """Time of the transition. A share near the allowed one crosses it again and again, so each
    direction is reported once in ten minutes."""
    at: str = entry["lastTransitionTime"]
    is_share = entry["type"] in ("SLOMet", "RequestsSucceed")
    return at[: len("2006-01-02T15:0")] if is_share else at


def decided(before: DecidedRuntime, after: DecidedRuntime, decision: Decision) -> Iterator[Notice]:
    """The changes of a decision, with the evidence."""
    seen = _evidence_text(decision)
    if decision.cap_reason and after.cap != before.cap:
        count, why = f"{before.cap} -> {after.cap}", decision.cap_move.message
        message = f"epoch {after.epoch}: cap {count}: {why}; {seen}"
        yield Notice(False, decision.cap_reason, message, f"epoch/{after.epoch}")
    if decision.replicas_reason and after.replicas != before.replicas:
        count, why = f"{before.replicas} -> {after.replicas}", decision.replicas_move.message
        message = f"epoch {after.epoch}: replicas {count}: {why}; {seen}"
        changed_s = max((c.time_s for c in after.past.scale_history), default=0.0)
        key = f"replicas/{count}/{changed_s:.0f}"
        yield Notice(False, decision.replicas_reason, message, key)


def left_out(unknown: tuple[str, ...], generation: int) -> Notice:
    """The event that the fields `unknown` are left out, once for each edit."""
    text = f"left out, as this operator does not know them: {', '.join(unknown)}"
    key = f"unknown/{digest(unknown)}/{generation}"
    return Notice(True, Reason.UNKNOWN_FIELDS, text, key)


def _evidence_text(decision: Decision) -> str:
    parts = [
        f"{name} {milliseconds(v.target_ms)}: n={v.n}, over={v.over}, {v.verdict}"
        for name, v in decision.verdicts.items()
    ]
    return "; ".join(parts) or "no targets"


def _text(entry: Object) -> str:
    return f"{entry['type']}={entry['status']}: {entry['message']}".removesuffix(": ")


def manifest(meta: Object, notice: Notice, now: float, kind: str = KIND) -> dict[str, Any]:
    """`notice` on the object of a kind with metadata `meta`, under a name that its key decides."""
    name = f"{meta['name']}.{digest([meta['uid'], notice.reason, notice.key])}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": kind,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Warning" if notice.warning else "Normal",
        "reason": clean(notice.reason, _MAX_REASON),
        "message": notice.message,
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "reportingInstance": FIELD_MANAGER,
        "firstTimestamp": timestamp(now),
        "lastTimestamp": timestamp(now),
        "count": 1,
    }
