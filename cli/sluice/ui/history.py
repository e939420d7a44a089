"""What was measured in the last hour, as it was seen. Pure.

An object's status holds no times that are past. So a curve begins when this program begins to look,
and has a gap where nothing was to be read.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_core.bounded import number
from sluice_core.contract import TICK_SECONDS, Tick
from sluice_core.sketch import merge, quantile_ms
from sluice_operator.times import milliseconds

HOUR_S = 3600.0
TARGETS = {
    "timeToFirstToken": "first tokens",
    "interTokenLatency": "gaps between tokens",
    "endToEnd": "whole requests",
}
"""Targets of a status, and how they are called."""
Values = Mapping[str, float | None]
"""Of one look, by name: the targets' measured times in ms, and counts."""


@dataclass(frozen=True, slots=True)
class Point:
    """One look, at Unix time `at_s`. `is_first`: nothing is known of the time before it."""

    at_s: float
    values: Values
    is_first: bool = False


class History:
    """The points of the last hour, oldest first, and the one before it."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque()
        self._is_broken = True

    def add(self, at_s: float, values: Values) -> None:
        """Keep one look. Of many that are equal, the first and the last are kept."""
        last = list(self.points)[-2:]
        is_same = len(last) == 2 and last[0].values == last[1].values == values
        if is_same and not (self._is_broken or last[1].is_first):
            self.points.pop()
        self.points.append(Point(at_s, values, self._is_broken))
        self._is_broken = False
        while len(self.points) > 1 and self.points[1].at_s < at_s - HOUR_S:
            self.points.popleft()

    def interrupt(self) -> None:
        """Nothing is known until the next look."""
        self._is_broken = True


def of_status(status: Mapping[str, Any]) -> Values:
    """What an object's status says now; a name is None where it says nothing."""
    batching, load = status.get("batching") or {}, status.get("load") or {}
    slo, scaling = status.get("slo") or {}, status.get("scaling") or {}
    times = {name: milliseconds((slo.get(name) or {}).get("measured")) for name in TARGETS}
    return times | {
        "cap": number(batching.get("cap")),
        "batch": number(batching.get("effectiveBatch")),
        "wanted": number(scaling.get("desired", status.get("replicas"))),
        "ready": number(status.get("readyReplicas")),
        "running": number(load.get("running")),
        "waiting": number(load.get("waiting")),
        "arrivals": number(load.get("arrivalsPerSecond")),
    }


def of_ticks(ticks: Sequence[Tick]) -> Values:
    """What one server measured: P99 over all `ticks`, counts of the last one. At least one."""
    last = ticks[-1]
    parts = ("ttft", "itl", "e2e")
    times = {
        name: quantile_ms(merge(getattr(tick, part).sketch for tick in ticks), 0.99)
        for name, part in zip(TARGETS, parts, strict=True)
    }
    steps = sum(tick.steps for tick in ticks)
    return times | {
        "cap": last.cap,
        "batch": sum(tick.decodes for tick in ticks) / steps if steps else None,
        "running": last.running,
        "waiting": last.waiting.total,
        "arrivals": sum(tick.arrivals for tick in ticks) / (len(ticks) * TICK_SECONDS),
    }
