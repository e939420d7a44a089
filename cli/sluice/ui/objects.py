"""What objects, pods and events of a cluster say, ready to be shown. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_core.bounded import count
from sluice_operator.cluster.observed import pod_of
from sluice_operator.reasons import Reason
from sluice_operator.times import milliseconds, unix_time

from sluice.kube import UNREADABLE

from .charts import Mark
from .history import HOUR_S, TARGETS, History

Object = Mapping[str, Any]
VERDICTS = ("Breach", "Hold", "Headroom", "NoTraffic")
"""From the worst on."""
MEANINGS = {str(reason): reason.meaning for reason in Reason}
TOLD_S = 2.0
"""An event and a status tell one change within these seconds."""


@dataclass(frozen=True, slots=True)
class Detail:
    """What belongs to one object. `notes`: why something is missing."""

    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that is shown of a cluster. `at_s`: Unix time of the last answer, 0 before any.
    `problem`: why none has come since. `notes`: what is left out. `histories`: by uid."""

    services: Sequence[Object] = ()
    batches: Sequence[Object] = ()
    at_s: float = 0.0
    problem: str = ""
    notes: tuple[str, ...] = ()
    histories: dict[str, History] = field(default_factory=dict)

    def find(self, namespace: str, name: str) -> Object | None:
        """The service of that name, None if there is none."""
        return next((body for body in self.services if key_of(body) == (namespace, name)), None)


def key_of(body: Object) -> tuple[str, str]:
    """Namespace and name."""
    return str(body["metadata"].get("namespace", "")), str(body["metadata"].get("name", ""))


def condition(body: Object, kind: str) -> Object:
    """One of an object's conditions; empty where it has none."""
    found = (body.get("status") or {}).get("conditions") or ()
    return next((one for one in found if one.get("type") == kind), {})


def verdict_of(body: Object) -> str:
    """The worst verdict over the targets."""
    slo = (body.get("status") or {}).get("slo") or {}
    told = {(slo.get(name) or {}).get("verdict") for name in TARGETS}
    return next((verdict for verdict in VERDICTS if verdict in told), VERDICTS[-1])


def in_order(services: Sequence[Object]) -> list[Object]:
    """Those that breach first, by how far; then those that are not ready; then the others."""
    return sorted(services, key=_place)


def _place(body: Object) -> tuple[object, ...]:
    try:
        verdict, is_ready = verdict_of(body), condition(body, "Ready").get("status") == "True"
        rank = VERDICTS.index(verdict) if is_ready or verdict == "Breach" else 0.5
        return rank, -_excess(body), *key_of(body)
    except UNREADABLE:
        return 0.5, 0.0, *key_of(body)


def _excess(body: Object) -> float:
    """The largest of measured over target; 0 where nothing is measured."""
    slo = (body.get("status") or {}).get("slo") or {}
    pairs = [
        (milliseconds(one.get("measured")), milliseconds(one.get("target")))
        for one in (slo.get(name) or {} for name in TARGETS)
    ]
    return max([ms / target for ms, target in pairs if ms and target], default=0.0)


def marks_of(body: Object, events: Sequence[Object], now: float) -> list[Mark]:
    """What was decided and told in the last hour, oldest first: by events, and by the status where
    no event is left."""
    told = [
        (unix_time(e.get("lastTimestamp")), f"{e.get('reason')}: {e.get('message')}",
         e.get("type") == "Warning")
        for e in events
    ]  # fmt: skip
    times = [at_s for at_s, _, _ in told]
    for at_s, text in _changes(body.get("status") or {}):
        if all(abs(at_s - other_s) > TOLD_S for other_s in times):
            told.append((at_s, text, False))
    recent = sorted(one for one in told if one[0] >= now - HOUR_S)
    return [Mark(at_s, n, text, bad) for n, (at_s, text, bad) in enumerate(recent, 1)]


def _changes(status: Object) -> Iterator[tuple[float, str]]:
    scaling, cap = status.get("scaling") or {}, (status.get("batching") or {}).get("lastChange")
    changes = [("cap", cap or {}), *(("replicas", one) for one in scaling.get("history") or ())]
    for what, change in changes:
        reason = str(change.get("reason", ""))
        moved = f"{change.get('from', '-')} -> {change.get('to', '-')}"
        text = f"{reason}: {what} {moved}: {MEANINGS.get(reason, '')}"
        yield unix_time(change.get("time")), text.removesuffix(": ")


def pod_rows(pods: Sequence[Object], now: float) -> Iterator[tuple[str, str, str, str, str]]:
    """Name, phase, restarts, age in words and trouble of each pod."""
    for body in sorted(pods, key=key_of):
        pod, status = pod_of(body, now), body.get("status") or {}
        kinds = ("containerStatuses", "initContainerStatuses")
        restarts = sum(
            count(c.get("restartCount")) or 0 for k in kinds for c in status.get(k) or ()
        )
        phase = "Terminating" if pod.terminating else str(status.get("phase", "-"))
        ready = "" if pod.ready or phase != "Running" else ", not ready"
        ended = pod.ended.sentence if pod.ended else ""
        trouble = f"{pod.trouble.reason}: {pod.trouble.message}" if pod.trouble else ended
        age = duration(now - unix_time(body["metadata"].get("creationTimestamp")))
        yield pod.name, phase + ready, str(restarts), age, trouble.removesuffix(": ")


def duration(seconds: float) -> str:
    """In the largest unit of which there are two."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
