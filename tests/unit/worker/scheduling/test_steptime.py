"""The step model: what it finds in records, and what it lets a step do."""

from math import exp, inf
from random import Random
from statistics import fmean

import pytest
from sluice_core.contract import StepModel
from sluice_core.latency import NO_LIMIT, chunk_limit, predicted_cap
from sluice_core.steptime import MAX_AGE_S, MAX_STEP_MS, StepRecord, StepTimes

TRUTH = StepModel(a=2.0, b=0.3, c=0.001, d=0.1, n=0, resid_q=1.0)


def record(at_s: float, decodes: int, kv: int, prefill: int, *, scale: float = 1.0) -> StepRecord:
    step_ms = scale * TRUTH.step_ms(decodes, kv, prefill)
    return StepRecord(at_s, decodes, kv, prefill, step_ms)


def varied(at_s: float, *, scale: float = 1.0) -> list[StepRecord]:
    return [
        record(at_s, n, n * context, chunk, scale=scale)
        for n in (1, 4, 16)
        for context in (50, 400)
        for chunk in (0, 32, 256)
    ]


def fitted(records: list[StepRecord], now: float = 0.0) -> StepModel:
    times = StepTimes()
    for item in records:
        times.add(item)
    model = times.refit(now)
    assert model is not None
    return model


def test_known_coefficients_are_found() -> None:
    model = fitted(varied(0.0))
    assert (model.a, model.b, model.c, model.d) == pytest.approx((2.0, 0.3, 0.001, 0.1), rel=1e-3)
    assert model.resid_q == pytest.approx(1.0, abs=1e-3)


def test_no_coefficient_is_negative_even_where_noise_would_make_it_so() -> None:
    falling = [StepRecord(0.0, n, 100 * n, 0, 10.0 - n) for n in range(1, 9)]
    model = fitted(falling)
    assert min(model.a, model.b, model.c, model.d) >= 0


def test_old_regime_is_forgotten_by_age() -> None:
    times = StepTimes()
    for item in varied(0.0) + varied(MAX_AGE_S + 60, scale=3.0):
        times.add(item)
    model = times.refit(MAX_AGE_S + 61)
    assert model is not None
    assert model.n == len(varied(0.0))
    assert model.step_ms(4, 800, 32) == pytest.approx(3 * TRUTH.step_ms(4, 800, 32), 0.01)


def test_many_equal_steps_do_not_drown_the_few_others() -> None:
    few = varied(0.0)
    model = fitted(few + [record(0.0, 1, 60, 0) for _ in range(10_000)])
    assert model.d == pytest.approx(0.1, rel=0.01)
    assert model.n < 200


def test_profile_keeps_the_slopes_that_traffic_does_not_show() -> None:
    times = StepTimes()
    times.set_profile(varied(0.0))
    for _ in range(500):
        times.add(record(1.0, 1, 60, 0))
    model = times.refit(2.0)
    assert model is not None
    assert model.d == pytest.approx(0.1, rel=0.1)
    cap = predicted_cap(model, model.resid_q, itl_ms=20.0, kv_per_seq=200, ceiling=256)
    assert cap < 256


def test_without_recent_records_the_last_model_stays() -> None:
    times = StepTimes()
    for item in varied(0.0):
        times.add(item)
    before = times.refit(1.0)
    assert times.refit(1000.0) == before


def test_tail_is_that_of_the_slowest_steps() -> None:
    times = StepTimes()
    for item in [*varied(0.0), record(0.0, 4, 800, 32, scale=4.0)]:
        times.add(item)
    times.refit(0.0)
    slowest_ms = 3 * TRUTH.step_ms(4, 800, 32)
    assert 0.7 * slowest_ms < times.tail.ms_within(inf) < slowest_ms


def test_chunks_that_take_longer_behind_much_context_are_made_shorter() -> None:
    times = StepTimes()
    chunks = [(tokens, context) for tokens in (32, 64, 128, 256) for context in (0, 800)]
    for tokens, context in chunks:
        times.add(record(0.0, 0, tokens + context, tokens, scale=2.0 if context else 1.0))
    model = times.refit(0.0)
    assert model is not None
    limit = chunk_limit(model, times.tail, 40.0, 0, 0)
    assert 2 * TRUTH.step_ms(0, 800 + limit, limit) <= 1.2 * 40.0


@pytest.mark.parametrize(("itl_ms", "decodes"), [(None, 0), (None, 8), (40.0, 0), (6e4, 8)])
def test_no_prompt_makes_a_step_of_minutes(itl_ms: float | None, decodes: int) -> None:
    """8 billion parameters on two cores: 50 ms a token, and 2,048 tokens are a step's budget."""
    times = StepTimes()
    assert times.chunk_limit(itl_ms, decodes, 0) == NO_LIMIT
    slow = [StepRecord(0.0, d, 100 * d, p, 100.0 + 50.0 * p) for d in (1, 8) for p in (0, 8, 64)]
    times.set_profile(slow * 8)
    limit = times.chunk_limit(itl_ms, decodes, 100 * decodes)
    assert 0.9 * MAX_STEP_MS <= 100.0 + 50.0 * limit <= MAX_STEP_MS
    assert times.chunk_limit(40.0, 8, 800) <= 0


STEPS = [(decodes, 200 * decodes, prefill) for decodes in (1, 8, 32) for prefill in (0, 64, 256)]


def after_spells(*, every: int, spell_steps: int, scale: float) -> StepTimes:
    """2,000 steps, of which `spell_steps` in a row, every so many, take `scale` times as long."""
    times = StepTimes()
    times.set_profile([record(0.0, *shape) for shape in STEPS])
    for i in range(2000):
        is_slow = i % every >= every - spell_steps
        times.add(record(0.01 * i, *STEPS[i % len(STEPS)], scale=scale if is_slow else 1.0))
        if i % 50 == 0:
            times.refit(0.01 * i)
    return times


def test_a_spell_that_is_over_leaves_room_for_prefill_and_a_hiccup_counts() -> None:
    plain = after_spells(every=400, spell_steps=0, scale=1.0).chunk_limit(40.0, 8, 1600)
    interference = after_spells(every=400, spell_steps=40, scale=4.0)
    for i in range(50):
        interference.add(record(20.0 + 0.01 * i, *STEPS[i % len(STEPS)]))
    interference.refit(20.5)
    hiccups = after_spells(every=100, spell_steps=1, scale=2.0)
    assert interference.chunk_limit(40.0, 8, 1600) > 0.8 * plain
    assert hiccups.chunk_limit(40.0, 8, 1600) < 0.7 * plain


def test_within_a_spell_prefill_keeps_the_target_at_the_speed_of_the_spell() -> None:
    times = after_spells(every=400, spell_steps=20, scale=1.8)
    limit = times.chunk_limit(40.0, 8, 1600)
    assert 1.8 * TRUTH.step_ms(8, 1600 + limit, limit) == pytest.approx(40.0, rel=0.15)


def test_a_spell_that_is_over_leaves_the_model_as_it_was() -> None:
    """Also when it is read just after: the last steps are not yet known to be out of it."""
    times = after_spells(every=400, spell_steps=0, scale=1.0)
    before = times.model
    assert before is not None
    for i in range(40):
        times.add(record(20.0 + 0.1 * i, *STEPS[i % len(STEPS)], scale=3.0))
    assert times.is_slow
    for i in range(6):
        times.add(record(24.0 + 0.01 * i, *STEPS[i % len(STEPS)]))
        after = times.refit(24.1)
        assert after is not None
        for decodes, kv, prefill in STEPS:
            usual_ms = before.step_ms(decodes, kv, prefill)
            assert after.step_ms(decodes, kv, prefill) == pytest.approx(usual_ms, rel=0.1)
    assert not times.is_slow


def slow_for(seconds: int, times: StepTimes) -> StepModel:
    """`times` after so many more seconds of steps that take three times as long, from 20 s on."""
    model = times.model
    for i in range(10 * seconds):
        times.add(record(20.0 + 0.1 * i, *STEPS[i % len(STEPS)], scale=3.0))
        if i % 20 == 19:
            model = times.refit(20.0 + 0.1 * i)
    assert model is not None
    return model


@pytest.mark.parametrize("seconds", [40, 100, 160])
def test_slowness_that_lasts_is_the_model_until_it_ends(seconds: int) -> None:
    times = after_spells(every=400, spell_steps=0, scale=1.0)
    assert slow_for(20, times).step_ms(8, 1600, 64) < 1.1 * TRUTH.step_ms(8, 1600, 64)
    slow = slow_for(seconds, times)
    assert not times.is_slow
    assert slow.step_ms(8, 1600, 64) == pytest.approx(3 * TRUTH.step_ms(8, 1600, 64), 0.05)
    ended_s = 20.0 + seconds
    for i in range(1000):
        times.add(record(ended_s + 0.01 * i, *STEPS[i % len(STEPS)]))
    usual = times.refit(ended_s + 10.0)
    assert usual is not None
    longest = 1.1 if seconds < MAX_AGE_S else 3.0  # by then nobody remembers it otherwise
    assert usual.step_ms(8, 1600, 64) <= longest * TRUTH.step_ms(8, 1600, 64)


def room_for_chunks(seed: int) -> float:
    """Mean ms of the longest step that 40 chunks among 2,000 steps, all noisy, leave for 60 ms."""
    random = Random(seed)
    times = StepTimes()
    for i in range(2000):
        shape = (8, 1600, 460) if i % 50 == 0 else (1 + i % 7, 60 + 20 * (i % 9), 0)
        times.add(record(0.01 * i, *shape, scale=exp(random.gauss(0, 0.05))))
    times.refit(20.0)
    limit = times.chunk_limit(60.0, 8, 1600)
    return TRUTH.step_ms(8, 1600 + limit, limit)


def test_the_tail_of_chunks_is_told_from_a_few_dozen() -> None:
    """The largest of 40 is their P98 on average; the noise keeps to the target up to its P99.7."""
    mean_ms = fmean(room_for_chunks(seed) for seed in range(20))
    assert 50.0 < mean_ms < 60.0 / exp(2.75 * 0.05)


def test_two_hiccups_in_two_minutes_leave_room_for_prefill() -> None:
    plain, hiccups = StepTimes(), StepTimes()
    for times in (plain, hiccups):
        times.set_profile([record(0.0, *shape) for shape in STEPS])
        for i in range(1000):
            is_hiccup = times is hiccups and i in (300, 700)
            times.add(record(0.1 * i, *STEPS[i % len(STEPS)], scale=20.0 if is_hiccup else 1.0))
        times.refit(100.0)
    assert hiccups.chunk_limit(40.0, 8, 1600) > 0.8 * plain.chunk_limit(40.0, 8, 1600)


def test_steps_that_are_slower_than_the_profile_said_are_no_spell() -> None:
    times = StepTimes()
    times.set_profile([record(0.0, *shape) for shape in STEPS])
    for i in range(40):
        times.add(record(0.1 * i, *STEPS[i % len(STEPS)], scale=2.0))
    model = times.refit(4.0)
    assert model is not None
    assert model.step_ms(8, 1600, 64) == pytest.approx(2 * TRUTH.step_ms(8, 1600, 64), 0.05)


@pytest.mark.parametrize(("scale", "is_slow"), [(3.0, True), (0.4, False)])
def test_just_after_the_start_steps_are_compared_with_the_profile(
    scale: float, is_slow: bool
) -> None:
    times = StepTimes()
    times.set_profile([record(0.0, *shape) for shape in STEPS])
    for i in range(5):
        times.add(record(0.1 * i, 8, 1600, 64, scale=scale))
    assert times.slowdown == pytest.approx(scale)
    assert times.is_slow == is_slow


def test_what_was_taken_for_a_spell_of_a_throttled_pod_counts_as_it_was_measured() -> None:
    times = StepTimes()
    times.set_profile([record(0.0, *shape) for shape in STEPS])
    for i in range(240):
        times.add(record(0.1 * i, *STEPS[i % len(STEPS)], scale=1.0 if i < 40 else 3.0))
        if i % 20 == 19:
            spelled = times.refit(0.1 * i)
    usual = TRUTH.step_ms(8, 1600, 64)
    assert spelled is not None
    assert spelled.step_ms(8, 1600, 64) < 1.2 * usual
    assert times.is_slow
    throttled = times.refit(24.0, is_throttled=True)
    assert throttled is not None
    assert throttled.step_ms(8, 1600, 64) > 1.4 * usual
    assert not times.is_slow


def test_what_larger_batches_take_is_no_spell_where_small_ones_said_that_it_costs_nothing() -> None:
    times, at_s, num_slow = StepTimes(), 0.0, 0
    times.set_profile([record(0.0, n, 100 * n, 0) for n in (1, 2, 4, 8, 16, 32)])
    # Noise has it that two sequences take no longer than one; then bursts fill 8, 16, 32.
    for n in (1, 1, 2, 1, 8, 16, 32, 2, 32, 1, 32):
        for _ in range(50):
            work = n, 100 * n, 0
            step_ms = TRUTH.step_ms(*work) if n > 2 else 2.4
            times.add(StepRecord(at_s, *work, step_ms))
            num_slow += times.is_slow
            if (at_s := at_s + 0.1) % 1 < 0.1:
                times.refit(at_s)
    model = times.model
    assert model is not None
    assert model.step_ms(32, 3200, 0) == pytest.approx(TRUTH.step_ms(32, 3200, 0), 0.1)
    assert num_slow == 0


@pytest.mark.parametrize("grows_at", [0, 20])
def test_a_spell_with_a_larger_batch_than_any_before_is_told(grows_at: int) -> None:
    """It holds up answers, and so the batch grows with it, or while it lasts."""
    times, at_s, num_slow = StepTimes(), 0.0, 0
    times.set_profile([record(0.0, n, 100 * n, m) for n in (1, 2, 4, 8) for m in (0, 64, 512)])
    for step in range(700):
        in_spell = 600 <= step < 640
        n = 80 if step >= 600 + grows_at else 20 + step % 40
        times.add(record(at_s, n, 100 * n, 256 if step % 2 else 0, scale=3.0 if in_spell else 1.0))
        num_slow += times.is_slow
        if (at_s := at_s + 0.1) % 1 < 0.1:
            times.refit(at_s)
        assert times.is_slow <= (600 <= step < 650)
    assert num_slow >= 30
    model = times.refit(at_s)
    assert model is not None
    assert model.step_ms(80, 8000, 256) == pytest.approx(TRUTH.step_ms(80, 8000, 256), 0.1)


def test_a_larger_batch_that_takes_what_the_model_says_leaves_chunks_as_they_are() -> None:
    times = StepTimes()
    times.set_profile([record(0.0, n, 100 * n, m) for n in (1, 8, 32) for m in (0, 64, 512)])
    for step in range(40):  # after a while of single sequences
        times.add(record(step / 10, 1, 100, 64 * (step % 2)))
    times.refit(4.0)
    limit = times.chunk_limit(100.0, 4, 400)
    for step in range(40):
        n = 2 + step % 30
        times.add(record(4 + step / 100, n, 100 * n, 64))
        assert times.slowdown == 1.0
        assert times.chunk_limit(100.0, 4, 400) == limit


def test_slowness_that_lasts_is_not_over_for_a_larger_batch() -> None:
    times = StepTimes()
    times.set_profile([record(0.0, n, 100 * n, m) for n in (1, 8) for m in (0, 64, 512)])
    for step in range(900):
        n = 30 if step >= 860 else 1 + step % 15
        times.add(record(step / 10, n, 100 * n, 64, scale=1.8 if step >= 400 else 1.0))
        if step % 10 == 9:
            times.refit(step / 10)
    model = times.model
    assert model is not None
    assert not times.is_slow
    assert model.step_ms(30, 3000, 64) == pytest.approx(1.8 * TRUTH.step_ms(30, 3000, 64), 0.05)


PERIOD_MS, QUOTA_MS = 10.0, 5.0
"""Of a pod with half a CPU: so much it may run in each period."""


def throttled_ms(now_ms: float, run_ms: float, used_ms: dict[int, float]) -> float:
    """When a step that begins at `now_ms` has run for `run_ms`; `used_ms`: of each period."""
    while run_ms > 1e-9:
        period = int(now_ms / PERIOD_MS + 1e-9)
        left_ms = QUOTA_MS - used_ms.get(period, 0.0)
        runs_ms = min(run_ms, left_ms, PERIOD_MS * (period + 1) - now_ms)
        if runs_ms <= 1e-9:
            now_ms = PERIOD_MS * (period + 1)
            continue
        used_ms[period] = used_ms.get(period, 0.0) + runs_ms
        now_ms, run_ms = now_ms + runs_ms, run_ms - runs_ms
    return now_ms


@pytest.mark.parametrize("scale", [0.4, 0.8])
def test_a_throttled_pod_is_not_thought_faster_each_time_it_stands_still(scale: float) -> None:
    random, times, used_ms = Random(0), StepTimes(), dict[int, float]()
    times.set_profile([record(0.0, *shape, scale=scale) for shape in STEPS])
    now_ms, num_slow, num_steps = 0.0, 0, 0
    while now_ms < 120e3:
        shape = random.choice([(2, 300, 0), (3, 500, 0), (4, 700, 0), (3, 500, 64)])
        ended_ms = throttled_ms(now_ms, scale * TRUTH.step_ms(*shape), used_ms)
        times.add(StepRecord(ended_ms / 1000, *shape, ended_ms - now_ms))
        num_slow, num_steps = num_slow + times.is_slow, num_steps + 1
        if int(ended_ms / 1000) > int(now_ms / 1000):
            times.refit(ended_ms / 1000, is_throttled=True)
        now_ms = ended_ms + 0.1
    model = times.model
    assert model is not None
    for shape in ((3, 500, 0), (3, 500, 64)):
        assert model.step_ms(*shape) > 0.95 * scale * TRUTH.step_ms(*shape)
    assert num_slow < 0.02 * num_steps


def launched(at_s: float, decodes: int, prefill: int, least_ms: float) -> StepRecord:
    """A step of an 8B on an H200: a graph, or with prefill at least `least_ms` of launches."""
    graph_ms = 4.3 + 0.03 * decodes
    step_ms = max(least_ms, graph_ms - 3.3 + 0.0213 * prefill) if prefill else graph_ms
    return StepRecord(at_s, decodes, 500 * decodes + prefill, prefill, step_ms)


def chunk_after_traffic(has_graphs: bool, least_ms: float) -> int:
    """The chunk beside 8 decodes under a target of 13.8 ms, which earlier chunks kept to."""
    times, at_s = StepTimes(has_graphs=has_graphs), 0.0
    shapes = ((0, 32), (1, 0), (0, 128), (32, 0))
    times.set_profile([launched(at_s, *shape, least_ms) for shape in shapes])
    for step in range(2000):
        chunk = min(max(times.chunk_limit(13.8, 8, 4000), 32), 512) if step % 2 else 0
        times.add(launched(at_s, 8, chunk, least_ms))
        at_s += 0.01
        if step % 100 == 99:
            times.refit(at_s)
    return times.chunk_limit(13.8, 8, 4000)


def test_where_only_decodes_are_graphs_a_small_chunk_is_not_a_price_per_token() -> None:
    assert chunk_after_traffic(has_graphs=False, least_ms=11.0) < 100  # none larger is measured
    chunk = min(chunk_after_traffic(has_graphs=True, least_ms=11.0), 512)  # the longest prompt
    assert chunk > 256
    assert launched(0, 8, chunk, 11.0).step_ms < 13.8


def test_where_no_chunk_keeps_the_target_chunks_are_worth_their_launch() -> None:
    assert chunk_after_traffic(has_graphs=False, least_ms=15.0) < 32
    assert chunk_after_traffic(has_graphs=True, least_ms=15.0) > 256
