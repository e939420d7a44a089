"""Where answers end too late because so many run at once, fewer are let run."""

from dataclasses import replace
from typing import Any

import pytest
from sluice_core.contract import Requests, StepModel, Waiting
from sluice_operator.tuner import Decision, Past, decide
from unit.operator.tuner.made import TARGETS, gaps, observation, pod, tick

MODEL = StepModel(40.0, 2.0, 0.0, 0.05, 1000, 1.05)
"""A request of 100 tokens beside n - 1 others takes 4 + 0.203 n s: 22 at once take 8.5."""
ENDS = replace(TARGETS, ttft_ms=None, itl_ms=None, e2e_ms=10_000)
FULL: dict[str, Any] = {
    "arrivals": 2, "steps": 15, "decodes": 990, "cap": 64, "max_running": 64,
    "running": 64, "e2e": Requests(10, 10),
}  # fmt: skip
"""64 run at once and end after 17 s; one a second comes, for which six would do."""


def decided(present: int = 64, past: Past | None = None, **changes: Any) -> tuple[Past, Decision]:
    targets = changes.pop("targets", ENDS)
    ticks = [tick(seq, **(FULL | changes)) for seq in range(1, 31)]
    seen = observation(pod("a", ticks, model=MODEL), cap=present, targets=targets)
    return decide(past or Past(), seen)


def test_the_cap_goes_to_as_many_as_end_in_time_together() -> None:
    past, decision = decided()
    assert (decision.cap, decision.cap_reason) == (22, "TooManyToEnd")
    assert decision.cap_move.message.endswith("of 22 at once each ends in time; cap 64 -> 22")
    assert [known.cap for known in past.breached_caps] == [64]


@pytest.mark.parametrize(
    "changes",
    [
        {"e2e": Requests(10)},
        {"max_running": 20},
        {"targets": replace(ENDS, e2e_ms=4_100)},
        {"arrivals": 6},
    ],
    ids=["in time", "few ran", "not even one would end", "more come than 22 do"],
)
def test_it_stays_where_fewer_at_once_would_not_help(changes: dict[str, Any]) -> None:
    _, decision = decided(**changes)
    assert decision.cap == 64


def test_whoever_waits_then_raises_it_no_further() -> None:
    waits: dict[str, Any] = {"cap": 22, "max_running": 22, "waiting": Waiting(cap=40)}
    _, decision = decided(22, **waits)
    assert (decision.cap, decision.cap_move.reason) == (22, "EndsAtTarget")
    assert decision.limited_by == "EndToEnd"
    _, decision = decided(22, **(waits | {"arrivals": 6}))
    assert decision.cap == 44


def test_broken_gaps_are_lowered_for_first() -> None:
    both = replace(ENDS, itl_ms=50)
    _, decision = decided(targets=both, itl=gaps(1000, 300))
    assert decision.cap_reason == "InterTokenLatencyBreached"
