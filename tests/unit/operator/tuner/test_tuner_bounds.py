"""How far a raise goes: the prediction, a standing queue, measured gaps, observed lengths."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sluice_core.contract import Lengths, StepModel, TokenGaps, Waiting
from sluice_operator.tuner import Decision, Past, decide
from unit.operator.tuner.made import LIMITS, TARGETS, late, observation, pod, tick

MODEL = StepModel(5.0, 2.0, 0.0, 0.05, 1000, 1.05)
"""A full cap of n takes 5 + 2 n ms; without the P99 of its noise 5 %."""
SNUG = 30.0
"""MODEL sees 9 for this target, and 11 where first tokens will be late: no clear room above 8."""
QUEUED = Waiting(cap=9)
ONE = Waiting(cap=1)


def decided(num: int, itl_ms: float, ttft_ms: float = 300.0, **changes: Any) -> Decision:
    """Half of the steps run less than the cap, so that the measured gaps do not correct MODEL."""
    ticks = [tick(seq, steps=250, **changes) for seq in range(1, num + 1)]
    limits = replace(LIMITS, max_replicas=1)
    targets = replace(TARGETS, itl_ms=itl_ms, ttft_ms=ttft_ms)
    seen = observation(pod("a", ticks, model=MODEL), limits=limits, targets=targets)
    return decide(Past(), seen)[1]


def gaps_in(bucket: int) -> TokenGaps:
    return TokenGaps(1000, 0, 0, 1000, 0, {bucket: 1000})


def test_a_queue_that_stands_is_acted_on_before_first_tokens_are_late() -> None:
    assert decided(20, SNUG, waiting=ONE).cap_reason == "QueueStands"
    assert decided(20, SNUG, waiting=ONE).cap == 11  # as far as MODEL sees
    assert decided(20, 33).cap_move.reason == "CollectingEvidence"
    assert decided(4, 33, waiting=ONE).cap_move.reason == "CollectingEvidence"


@pytest.mark.parametrize(("itl_ms", "cap"), [(33.0, 8), (36.0, 12), (50.0, 16)])
def test_one_that_waits_is_enough_where_the_model_sees_half_as_much_again(
    itl_ms: float, cap: int
) -> None:
    decision = decided(1, itl_ms, waiting=ONE)
    assert decision.cap == cap
    assert (decision.cap_reason == "QueueStands") == (cap > 8)
    assert decided(1, itl_ms).cap == 8  # nobody waits


@pytest.mark.parametrize(("ttft_ms", "ticks"), [(500, 5), (10_000, 5), (12_000, 6), (60_000, 15)])
def test_a_queue_stands_once_it_is_as_long_as_first_tokens_may_take(
    ttft_ms: float, ticks: int
) -> None:
    assert decided(ticks, SNUG, ttft_ms, waiting=ONE).cap_reason == "QueueStands"
    assert decided(ticks - 1, SNUG, ttft_ms, waiting=ONE).cap == 8


@pytest.mark.parametrize(("queued", "ttft_ms"), [(9, 2000), (90, 20_000)])
def test_a_queue_whose_last_will_be_late_is_acted_on_at_once(queued: int, ttft_ms: float) -> None:
    """Eight requests of 100 steps of 21 ms and more leave each 0.3 s, so that nine take 2.4 s."""
    long, shorter = Waiting(cap=queued), Waiting(cap=queued // 2)
    assert decided(1, SNUG, ttft_ms, waiting=long).cap_reason == "QueueStands"
    assert decided(1, SNUG, ttft_ms, waiting=shorter).cap == 8
    assert decided(1, SNUG, ttft_ms, waiting=long, finished=0).cap == 8  # lengths are not known


def test_without_a_first_token_target_the_whole_answer_is_due() -> None:
    ticks = [tick(1, waiting=QUEUED)]
    for e2e_ms, cap in ((2000, 13), (20_000, 8)):
        targets = replace(TARGETS, itl_ms=SNUG, ttft_ms=None, e2e_ms=e2e_ms)
        seen = observation(pod("a", ticks, model=MODEL), targets=targets)
        assert decide(Past(), seen)[1].cap == cap


def test_a_long_queue_is_acted_on_though_the_cap_was_not_used_before() -> None:
    ticks = [tick(seq, max_running=3) for seq in range(1, 20)]
    rose = [*ticks, tick(20, waiting=QUEUED)]
    few, many = (observation(pod("a", seen, model=MODEL)) for seen in (ticks, rose))
    assert decide(Past(), few)[1].cap_move.reason == "CapUnused"
    assert decide(Past(), many)[1].cap_reason == "QueueStands"


def test_where_the_model_sees_no_room_a_queue_that_stands_raises_nothing() -> None:
    assert decided(20, 22, waiting=QUEUED).cap == 8


@pytest.mark.parametrize(("itl_ms", "cap"), [(27.0, 8), (28.0, 10)])
def test_a_raise_by_less_than_a_quarter_is_not_worth_it(itl_ms: float, cap: int) -> None:
    """With the margin of a late first token MODEL sees 9 and 10."""
    decision = decided(20, itl_ms, waiting=QUEUED)
    assert decision.cap == cap
    assert (decision.cap_move.reason == "AtPredictedCap") == (cap == 8)


@pytest.mark.parametrize(("bucket", "cap"), [(140, 14), (150, 11), (156, 8)])
def test_measured_gaps_bound_a_raise_beyond_the_prediction(bucket: int, cap: int) -> None:
    """Of 16, 19.5 and 22 ms at a cap of 8, where 25 are the target and 7 are predicted. The last
    have room for 9, which is not worth it."""
    decision = decided(60, 25, ttft=late(10, 10), waiting=QUEUED, itl=gaps_in(bucket))
    assert decision.predicted_cap == 7
    assert (decision.cap, decision.cap_reason) == (cap, "Headroom" if cap > 8 else "")


def test_a_raise_beyond_the_prediction_may_not_stall_more_than_it_saves() -> None:
    """At 10, 0.2 % of the gaps would be over: within P99, and two for each late first token."""
    itl = TokenGaps(1000, 0, 0, 1000, 0, {145: 998, 153: 2})
    few = decided(60, 23.5, ttft=late(10, 1), waiting=QUEUED, itl=itl)
    many = decided(60, 23.5, ttft=late(10, 10), waiting=QUEUED, itl=itl)
    assert few.cap <= 8 < many.cap


def test_observed_lengths_bound_a_raise_by_the_memory() -> None:
    def cap(mean: float, computed: int) -> int:
        """Where requests of `mean` tokens compute so many of their prompts."""
        ticks = [tick(s, waiting=QUEUED, prefill_tokens=10 * computed) for s in range(1, 61)]
        view = pod("a", ticks, model=MODEL)
        assert view.evidence is not None
        evidence = msgspec.structs.replace(view.evidence, lengths=Lengths(mean, 3000.0, 100))
        return decide(Past(), observation(replace(view, evidence=evidence)))[1].cap

    assert cap(164, 64) == 16
    assert cap(7000, 6900) == 10
    assert cap(7000, 1000) == 16, "what the prefix cache gave is held once"


@pytest.mark.parametrize(
    ("why", "cap", "changes"),
    [
        ("the model is of steps under traffic", 11, {}),
        ("there is no model", 4, {"model": None}),
        ("a gate sees no steps", 4, {"chunk_is": "fixed"}),
        ("the start-up profile is all there is", 4, {"steps": 1}),
        ("gaps have no target to point to", 4, {"itl_ms": None}),
    ],
)
def test_a_raise_goes_at_once_half_as_far_as_a_sure_model_points_and_else_doubles(
    why: str, cap: int, changes: dict[str, Any]
) -> None:
    """22 are predicted at 55 ms a token. The ceiling is 64."""
    usual: dict[str, Any] = {"model": MODEL, "chunk_is": "live", "steps": 125, "itl_ms": 55.0}
    asked = usual | changes
    full = {"cap": 2, "max_running": 2, "waiting": QUEUED, "ttft": late(10, 10)}
    queued = full | {"steps": asked.pop("steps")}
    targets = replace(TARGETS, itl_ms=asked.pop("itl_ms"))
    ticks = [tick(seq, **queued) for seq in range(1, 31)]
    _, decision = decide(Past(), observation(pod("a", ticks, **asked), cap=2, targets=targets))
    assert decision.cap == cap, why
