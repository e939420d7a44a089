"""When a status is written: at once if people act on the change, in its turn if it is measured.

Counters and percentiles differ in every pass over a pod with traffic. Nothing reads them back after
a restart, so the newest unwritten ones are not missed: the next operator measures. Pure: the clock
is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from sluice_core.contract import TARGETS

from ..cluster.observed import Object

Clock = Callable[[], float]

PERIOD_S = 10.0
"""Seconds between two writes of an object for measurements alone: `kubectl get` shows none much
older. For values of every second, Prometheus scrapes the pods."""
WRITES_PER_S = 5.0
"""Writes of all objects together, for measurements alone: client-go's default for a controller.
Over fifty objects with traffic take turns, and a hundred are 20 s apart."""

_JUDGED = ("measured", "bound", "over", "samples", "usedPercent", "samplesNeeded", "verifiable")
MEASURED: Mapping[str, Any] = {
    "memory": dict.fromkeys(("sequences", "expectedPreemptions")),
    "batching": dict.fromkeys(("message", "predicted", "effectiveBatch", "step")),
    "slo": {
        **dict.fromkeys(TARGETS, dict.fromkeys(_JUDGED)),
        **dict.fromkeys(("goodPercent", "smoothPercent")),
    },
    "scaling": dict.fromkeys(("message", "desired")),
    "load": None,
}
"""Fields of `status` that move with traffic alone; None: all of it. All others are acted on."""
MEASURED_OF_BATCH: Mapping[str, Any] = {
    **dict.fromkeys(("counts", "rate", "timeLeft")),
    "shards": {"results": None},
}
_MEASURED_MESSAGES = frozenset({"SLOMet", "SLOFeasible", "MetricsAvailable", "RequestsSucceed"})
"""Conditions whose words hold measured numbers; their status and reason are acted on."""


def acted_on(status: Object) -> dict[str, Any]:
    """The part of `status` that people and machines act on: all but the measurements."""
    kept = _without(status, {**MEASURED, **MEASURED_OF_BATCH})
    kept["conditions"] = [
        {k: v for k, v in c.items() if k != "message" or c["type"] not in _MEASURED_MESSAGES}
        for c in status.get("conditions") or ()
    ]
    return kept


def _without(part: Object, measured: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for key, value in part.items():
        below = measured.get(key)
        if below is not None and isinstance(value, Mapping):
            kept[key] = _without(value, below)
        elif key not in measured:
            kept[key] = value
    return {key: value for key, value in kept.items() if value != {}}


@dataclass(slots=True)
class WriteTurns:
    """Turns shared by the objects of one operator; the first to ask is the first to write."""

    clock: Clock
    free_s: float = 0.0

    def take(self) -> float:
        """The time of the next turn, which is then taken."""
        turn_s = max(self.clock(), self.free_s)
        self.free_s = turn_s + 1 / WRITES_PER_S
        return turn_s


@dataclass(slots=True)
class WritePace:
    """The pace of one object's status."""

    turns: WriteTurns
    written_s: float = -inf
    turn_s: float | None = None

    def wait_s(self, wanted: Object, live: Object) -> float:
        """Seconds until `wanted` may be written over `live`; 0: now."""
        if acted_on(wanted) != acted_on(live):
            return 0.0
        now = self.turns.clock()
        if now < self.written_s + PERIOD_S:
            return self.written_s + PERIOD_S - now
        if self.turn_s is None or now > self.turn_s + PERIOD_S:  # not used: it is another's
            self.turn_s = self.turns.take()
        return max(self.turn_s - now, 0.0)

    def wrote(self) -> None:
        """Note that the status was written just now, with all that it holds."""
        self.written_s, self.turn_s = self.turns.clock(), None
