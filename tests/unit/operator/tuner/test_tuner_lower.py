"""How far a broken inter-token target takes the cap down, and what stops it on the way."""

from dataclasses import replace

import pytest
from sluice_core.contract import StepModel
from sluice_operator.tuner import Past, decide
from sluice_operator.tuner.types import CapChange
from unit.operator.tuner.made import LIMITS, gaps, observation, pod, tick

BROKEN = gaps(1000, 500)
ONLY_ONE = StepModel(38.0, 2.0, 0.0, 0.02, 1000, 1.05)
"""One sequence takes 42 ms at P99: of 50 ms, less the margin, there is room for no other."""


@pytest.mark.parametrize(
    ("ran", "cap", "why"),
    [(40, 20, "half of the 40 that ran: the model sees one"), (3, 1, "the model's best")],
)
def test_where_the_model_sees_one_the_cap_goes_there_by_halves(
    ran: int, cap: int, why: str
) -> None:
    ticks = [tick(seq, cap=64, max_running=ran, itl=BROKEN) for seq in range(1, 31)]
    _, decision = decide(Past(), observation(pod("a", ticks, model=ONLY_ONE), cap=64))
    assert decision.predicted_cap == 1
    assert decision.cap == cap
    assert decision.cap_move.message.endswith(f"cap 64 -> {cap}, {why}")


@pytest.mark.parametrize(
    ("ran", "why"), [(7, "the minimum"), (8, "0.8 of the 8 that ran")], ids=["less", "as much"]
)
def test_a_breach_takes_the_cap_no_lower_than_the_minimum_which_is_named(
    ran: int, why: str
) -> None:
    ticks = [tick(seq, max_running=ran, itl=BROKEN) for seq in range(1, 31)]
    limits = replace(LIMITS, min_num_seqs=6)
    _, decision = decide(Past(), observation(pod("a", ticks), limits=limits))
    assert decision.cap == 6
    assert decision.cap_move.message.endswith(f"cap 8 -> 6, {why}")


@pytest.mark.parametrize(("raised_s", "cap"), [(401.0, 15), (400.0, 12)])
def test_headroom_that_was_shown_ten_minutes_ago_stops_no_lowering(
    raised_s: float, cap: int
) -> None:
    raised = CapChange(raised_s, 15, 16, epoch=1, reason="Headroom")
    ticks = [tick(seq, cap=16, max_running=16, itl=BROKEN) for seq in range(400, 501)]
    seen = observation(pod("a", ticks), cap=16)
    assert seen.now == 1000.0
    assert decide(Past(last_change=raised), seen)[1].cap == cap
