"""A raise after which the gaps are over, though by too little for a breach, is taken back where the
step model sees less room as well."""

from dataclasses import replace
from typing import Any

import pytest
from sluice_core import sketch
from sluice_core.contract import StepModel, TokenGaps
from sluice_operator.tuner import Decision, Past, decide
from sluice_operator.tuner.types import BreachedCap, CapChange
from unit.operator.tuner.made import LIMITS, TARGETS, gaps, observation, pod, tick

MODEL = StepModel(5.0, 6.0, 0.0, 0.05, 1000, 1.05)
"""A full cap of n takes 5 + 6 n ms and 5 % more at P99: of 50 ms, less the margin of a late first
token, there is room for 6."""
ROOMY = StepModel(5.0, 2.0, 0.0, 0.05, 1000, 1.05)
"""The same with room for 20."""
RAISED = CapChange(0.0, 4, 8, epoch=1, reason="FirstTokenBreached")


def looked_at(
    num: int = 8, over: int = 20, past: Past | None = None, model: StepModel = MODEL, **seen: Any
) -> tuple[Past, Decision]:
    """After `num` ticks of 1,000 gaps, `over` of them over target: 20 take two minutes to be a
    breach. Half of the steps run less than the cap, so that the gaps do not correct the model."""
    ticks = [tick(seq, steps=250, itl=gaps(1000, over)) for seq in range(1, num + 1)]
    view = observation(pod("a", ticks, model=model), **seen)
    return decide(past or Past(last_change=RAISED), view)


def test_a_raise_beyond_what_model_and_gaps_allow_goes_back_and_is_remembered() -> None:
    past, decision = looked_at()
    assert decision.verdicts["interTokenLatency"].verdict == "Hold"  # no breach yet
    assert (decision.cap, decision.cap_reason) == (6, "RaisedTooFar")
    assert decision.cap_move.message == (
        "epoch 1: interTokenLatency over 50 ms in 160 of 8000 (2.00%, allowed 1.00%), "
        "verdict Hold, and the step model has room for 6; cap 8 -> 6"
    )
    assert [known.cap for known in past.breached_caps] == [8]
    assert past.last_change == CapChange(16.0, 8, 6, epoch=2, reason="RaisedTooFar")


def test_it_goes_back_no_further_than_where_it_came_from() -> None:
    raised = CapChange(0.0, 7, 8, epoch=1, reason="FirstTokenBreached")
    _, decision = looked_at(past=Past(last_change=raised))
    assert (decision.cap, decision.cap_reason) == (7, "RaisedTooFar")
    slow = StepModel(5.0, 9.0, 0.0, 0.05, 1000, 1.05)
    _, lowest = looked_at(model=slow)
    _, bounded = looked_at(model=slow, limits=replace(LIMITS, min_num_seqs=5))
    assert (lowest.cap, bounded.cap) == (4, 5)


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("gaps hold", {"over": 10}),
        ("too few ticks", {"num": 4}),
        ("the model has room", {"model": ROOMY}),
        ("no raise", {"past": Past()}),
        ("a lowering", {"past": Past(last_change=CapChange(0.0, 16, 8, 1, "RaisedTooFar"))}),
        ("another epoch's", {"past": Past(last_change=CapChange(0.0, 4, 8, 0, "Headroom"))}),
        ("no target", {"targets": replace(TARGETS, itl_ms=None)}),
    ],
)
def test_else_it_stays(why: str, changes: dict[str, Any]) -> None:
    _, decision = looked_at(**changes)
    assert (decision.cap, decision.cap_reason) == (8, ""), why


@pytest.mark.parametrize(("num_over", "cap"), [(7, 8), (8, 6)])
def test_it_goes_back_where_the_gaps_are_over_in_two_fifths_of_the_ticks(
    num_over: int, cap: int
) -> None:
    """Of 20, and more than one in a hundred of all gaps is over by a little: no interference."""
    slow = sketch.bucket_of(60.0)
    broken = TokenGaps(1000, 30, 0, 1000, 30, {150: 970, slow: 30})
    ticks = [
        tick(seq, steps=250, itl=broken if seq > 20 - num_over else gaps(1000, 0))
        for seq in range(1, 21)
    ]
    _, decision = decide(Past(last_change=RAISED), observation(pod("a", ticks, model=MODEL)))
    judged = decision.verdicts["interTokenLatency"]
    assert (judged.verdict, judged.epoch_over, judged.epoch_far) == ("Hold", 30 * num_over, 0)
    assert decision.cap == cap


@pytest.mark.parametrize(("from_cap", "cap"), [(14, 14), (15, 16)])
def test_it_stays_where_it_would_go_back_by_less_than_a_tenth(from_cap: int, cap: int) -> None:
    raised = CapChange(0.0, from_cap, 16, epoch=1, reason="FirstTokenBreached")
    full = {"cap": 16, "max_running": 16, "steps": 250, "itl": gaps(1000, 20)}
    ticks = [tick(seq, **full) for seq in range(1, 9)]
    seen = observation(pod("a", ticks, model=MODEL), cap=16)
    assert decide(Past(last_change=raised), seen)[1].cap == cap


def test_what_was_taken_back_is_not_tried_again_for_ten_minutes() -> None:
    known = BreachedCap(8, 16.0, 0, 164.0)
    lowered = CapChange(16.0, 8, 6, epoch=1, reason="RaisedTooFar")
    past = Past(last_change=lowered, breached_caps=(known,))
    for now, reason in ((600, "CapRemembered"), (618, "Headroom")):
        ticks = [tick(seq, cap=6, max_running=6) for seq in range(9, now // 2 + 1)]
        seen = observation(pod("a", ticks, model=ROOMY), cap=6)
        assert decide(past, seen)[1].cap_move.reason == reason
