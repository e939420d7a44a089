"""The evidence: each arrival and each gap once, in the tick where its fate was decided."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.contract import (
    TICK_RING,
    TICK_SECONDS,
    Causes,
    Evidence,
    Slo,
    StepModel,
    Tick,
    decode,
    encode,
)
from sluice_core.errors import DeadlineUnreachable
from sluice_core.port import EngineLoad, EngineStep, FirstParts
from sluice_core.sketch import quantile_ms
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.metrics import Statistics
from sluice_frontend.evidence.open_tick import Tally
from sluice_frontend.evidence.recorder import Recorder, largest_part
from sluice_frontend.evidence.requests import RequestTimer

SLO = Slo(ttft_ms=500, itl_ms=50, e2e_ms=1000)
NO_WAIT = FirstParts(0.0, 0.0, 0.0, 0)


def create_recorder(cap: int = 4, slo: Slo = SLO) -> Recorder:
    """A started recorder whose clock begins at 0."""
    recorder = Recorder("boot", 0.0, 1000.0)
    recorder.ticks.start(1, cap, slo)
    return recorder


class Report(NamedTuple):
    """A step, and the engine's state after it."""

    step: EngineStep
    load: EngineLoad


def create_report(
    *,
    running: int = 1,
    waiting_cap: int = 0,
    waiting_kv: int = 0,
    epoch: int = 1,
    started_s: float = 0.0,
    step_s: float = 0.01,
    num_tokens: int = 0,
    is_slow: bool = False,
    admitted: Sequence[str] = (),
) -> Report:
    """A step with the numbers that the evidence reads."""
    step = EngineStep(
        epoch=epoch,
        started_s=started_s,
        step_s=step_s,
        num_decodes=running,
        num_prefill_tokens=3,
        num_running=running,
        num_tokens=num_tokens,
        is_slow=is_slow,
        admitted=[*admitted],
    )
    return Report(step, EngineLoad(running, waiting_cap, waiting_kv, num_blocks=8))


def step(recorder: Recorder, report: Report) -> None:
    """Book a step on both sides."""
    recorder.engine.see(report.load)
    recorder.engine.step(report.step)
    recorder.admit(report.step.admitted, report.step.started_s)


def close(recorder: Recorder, now_s: float) -> list[Tick]:
    """All ticks that ended by `now_s`."""
    recorder.advance(now_s, 1000.0 + now_s, 0.0)
    return recorder.evidence(0).ticks


def total(ticks: list[Tick], path: str) -> float:
    """The sum of one field, such as `ttft.over`, over `ticks`."""
    values: list[float] = []
    for tick in ticks:
        value: object = tick
        for name in path.split("."):
            value = getattr(value, name)
        assert isinstance(value, int | float)
        values.append(value)
    return sum(values)


@given(
    st.lists(st.floats(min_value=0.02, max_value=1e7), min_size=1, max_size=50),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_a_quantile_read_back_from_a_sketch_is_within_one_percent(
    values_ms: list[float], quantile: float
) -> None:
    share = Tally()
    for value_ms in values_ms:
        share.note(value_ms)
    expected = sorted(values_ms)[math.floor(quantile * (len(values_ms) - 1))]
    assert quantile_ms(share.sketch, quantile) == pytest.approx(expected, rel=0.0101)


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ((0.3, 0.1, 0.2), "cap"),
        ((0.1, 0.3, 0.2), "kv"),
        ((0.1, 0.2, 0.3), "prefill"),
        ((0.1, 0.1, 0.1), "outside"),
    ],
)
def test_a_miss_is_booked_to_its_largest_part(
    parts: tuple[float, float, float], cause: str
) -> None:
    assert largest_part(FirstParts(*parts, 0), 0.7) == cause


def test_a_request_that_still_waits_is_over_when_it_passes_the_target_and_never_again() -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    step(recorder, create_report(running=4, waiting_cap=1, started_s=0.49))
    first = close(recorder, 2.0)
    assert (first[0].ttft.n, first[0].ttft.over, first[0].ttft.by) == (1, 1, Causes(cap=1))
    recorder.first_token(timer, 3.0, FirstParts(2.9, 0.0, 0.1, 0))
    recorder.finish(timer, 3.0)
    second = close(recorder, 4.0)[1]
    assert (second.ttft.n, second.ttft.over) == (0, 0)
    assert sum(second.ttft.sketch.values()) == 1
    assert second.good == 0


def test_who_waits_on_and_on_is_over_only_in_the_tick_in_which_the_targets_passed() -> None:
    """Also where several ticks are closed at once."""
    recorder = create_recorder()
    recorder.arrive("a", 2.9, 2.9, 10)
    ticks = close(recorder, 8.0)
    assert [(tick.ttft.n, tick.ttft.over) for tick in ticks] == [(0, 0), (1, 1), (0, 0), (0, 0)]
    assert [(tick.e2e.n, tick.e2e.over) for tick in ticks] == [(0, 0), (1, 1), (0, 0), (0, 0)]


def test_only_prompts_without_a_first_token_are_counted_as_pending() -> None:
    recorder = create_recorder()
    first, second = recorder.arrive("a", 0.0, 0.0, 10), recorder.arrive("b", 0.0, 0.0, 5)
    assert recorder.requests.num_pending_tokens == 15
    recorder.first_token(first, 0.1, NO_WAIT)
    assert recorder.requests.num_pending_tokens == 5
    recorder.finish(first, 0.2)
    recorder.drop(second, 0.2, by_server=False)
    assert recorder.requests.num_pending_tokens == 0


def test_a_request_within_the_target_at_the_end_of_a_tick_is_not_counted_yet() -> None:
    recorder = create_recorder()
    recorder.arrive("a", 1.8, 1.8, 10)
    (tick,) = close(recorder, 2.0)
    assert (tick.arrivals, tick.ttft.n) == (1, 0)


@pytest.mark.parametrize(
    ("left_s", "by_server", "over"),
    [(0.4, False, 0), (0.6, False, 1), (0.1, True, 1)],
)
def test_a_client_that_leaves_is_over_only_after_the_target(
    left_s: float, by_server: bool, over: int
) -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    recorder.drop(timer, left_s, by_server=by_server)
    (tick,) = close(recorder, 2.0)
    assert (tick.ttft.n, tick.ttft.over) == (1, over)


def test_a_refusal_is_an_arrival_that_is_over() -> None:
    recorder = create_recorder()
    recorder.refuse()
    recorder.refuse("outside")
    (tick,) = close(recorder, 2.0)
    assert (tick.arrivals, tick.refused, tick.ttft.n, tick.ttft.over) == (2, 2, 2, 2)
    assert tick.ttft.by == Causes(cap=1, outside=1)


@pytest.mark.parametrize(
    ("wait_ms", "rest_ms", "by", "e2e"),
    [
        (10.0, 20.0, Causes(), 0),  # a client that asks for more than the targets promise
        (400.0, 200.0, Causes(cap=1), 0),
        (200.0, 400.0, Causes(prefill=1), 0),
        (900.0, 200.0, Causes(cap=1), 1),
    ],
)
def test_a_refused_deadline_is_over_only_where_a_target_would_be(
    wait_ms: float, rest_ms: float, by: Causes, e2e: int
) -> None:
    recorder = create_recorder()
    recorder.refuse_for_deadline(wait_ms, rest_ms)
    (tick,) = close(recorder, 2.0)
    over = by.cap + by.prefill
    assert (tick.arrivals, tick.refused, tick.ttft.n, tick.ttft.over) == (1, 1, over, over)
    assert tick.ttft.by == by
    assert (tick.e2e.n, tick.e2e.over) == (e2e, e2e)


def test_where_there_is_no_target_of_the_first_token_no_dropped_deadline_is_over() -> None:
    slo = Slo(itl_ms=50, e2e_ms=1000)
    recorder = create_recorder(slo=slo)
    timer = recorder.arrive("hasty", 0.0, 0.0, 90, ttft_ms=100.0)
    Ledger(recorder, Statistics(slo, 0.0)).fail(timer, DeadlineUnreachable("too late"), 0.2)
    (tick,) = close(recorder, 2.0)
    assert (tick.refused, tick.ttft.over, tick.e2e.over) == (1, 0, 0)


def test_a_client_that_leaves_after_the_end_to_end_target_has_missed_that() -> None:
    recorder = create_recorder()
    for name, left_s in (("in time", 0.9), ("late", 1.1)):
        timer = recorder.arrive(name, 0.0, 0.0, 10)
        recorder.first_token(timer, 0.1, NO_WAIT)
        recorder.drop(timer, left_s, by_server=False)
    (tick,) = close(recorder, 2.0)
    assert (tick.ttft.over, tick.e2e.n, tick.e2e.over) == (0, 2, 1)


@pytest.mark.parametrize(("dropped_s", "over"), [(0.1, 0), (0.45, 1), (0.6, 1)])
def test_a_dropped_deadline_is_over_only_where_the_target_is_out_of_reach(
    dropped_s: float, over: int
) -> None:
    recorder = create_recorder()
    recorder.engine.step_model = StepModel(a=10.0, b=0.0, c=0.0, d=1.0, n=9, resid_q=1.0)
    ledger = Ledger(recorder, Statistics(SLO, 0.0))
    timer = recorder.arrive("hasty", 0.0, 0.0, 90, ttft_ms=100.0)  # the target is 500 ms
    ledger.fail(timer, DeadlineUnreachable("too late"), dropped_s)
    (tick,) = close(recorder, 2.0)
    assert (tick.arrivals, tick.refused, tick.ttft.n, tick.ttft.over) == (1, 1, over, over)
    assert (tick.e2e.n, tick.e2e.over) == (over, over)


def test_a_wait_for_memory_is_not_booked_to_the_cap() -> None:
    recorder = create_recorder()
    recorder.arrive("a", 0.0, 0.0, 10)
    step(recorder, create_report(running=2, waiting_kv=1, started_s=0.09))
    assert close(recorder, 2.0)[0].ttft.by == Causes(kv=1)


def test_the_last_of_a_queue_for_memory_waited_for_memory() -> None:
    recorder = create_recorder()
    recorder.arrive("last", 0.0, 0.0, 10)
    step(recorder, create_report(running=2, waiting_kv=1))
    step(recorder, create_report(running=3, started_s=1.4, admitted=["last"]))
    assert close(recorder, 2.0)[0].ttft.by == Causes(kv=1)


def test_a_long_prefill_is_not_booked_to_the_cap_that_others_wait_for() -> None:
    recorder = create_recorder()
    recorder.arrive("long prompt", 0.0, 0.0, 3000)
    step(recorder, create_report(running=1, started_s=0.04, admitted=["long prompt"]))
    recorder.arrive("behind it", 0.1, 0.1, 10)
    step(recorder, create_report(running=1, waiting_cap=1, started_s=0.99))
    assert close(recorder, 2.0)[0].ttft.by == Causes(cap=1, prefill=1)


def test_what_still_runs_its_first_step_when_a_tick_closes_is_not_booked_to_the_cap() -> None:
    recorder = create_recorder()
    for name in "abcdef":
        recorder.arrive(name, 0.0, 0.0, 10)
    (tick,) = close(recorder, 2.0)
    assert tick.ttft.by == Causes(cap=2, prefill=4)  # a cap of four


def test_the_first_step_is_prefill_and_no_wait() -> None:
    recorder = create_recorder()
    recorder.arrive("a", 0.0, 0.0, 10)
    step(recorder, create_report(running=1, step_s=1.8, started_s=0.1))
    (tick,) = close(recorder, 2.0)
    assert tick.ttft.by == Causes(prefill=1)


def test_of_answers_of_one_token_it_is_known_how_long_they_take() -> None:
    """Whoever ends with its first step runs no more when that is told."""
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    step(recorder, create_report(started_s=0.5, admitted=["a"])._replace(load=EngineLoad()))
    recorder.first_token(timer, 1.0, NO_WAIT)
    recorder.finish(timer, 1.0)
    assert recorder.recent.service_s() == pytest.approx(0.5)


def test_a_burst_that_came_as_a_step_began_waited_for_the_cap_and_was_not_prefilled() -> None:
    recorder = create_recorder(cap=1)
    for number in range(17):
        recorder.arrive(str(number), 0.0, 0.0, 100)
    # The engine had read one of them when its step began, at the same moment.
    step(recorder, create_report(running=1, step_s=0.1, admitted=["0"]))
    step(recorder, create_report(running=1, waiting_cap=16, step_s=0.1, started_s=0.1))
    assert close(recorder, 2.0)[0].ttft.by == Causes(cap=16, prefill=1)


def test_gaps_over_are_counted_apart_at_the_cap_and_after_another() -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    recorder.first_token(timer, 0.1, NO_WAIT)
    for now_s, at_cap in ((0.11, False), (0.21, True), (0.31, True), (0.32, True)):
        recorder.next_token(timer, now_s, at_cap=at_cap)
    (tick,) = close(recorder, 2.0)
    itl = tick.itl
    assert (itl.n, itl.over, itl.over_after_over) == (4, 2, 1)
    assert (itl.n_at_cap, itl.over_at_cap) == (3, 2)


def test_gaps_in_which_another_prompt_was_computed_are_counted_apart() -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    recorder.first_token(timer, 0.1, NO_WAIT)
    for now_s, in_prefill in ((0.11, True), (0.21, True), (0.31, False)):
        recorder.next_token(timer, now_s, at_cap=True, in_prefill=in_prefill)
    (tick,) = close(recorder, 2.0)
    assert (tick.itl.n_in_prefill, tick.itl.over_in_prefill) == (2, 1)


@pytest.mark.parametrize(("seen_s", "counted"), [(0.1, (0, 0)), (2.0, (1, 1))])
def test_a_first_token_that_nobody_sees_is_counted_only_if_it_is_late_before(
    seen_s: float, counted: tuple[int, int]
) -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    recorder.admit(["a"], 0.1)
    if seen_s >= TICK_SECONDS:
        close(recorder, TICK_SECONDS)
    recorder.unseen(timer)
    assert (list(recorder.requests.pending.values()), recorder.requests.num_pending_tokens) == (
        [],
        0,
    )
    recorder.finish(timer, 2.5)
    ticks = close(recorder, 4.0)
    assert (sum(tick.ttft.n for tick in ticks), sum(tick.ttft.over for tick in ticks)) == counted
    assert sum(tick.finished for tick in ticks) == 1


def test_tokens_of_one_step_make_one_gap() -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    recorder.first_token(timer, 0.1, NO_WAIT)
    recorder.drafted_token(timer, 0.1)
    recorder.next_token(timer, 0.4, at_cap=True)
    recorder.drafted_token(timer, 0.4)
    assert timer.mean_gap_ms == pytest.approx(100)
    recorder.finish(timer, 0.4)
    (tick,) = close(recorder, 2.0)
    assert (tick.itl.n, tick.itl.over, tick.itl.n_at_cap) == (1, 1, 1)
    assert recorder.recent.lengths().mean == 14


def test_a_tick_keeps_the_most_that_ran_and_the_last_model_that_was_told() -> None:
    recorder = create_recorder()
    with_model = create_report(running=3)
    with_model = with_model._replace(
        step=msgspec.structs.replace(with_model.step, step_model=MODEL)
    )
    for report in (
        with_model,
        create_report(running=4),
        create_report(running=1),
    ):
        step(recorder, report)
    assert close(recorder, 2.0)[0].max_running == 4
    assert recorder.engine.step_model == MODEL


def test_whoever_a_step_names_began_with_it_and_nobody_else() -> None:
    recorder = create_recorder()
    timers = [recorder.arrive(name, 0.0, 0.0, 10) for name in ("waits", "begins")]
    step(recorder, create_report(running=2, started_s=0.9, admitted=["begins", "left long ago"]))
    assert [timer.admitted_s for timer in timers] == [None, 0.9]


def test_steps_of_a_slow_spell_are_counted_apart() -> None:
    recorder = create_recorder()
    for is_slow in (False, True, True):
        step(recorder, create_report(is_slow=is_slow, started_s=0.09))
    (tick,) = close(recorder, 2.0)
    assert (tick.steps, tick.slow_steps) == (3, 2)


def test_good_and_smooth_judge_a_request_by_its_own_gaps() -> None:
    recorder = create_recorder(slo=Slo(ttft_ms=500, itl_ms=50))
    smooth = recorder.arrive("smooth", 0.0, 0.0, 10)
    recorder.first_token(smooth, 0.0, NO_WAIT)
    for i in range(100):
        recorder.next_token(smooth, 0.01 * (i + 1), at_cap=False)
    recorder.next_token(smooth, 1.1, at_cap=False)  # one gap of 101 is over: still smooth
    recorder.finish(smooth, 1.1)
    stalled = recorder.arrive("stalled", 1.1, 1.1, 10)
    recorder.first_token(stalled, 1.2, NO_WAIT)
    recorder.next_token(stalled, 1.3, at_cap=False)
    recorder.finish(stalled, 1.3)
    (tick,) = close(recorder, 2.0)
    assert (tick.finished, tick.good, tick.smooth) == (2, 1, 1)
    assert (tick.e2e.n, tick.e2e.over) == (2, 0)


def test_a_request_that_began_too_late_is_neither_good_nor_smooth() -> None:
    recorder = create_recorder()
    for name, first_s in (("in time", 0.4), ("late", 0.6)):
        timer = recorder.arrive(name, 0.0, 0.0, 10)
        recorder.first_token(timer, first_s, NO_WAIT)
        recorder.next_token(timer, first_s + 0.01, at_cap=False)
        recorder.finish(timer, first_s + 0.01)
    (tick,) = close(recorder, 2.0)
    assert (tick.finished, tick.good, tick.smooth) == (2, 1, 1)


def test_without_a_target_between_tokens_every_gap_is_good() -> None:
    recorder = create_recorder(slo=Slo(ttft_ms=500))
    timer = recorder.arrive("a", 0.0, 0.0, 10)
    recorder.first_token(timer, 0.1, NO_WAIT)
    recorder.next_token(timer, 1.9, at_cap=False)
    recorder.finish(timer, 1.9)
    assert close(recorder, 2.0)[0].good == 1


def test_a_request_that_ended_too_late_is_neither_good_nor_smooth() -> None:
    recorder = create_recorder()
    timers = [recorder.arrive(name, 0.0, 0.0, 10) for name in ("held", "late", "seen late")]
    for timer, seconds in zip(timers, (0.9, 1.9, 2.5), strict=True):
        recorder.first_token(timer, 0.1, NO_WAIT)
        if seconds > TICK_SECONDS:
            close(recorder, TICK_SECONDS)
        recorder.finish(timer, seconds)
    first, second = close(recorder, 2 * TICK_SECONDS)
    assert (first.finished, first.good, first.smooth, first.e2e.over) == (2, 1, 1, 2)
    assert (second.finished, second.good, second.smooth, second.e2e.over) == (1, 0, 0, 0)


def test_a_tick_in_which_the_epoch_changed_is_not_settled() -> None:
    recorder = create_recorder(cap=4)
    close(recorder, 2.0)
    recorder.ticks.configure(2, 4, Slo(ttft_ms=100))
    step(recorder, create_report(epoch=2, started_s=2.49))
    ticks = close(recorder, 6.0)
    assert [tick.settled for tick in ticks] == [False, False, True]
    assert [tick.epoch for tick in ticks] == [1, 2, 2]


@pytest.mark.parametrize(
    ("before", "after", "nums_running"),
    [(8, 4, (8, 6, 4, 4)), (4, 8, (4, 4, 5, 3))],
    ids=["lowered: the excess has drained", "raised: one was admitted above the old one"],
)
def test_another_cap_is_settled_once_it_shows(
    before: int, after: int, nums_running: tuple[int, ...]
) -> None:
    recorder = create_recorder(cap=before)
    close(recorder, 2.0)
    recorder.ticks.configure(2, after, SLO)
    for now_s, running in zip((3.0, 5.0, 7.0, 9.0), nums_running, strict=True):
        step(recorder, create_report(running=running, epoch=2, started_s=now_s))
        close(recorder, now_s + 1)
    assert [tick.settled for tick in close(recorder, 10.0)] == [False, False, False, False, True]


@pytest.mark.parametrize("then", [(2, 4, Slo(itl_ms=9.0)), (3, 6, SLO)])
def test_a_lowered_cap_that_still_drains_is_not_settled_by_another_change(
    then: tuple[int, int, Slo],
) -> None:
    recorder = create_recorder(cap=8)
    recorder.ticks.configure(2, 4, SLO)
    step(recorder, create_report(running=8, epoch=2, started_s=0.99))
    recorder.ticks.configure(*then)
    for now_s, running in ((3.0, 8), (5.0, then[1]), (7.0, then[1])):
        close(recorder, now_s - 1)
        step(recorder, create_report(running=running, epoch=then[0], started_s=now_s))
    assert [tick.settled for tick in close(recorder, 8.0)] == [False, False, False, True]


def test_a_raised_cap_that_nothing_uses_is_not_settled_by_new_targets() -> None:
    recorder = create_recorder(cap=4)
    recorder.ticks.configure(2, 8, SLO)
    recorder.ticks.configure(2, 8, Slo(itl_ms=9.0))
    step(recorder, create_report(running=4, epoch=2, started_s=2.99))
    assert [tick.settled for tick in close(recorder, 6.0)] == [False, False, False]


def test_a_lowered_cap_settles_on_an_idle_engine_too() -> None:
    recorder = create_recorder(cap=8)
    recorder.ticks.configure(2, 4, SLO)
    assert [tick.settled for tick in close(recorder, 6.0)] == [False, True, True]


def test_steps_of_the_old_epoch_settle_nothing() -> None:
    recorder = create_recorder(cap=4)
    recorder.ticks.configure(2, 8, SLO)
    step(recorder, create_report(running=5, epoch=1, started_s=0.99))
    close(recorder, 2.0)
    assert not close(recorder, 4.0)[1].settled


def test_the_same_configuration_again_unsettles_nothing() -> None:
    recorder = create_recorder(cap=4)
    close(recorder, 2.0)
    recorder.ticks.configure(1, 4, SLO)
    assert close(recorder, 4.0)[1].settled


def test_ticks_before_the_engine_serves_are_not_settled() -> None:
    recorder = Recorder("boot", 0.0, 1000.0)
    close(recorder, 4.0)
    recorder.ticks.start(1, 4, SLO)
    assert [tick.settled for tick in close(recorder, 8.0)] == [False, False, False, True]


def test_a_stalled_clock_closes_every_tick_that_passed_and_the_ring_forgets() -> None:
    recorder = create_recorder()
    ticks = close(recorder, TICK_SECONDS * (TICK_RING + 50))
    assert [tick.seq for tick in ticks] == list(range(51, TICK_RING + 51))
    assert ticks[0].t_s == pytest.approx(1000.0 + TICK_SECONDS * 51)
    assert ticks[-1].t_s == pytest.approx(1000.0 + TICK_SECONDS * (TICK_RING + 50))
    assert recorder.evidence(TICK_RING + 48).ticks == recorder.ticks.newest(2) == ticks[-2:]


def test_throttling_is_the_growth_within_the_tick() -> None:
    recorder = create_recorder()
    for now_s, throttled_s in ((2.0, 1.5), (4.0, 1.75)):
        recorder.advance(now_s, 1000.0 + now_s, throttled_s)
    assert [tick.throttled_s for tick in recorder.evidence(0).ticks] == [0.0, 0.25]


def test_hopeless_is_who_cannot_be_prefilled_in_time_any_more() -> None:
    recorder = create_recorder()
    recorder.engine.step_model = StepModel(a=10.0, b=0.0, c=0.0, d=1.0, n=9, resid_q=1.0)
    recorder.engine.load = EngineLoad(4, 2, 0, 0, 0, 8, 0, 0, 0, 0)
    recorder.arrive("long", 0.0, 0.0, 300)
    recorder.arrive("short", 0.0, 0.0, 10)
    assert [timer.request_id for timer in recorder.hopeless(0.1, 500)] == []
    assert [timer.request_id for timer in recorder.hopeless(0.3, 500)] == ["long"]
    assert [timer.request_id for timer in recorder.hopeless(0.49, 500)] == ["long", "short"]
    step(recorder, create_report(running=2, started_s=0.485, admitted=["long", "short"]))
    assert recorder.hopeless(0.499, 500) == []  # admitted: it may still make it


def test_what_belongs_to_a_request_that_has_begun_is_not_hopeless() -> None:
    recorder = create_recorder()
    recorder.engine.load = EngineLoad(4, 2, 0, 0, 0, 8, 0, 0, 0, 0)
    first, second, other = (recorder.arrive(name, 0.0, 0.0, 9) for name in ("a", "b", "other"))
    second.group = first.group
    assert recorder.hopeless(0.6, 500) == [first, other], "the engine ends both with the first"
    recorder.engine.load = EngineLoad(1, 2, 0, 0, 0, 8, 0, 0, 0, 0)
    step(recorder, create_report(waiting_cap=2, running=1, started_s=0.4, admitted=["a"]))
    assert first.admitted_s is not None
    assert recorder.hopeless(0.6, 500) == [other]


def test_a_place_is_free_when_the_last_token_is_there_not_when_its_client_has_read_it() -> None:
    recorder = create_recorder()
    timer = recorder.arrive("a", 0.0, 0.0, 9)
    step(recorder, create_report(running=1, started_s=0.0, admitted=["a"]))
    recorder.first_token(timer, 0.5, FirstParts(0.0, 0.0, 0.5, 0))
    assert recorder.finish(timer, 26.0, computed_s=1.0) == 26.0
    assert recorder.recent.service_s() == 1.0


@dataclass
class _Open:
    timer: RequestTimer
    num_tokens: int = 0


ACTIONS = (
    *("arrive", "refuse", "token", "token", "token", "finish", "leave", "shed", "fail", "step"),
    "tick",
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 30), st.floats(0, 1.5))))
def test_whatever_happens_each_arrival_is_counted_once(
    story: list[tuple[str, int, float]],
) -> None:
    recorder, now_s, number = create_recorder(), 0.0, 0
    open_requests: list[_Open] = []
    gaps = finished = refused = failed = unjudged = unjudged_whole = 0
    for action, pick, pause_s in story:
        now_s += pause_s
        chosen = open_requests[pick % len(open_requests)] if open_requests else None
        if action == "arrive":
            number += 1
            open_requests.append(_Open(recorder.arrive(str(number), now_s, now_s, 5)))
        elif action == "refuse":
            refused += 1
            recorder.refuse()
        elif action == "step":
            waiting = min(pick, len(open_requests))
            names = [one.timer.request_id for one in open_requests[waiting:]]
            step(recorder, create_report(waiting_cap=waiting, started_s=now_s, admitted=names))
        elif action == "tick":
            recorder.advance(now_s, now_s, 0.0)
        elif chosen is not None:
            if action == "token" and chosen.num_tokens == 0:
                recorder.first_token(chosen.timer, now_s, NO_WAIT)
                chosen.num_tokens = 1
            elif action == "token":
                recorder.next_token(chosen.timer, now_s, at_cap=bool(pick % 2))
                gaps += 1
            elif action != "finish" or chosen.num_tokens:
                open_requests.remove(chosen)
                if action == "finish":
                    recorder.finish(chosen.timer, now_s)
                    finished += 1
                elif action == "fail":
                    failed += 1
                    unjudged += not chosen.timer.decided
                    unjudged_whole += not chosen.timer.e2e_decided
                    recorder.fail(chosen.timer, "500")
                else:
                    recorder.drop(chosen.timer, now_s, by_server=action == "shed")
    for left in open_requests:
        recorder.drop(left.timer, now_s, by_server=True)
    ticks = close(recorder, now_s + TICK_SECONDS)
    assert total(ticks, "arrivals") == number + refused
    assert total(ticks, "ttft.n") == number + refused - unjudged
    assert sum(tick.failed.get("500", 0) for tick in ticks) == failed
    assert total(ticks, "refused") == refused
    assert total(ticks, "itl.n") == gaps
    assert total(ticks, "finished") == finished
    assert total(ticks, "e2e.n") == number + refused - unjudged_whole
    for tick in ticks:
        by = tick.ttft.by
        assert by.cap + by.kv + by.prefill + by.outside == tick.ttft.over <= tick.ttft.n
        assert tick.itl.over_after_over <= tick.itl.over <= tick.itl.n
        assert tick.itl.over_at_cap <= min(tick.itl.over, tick.itl.n_at_cap)
        assert max(tick.good, tick.smooth) <= tick.finished
    evidence = recorder.evidence(0)
    assert decode(encode(evidence), Evidence) == evidence
    assert msgspec.json.decode(encode(evidence))


MODEL = StepModel(a=10.0, b=0.0, c=0.0, d=1.0, n=9, resid_q=1.0)
"""90 tokens take 100 ms alone."""
BUSY = EngineLoad(4, 0, 0, 0, 0, 8, 0, 0, 0, 0)


def serve(
    recorder: Recorder, seconds: float, now_s: float, *, prompt: int = 90, cached: int = 0
) -> None:
    """A request whose first token comes at `now_s`, after so many seconds of nothing but work."""
    timer = recorder.arrive(f"served at {now_s}", now_s - seconds, now_s - seconds, prompt)
    recorder.first_token(timer, now_s, FirstParts(0.0, 0.0, seconds, cached))
    recorder.finish(timer, now_s)


def create_learned(model: StepModel = MODEL) -> Recorder:
    recorder = create_recorder()
    recorder.engine.step_model = model
    return recorder


def test_hopeless_learns_that_prefills_take_longer_among_decodes() -> None:
    recorder = create_learned()
    for _ in range(200):
        serve(recorder, 0.3, 1.0)  # three times the 100 ms predicted
    recorder.arrive("next", 1.0, 1.0, 90)
    recorder.engine.load = BUSY
    assert recorder.hopeless(1.19, 500) == []
    assert [timer.request_id for timer in recorder.hopeless(1.22, 500)] == ["next"]


def test_what_was_waited_for_is_not_learned_as_prefill() -> None:
    recorder = create_learned()
    for i in range(100):
        timer = recorder.arrive(str(i), 0.0, 0.0, 90)
        recorder.first_token(timer, 1.5, FirstParts(1.0, 0.4, 0.1, 0))
    assert recorder.engine.prefill_ms(90, 1.5) == pytest.approx(100, abs=1)


def test_what_others_took_that_the_order_has_before_is_not_learned_as_prefill() -> None:
    """A late one is passed by for minutes: a newcomer that can be in time is not."""
    recorder = create_learned()
    for i in range(100):
        timer = recorder.arrive(str(i), 0.0, 0.0, 90)
        recorder.first_token(timer, 60.0, FirstParts(0.0, 0.0, 60.0, 0, passed_s=59.9))
    assert recorder.engine.prefill_ms(90, 60.0) == pytest.approx(100, abs=1)


def test_where_nothing_runs_who_waits_begins_at_once_whatever_is_expected() -> None:
    recorder = create_learned()
    for _ in range(200):
        serve(recorder, 0.3, 1.0)
    recorder.arrive("next", 1.0, 1.0, 90)
    assert recorder.hopeless(1.4, 500) == []
    assert len(recorder.hopeless(1.51, 500)) == 1


def test_prefills_that_vary_are_expected_to_take_longer_than_their_mean() -> None:
    recorder = create_learned()
    chance = random.Random(2)
    num_covered = 0
    for i in range(1000):
        seconds, now_s = chance.uniform(0.1, 0.3), 1.0 + i / 10
        num_covered += 1e3 * seconds <= recorder.engine.prefill_ms(90, now_s)
        serve(recorder, seconds, now_s)
    assert 0.85 * 1000 <= num_covered < 1000


def test_what_short_prompts_take_beside_their_prefill_is_added_to_long_ones_and_no_factor() -> None:
    recorder = create_learned(StepModel(a=2.0, b=0.0, c=0.0, d=0.15, n=9, resid_q=1.0))
    chance = random.Random(5)
    for i in range(400):  # 3 ms alone
        serve(recorder, chance.uniform(0.02, 0.08), 1.0 + i / 40, prompt=5)
    alone_ms = 2 + 0.15 * 900
    assert recorder.engine.prefill_ms(5, 11.0) > 40
    assert recorder.engine.prefill_ms(900, 11.0) < alone_ms + 200  # all of 20 times would be 2,740


def test_prompts_that_are_kept_out_are_let_in_again_while_others_go_on() -> None:
    """Nobody of their length could teach that it has become quicker."""
    recorder = create_learned()
    for i in range(100):
        serve(recorder, 3.0, i / 10, prompt=890)  # of 0.9 s alone
    assert recorder.engine.prefill_ms(890, 10.0) > 2500
    for i in range(600):
        serve(recorder, 0.012, 10.0 + i / 10, prompt=2)
    assert recorder.engine.prefill_ms(890, 70.0) < 1800
    assert recorder.engine.prefill_ms(890, 250.0) < 1000


def test_what_a_prefill_takes_is_asked_only_of_requests_with_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole queue is looked through after each step."""
    recorder, asked = create_recorder(), list[int]()
    recorder.engine.load = EngineLoad(4, 3, 0, 0, 0, 8, 0, 0, 0, 0)
    for i in range(3):
        recorder.arrive(str(i), 0.0, 0.0, 10 + i, ttft_ms=100.0 if i == 2 else None)

    def counted(num_tokens: int, now_s: float) -> float:
        asked.append(num_tokens)
        return 0.0

    monkeypatch.setattr(recorder.engine, "prefill_ms", counted)
    assert [timer.request_id for timer in recorder.hopeless(0.2, None)] == ["2"]
    assert asked == [12]


def test_a_deadline_of_its_own_decides_when_a_request_is_hopeless() -> None:
    recorder = create_recorder()
    recorder.arrive("patient", 0.0, 0.0, 10, ttft_ms=5000.0)
    recorder.arrive("hasty", 0.0, 0.0, 10, ttft_ms=100.0)
    recorder.arrive("plain", 0.0, 0.0, 10)
    assert [timer.request_id for timer in recorder.hopeless(0.2, None)] == ["hasty"]
    late = [timer.request_id for timer in recorder.hopeless(0.6, 500)]
    assert late == ["hasty", "plain"]


def test_what_the_prefix_cache_gives_is_not_expected_to_be_computed() -> None:
    recorder = create_learned()
    assert recorder.engine.prefill_ms(90, 0.0) == 100
    for i in range(100):
        serve(recorder, 0.02, 1.0 + i / 10, cached=81)
    assert recorder.engine.prefill_ms(90, 11.0) < 25


def test_service_time_is_that_of_the_requests_that_ended_lately() -> None:
    recorder = create_recorder()
    assert recorder.recent.service_s() is None
    for i in range(3):
        timer = recorder.arrive(str(i), 0.0, 0.0, 10)
        step(recorder, create_report(running=1, started_s=0.99, admitted=[str(i)]))
        recorder.first_token(timer, 1.5, NO_WAIT)
        recorder.finish(timer, 3.0 + i)
    assert recorder.recent.service_s() == pytest.approx(3.01)  # the first step is of it


def test_every_arrival_counts_against_the_end_to_end_target_once() -> None:
    """Refused, shed, still open past it, and cancelled after it; then in time."""
    recorder = create_recorder()
    recorder.refuse()
    stuck = recorder.arrive("stuck", 0.0, 0.0, 5)
    left_late = recorder.arrive("left late", 0.0, 0.0, 5)
    ticks = close(recorder, TICK_SECONDS)
    assert (total(ticks, "e2e.n"), total(ticks, "e2e.over")) == (3, 3)
    recorder.drop(left_late, TICK_SECONDS + 0.1, by_server=False)
    shed = recorder.arrive("shed", 2.1, 2.1, 5)
    recorder.drop(shed, 2.2, by_server=True)
    cancelled = recorder.arrive("cancelled in time", 2.1, 2.1, 5)
    recorder.drop(cancelled, 2.2, by_server=False)
    in_time = recorder.arrive("in time", 2.1, 2.1, 5)
    recorder.first_token(in_time, 2.2, NO_WAIT)
    recorder.finish(in_time, 2.3)
    recorder.first_token(stuck, 2.4, NO_WAIT)
    recorder.finish(stuck, 2.5)
    ticks = close(recorder, 2 * TICK_SECONDS)
    assert (total(ticks, "e2e.n"), total(ticks, "e2e.over")) == (6, 4)
    assert sum(sum(tick.e2e.sketch.values()) for tick in ticks) == 2


def test_without_an_end_to_end_target_only_what_finished_is_counted() -> None:
    recorder = create_recorder(slo=Slo(ttft_ms=500, itl_ms=50))
    recorder.refuse()
    recorder.drop(recorder.arrive("1", 0.0, 0.0, 5), 9.0, by_server=True)
    assert total(close(recorder, 10.0), "e2e.n") == 0
