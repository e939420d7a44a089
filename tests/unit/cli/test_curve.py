"""The curve of caps: what counts, the knee, the cap to take, and what static batches would do."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice.measure import curve
from sluice.measure.client import Outcome
from sluice.measure.curve import CurveTally, StepCosts
from sluice.measure.targets import read_targets

TARGETS = read_targets("ttft=1s,itl=50ms")
COSTS = StepCosts(a=5.0, b=1.0, c=0.001, d=0.1, chunk=512)


def answered(ttft_s: float = 0.1, output: int = 11, gap_s: float = 0.01) -> Outcome:
    total = ttft_s + (output - 1) * gap_s
    return Outcome("ok", "p", ttft_s, total, output, (gap_s,) * (output - 1), 0)


REFUSED = Outcome("failed", "", 0.0, 0.0, 0, (), 0, "HTTP 429")


def tally(outcomes: list[Outcome], cap: int = 4, steps: float | None = 100.0) -> CurveTally:
    found = CurveTally(cap)
    found.add(outcomes, [100] * len(outcomes), 2.0, TARGETS, steps, 3.0)
    return found


def test_a_point_rates_only_answered_requests_and_counts_all() -> None:
    found = curve.point(tally([answered(), answered(2.0), REFUSED]), TARGETS, None)
    assert (found["requests"], found["failed"]) == (3, 1)
    assert (found["tokens_per_s"], found["requests_per_s"]) == (11.0, 1.0)
    assert (found["goodput_rps"], found["good_share"]) == (0.5, pytest.approx(1 / 3))
    assert found["failures"] == {"HTTP 429": 1}
    assert found["ttft_ms"]["p99"] is None, "a request without an answer has waited for ever"
    assert found["over"]["ttft"] == {"target_ms": 1000.0, "n": 3, "over": 2, "holds": False}


@pytest.mark.parametrize(("late", "holds"), [(1, True), (2, False)])
def test_a_target_holds_while_one_in_a_hundred_is_over(late: int, holds: bool) -> None:
    outcomes = [answered()] * (100 - late) + [answered(1.5)] * late
    assert curve.point(tally(outcomes), TARGETS, None)["holds"] is holds


def point(cap: int, tokens: float, goodput: float = 1.0, holds: bool = True) -> dict[str, Any]:
    return {"cap": cap, "tokens_per_s": tokens, "goodput_rps": goodput, "holds": holds}


def test_knee_is_where_more_brings_no_more() -> None:
    assert curve.knee([point(1, 100), point(4, 350), point(8, 590), point(16, 610)]) == 8


def test_recommended_cap_holds_the_targets_and_the_smallest_of_equals_is_taken() -> None:
    points = [point(2, 200, 4.0), point(4, 300, 7.9), point(8, 400, 8.0), point(16, 500, 9.0)]
    points[-1]["holds"] = False
    assert curve.recommend(points, has_targets=True) == 4
    assert curve.recommend(points, has_targets=False) == 16
    none_holds = [{**p, "holds": False} for p in points]
    assert curve.recommend(none_holds, has_targets=True) == 16
    nothing_good = [{**p, "goodput_rps": 0.0} for p in points]
    assert curve.recommend(nothing_good, has_targets=True) == curve.knee(points)


def test_a_cap_that_is_done_sooner_and_holds_fewer_is_not_recommended() -> None:
    """Waves come every 30 s: 120 good of 200 in 28 s are more than 95 in 20."""
    points = []
    for cap, good, seconds in ((8, 120, 28.0), (32, 95, 20.0)):
        found = CurveTally(cap)
        outcomes = [answered()] * good + [answered(2.0)] * (200 - good)
        found.add(outcomes, [100] * 200, seconds, TARGETS, 100.0, 3.0)
        points.append(curve.point(found, TARGETS, None, silence_s=30.0))
    assert [p["goodput_rps"] for p in points] == [4.0, pytest.approx(95 / 30)]
    assert points[0]["tokens_per_s"] < points[1]["tokens_per_s"]
    assert curve.recommend(points, has_targets=True) == 8


def continuous_steps(outputs: list[int], size: int) -> float:
    """Of perfect refilling: each sequence starts in the step in which another ended."""
    ends = [0] * size
    for output in outputs:
        ends.sort()
        ends[0] += output
    return max(ends)


def test_static_batches_lose_on_mixed_lengths_and_tie_on_equal_ones() -> None:
    mixed = [5, 40, 8, 60, 7, 33, 12, 50] * 4
    for outputs, low, high in ((mixed, -1.0, -0.1), ([30] * 32, -0.06, 0.06)):
        found = tally([answered(output=n) for n in outputs], steps=continuous_steps(outputs, 4))
        static = curve.static(found, COSTS)
        assert low < static["gain"] < high
        assert (static["padding_waste"] > 0.3) is (outputs is mixed)


def test_static_batches_win_where_continuous_ones_took_many_small_steps() -> None:
    equal = tally([answered(output=30)] * 32, steps=600)
    assert curve.static(equal, COSTS)["gain"] > 0.3
    assert curve.static(equal, None)["gain"] is None


def test_gap_of_a_full_static_batch_is_the_step_model_s() -> None:
    static = curve.static(tally([answered(output=30)] * 8), COSTS)
    assert static["gap_ms"] == pytest.approx(5.0 + 4 * (1.0 + 0.001 * 116))


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_interval_holds_the_share_and_stays_within_0_and_1(successes: int, n: int) -> None:
    successes = min(successes, n)
    low, high = curve.wilson(successes, n)
    assert 0 <= low <= successes / n <= high <= 1


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(1000):
        low, high = curve.wilson(sum(rng.random() < 0.95 for _ in range(200)), 200)
        covered += low <= 0.95 <= high
    assert 925 <= covered <= 985
