"""Interference: gaps that half the cap would not have held do not move it, unless they last."""

from collections import deque
from random import Random

import pytest
from sluice_core.contract import StepModel, Tick, TokenGaps, Waiting
from sluice_operator.tuner import Decision, Past, decide
from sluice_operator.tuner.types import CapChange
from unit.operator.tuner.made import gaps, late, observation, pod, tick

MODEL = StepModel(5.0, 2.0, 0.0, 0.05, 1000, 1.05)
"""A full cap of 8 takes 21 ms, of 4 takes 13: half of it holds 50 ms where 8 take up to 81."""
HOURS = 6
LOOK_TICKS = 7
"""Between two looks: no divisor of the two minutes between slow times, so all their ticks come."""
NEAR, FAR = 210, 240
"""Sketch buckets of 64 and 116 ms."""


def over(bucket: int, count: int = 1000) -> TokenGaps:
    return TokenGaps(1000, count, count, 1000, count, {150: 1000 - count, bucket: count})


def decided(
    slow: TokenGaps, places: range, num: int = 60, slow_steps: int = 0, **changes: object
) -> Decision:
    ticks = [
        tick(seq, itl=slow, slow_steps=slow_steps, **changes)
        if seq in places
        else tick(seq, itl=gaps(1000, 0), **changes)
        for seq in range(1, num + 1)
    ]
    _, decision = decide(Past(), observation(pod("a", ticks, model=MODEL)))
    return decision


def test_a_spell_breaks_the_promise_and_is_named_but_does_not_lower_the_cap() -> None:
    decision = decided(over(FAR), range(57, 61))
    assert decision.verdicts["interTokenLatency"].verdict == "Breach"
    assert (decision.cap, decision.replicas, decision.cap_move.reason) == (8, 1, "Interference")
    assert "4000 of them under interference" in decision.cap_move.message
    assert decision.slo_met.holds is False


def test_what_half_the_cap_would_have_held_lowers_it() -> None:
    decision = decided(over(NEAR), range(57, 61))
    assert decision.cap_move.reason == "InterTokenLatencyBreached"
    assert decision.cap < 8


def test_a_spell_that_the_pod_saw_itself_is_one_whatever_its_gaps() -> None:
    """Interference keeps the batch small, and a small batch's gaps are not far over the target."""
    decision = decided(over(NEAR), range(57, 61), slow_steps=100)
    assert (decision.cap, decision.replicas, decision.cap_move.reason) == (8, 1, "Interference")
    assert decided(over(NEAR), range(57, 61), slow_steps=20).cap < 8
    assert decided(over(NEAR), range(46, 61), slow_steps=100).cap < 8, "it lasts"


@pytest.mark.parametrize("share", [1000, 300])
def test_slowness_that_lasts_is_a_regime_and_lowers_the_cap(share: int) -> None:
    decision = decided(over(FAR, share), range(46, 61))
    assert decision.cap_move.reason == "InterTokenLatencyBreached"
    assert decision.cap < 8


def test_a_cap_that_breaks_the_target_itself_is_lowered_in_the_midst_of_spells() -> None:
    ticks = [tick(seq, itl=over(NEAR, 60)) for seq in range(1, 57)]
    ticks += [tick(seq, itl=over(FAR)) for seq in range(57, 61)]
    _, decision = decide(Past(), observation(pod("a", ticks, model=MODEL)))
    assert decision.verdicts["interTokenLatency"].cap_breached
    assert decision.cap < 8


def test_spells_do_not_keep_a_cap_down_that_requests_wait_for() -> None:
    decision = decided(over(FAR), range(86, 91), 90, ttft=late(10, 10), waiting=Waiting(cap=9))
    assert decision.verdicts["interTokenLatency"].verdict == "Breach"
    assert decision.cap > 8


def after_a_spell(reason: str, model: StepModel, slow_steps: int = 0) -> int:
    """The cap, lowered from 40 to 8 at second 2, while requests wait for it; gaps of 45 ms."""
    waits = {"ttft": late(10, 10), "waiting": Waiting(cap=9), "slow_steps": slow_steps}
    itl = TokenGaps(1000, 0, 0, 1000, 0, {192: 1000})
    ticks = [tick(seq, itl=itl, **waits) for seq in range(2, 20)]
    past = Past(last_change=CapChange(2.0, 40, 8, 1, reason))
    _, decision = decide(past, observation(pod("a", ticks, model=model)))
    return decision.cap


def test_a_cap_that_was_lowered_in_a_spell_goes_back_at_once_when_it_is_over() -> None:
    slow = StepModel(15.0, 6.0, 0.0, 0.15, 1000, 1.05)
    assert after_a_spell("InterferenceLasts", MODEL) == 40
    assert after_a_spell("InterTokenLatencyBreached", MODEL) <= 16
    assert after_a_spell("InterferenceLasts", slow) < 12, "it is not over: the model is of it"
    assert after_a_spell("InterferenceLasts", MODEL, slow_steps=125) <= 16


@pytest.mark.parametrize(
    ("slow_steps", "cap", "reason"), [(125, 8, "FirstTokenBreached"), (0, 2, "LoadNeedsCap")]
)
def test_a_spell_at_the_smallest_cap_keeps_it_from_being_raised_only_if_it_is_none(
    slow_steps: int, cap: int, reason: str
) -> None:
    """Below one there is no cap that would have held them; for the load alone it is raised."""
    ticks = [
        tick(
            seq,
            itl=over(FAR) if seq in range(86, 91) else gaps(1000, 0),
            slow_steps=slow_steps if seq in range(86, 91) else 0,
            ttft=late(10, 10),
            waiting=Waiting(cap=9),
            cap=1,
            max_running=1,
            decodes=990,
        )
        for seq in range(1, 92)
    ]
    _, decision = decide(Past(), observation(pod("a", ticks, model=MODEL), cap=1))
    assert (decision.cap, decision.cap_reason) == (cap, reason)


def in_interference(random: Random, seq: int, cap: int, epoch: int) -> Tick:
    """Every two minutes about five seconds of slow steps; the cap in use, first tokens in time."""
    slow = seq % 60 in range(int(random.expovariate(1 / 2.5)) + 1)
    shape = {"epoch": epoch, "cap": cap, "max_running": cap}
    return tick(seq, itl=over(FAR) if slow else gaps(1000, 0), waiting=Waiting(cap=1), **shape)


def test_hours_of_slow_spells_change_the_cap_less_than_once_an_hour() -> None:
    random, ring, past = Random(1), deque[Tick](maxlen=300), Past()
    cap, epoch, changes = 8, 1, 0
    for seq in range(1, HOURS * 1800):
        ring.append(in_interference(random, seq, cap, epoch))
        if seq % LOOK_TICKS:
            continue
        view = pod("a", ring, epoch=epoch, model=MODEL)
        past, decision = decide(past, observation(view, cap=cap, epoch=epoch))
        if decision.cap != cap:
            cap, epoch, changes = decision.cap, epoch + 1, changes + 1
    assert changes <= HOURS


def test_a_spell_while_the_cap_was_not_used_excuses_nothing_at_the_cap() -> None:
    """2 % over at the cap: no headroom, whatever came under interference with half as many."""
    used = gaps(100, 2)
    unused = TokenGaps(100, 100, 100, 0, 0, {FAR: 100})
    ticks = [tick(seq, itl=used) for seq in range(1, 57)]
    ticks += [tick(seq, itl=unused, max_running=4) for seq in range(57, 61)]
    _, decision = decide(Past(), observation(pod("a", ticks, model=MODEL)))
    assert decision.verdicts["interTokenLatency"].verdict != "Headroom"
    assert decision.cap <= 8
