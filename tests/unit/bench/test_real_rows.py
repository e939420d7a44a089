"""The bench on a real worker counts all arrivals, and aims at the cap that it says."""

from dataclasses import replace

import pytest
from bench.real_rows import (
    BEFORE,
    LENGTHS,
    OURS,
    OVERLOAD,
    Row,
    best_fixed,
    compared,
    findings,
    in_order,
    itl_target_ms,
    make_row,
    models,
    num_early,
    ratios,
    real_trace,
    scaled_trace,
    table,
)
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sluice.measure.client import Outcome
from sluice_core.contract import StepModel
from sluice_core.latency import predicted_cap
from sluice_operator.tuner import Targets

TARGETS = Targets("99", 1000.0, 50.0, None)
IN_TIME = Outcome("ok", "", 0.2, 0.3, 3, (0.04, 0.045), 0)
STALLED = Outcome("ok", "", 0.2, 0.3, 3, (0.01, 0.06), 0)
LATE = Outcome("ok", "", 1.2, 1.3, 3, (0.04, 0.04), 0)
REFUSED = Outcome("failed", "", 0.0, 0.0, 0, (), 0, "HTTP 429")


@given(
    st.floats(0, 50), st.floats(0.01, 10), st.floats(0, 0.01), st.floats(0, 2),
    st.floats(1, 3), st.integers(1, 64),
)  # fmt: skip
def test_the_target_is_the_least_one_at_which_the_worker_predicts_the_cap(
    a: float, b: float, c: float, d: float, tail: float, cap: int
) -> None:
    model = StepModel(a=a, b=b, c=c, d=d, n=100, resid_q=tail)
    kv_tokens = LENGTHS.prompt + LENGTHS.output / 2

    def predicted(itl_ms: float) -> int:
        return predicted_cap(model, tail, itl_ms=itl_ms, kv_per_seq=kv_tokens, ceiling=256)

    target_ms = itl_target_ms(model, cap, tail)
    assert predicted(target_ms) >= cap
    assert predicted(target_ms - 0.11) < cap or cap == 1


@pytest.mark.parametrize("name", ["steps", "bursts", "steady-80"])
def test_a_trace_lasts_as_long_as_asked_and_its_requests_come_in_order(name: str) -> None:
    trace = scaled_trace(name, 8.0, 60.0, seed=1)
    times = [one.t_s for one in trace]
    assert times == sorted(times)
    assert 50 <= times[-1] <= 70
    assert times[-1] * 8.0 * 0.3 < len(trace) < times[-1] * 8.0 * 1.2


def test_a_request_without_an_answer_counts_as_missed_and_as_waiting_for_ever() -> None:
    outcomes = [IN_TIME, STALLED, LATE, REFUSED, None]
    row = make_row("steps", "cap 4", 0, outcomes, TARGETS, 10.0, 5.0, [(0.0, 4)], 2.0)
    assert (row.requests, row.answered, row.cap_changes) == (5, 3, 0)
    assert (row.good_share, row.smooth_share) == (2 / 5, 1 / 5)
    assert row.p50_ttft_ms == 1200.0
    assert row.p99_ttft_ms is None
    assert row.tokens_per_s == pytest.approx(0.9)


def row(contender: str, repeat: int, good: int, path: list[tuple[float, int]]) -> Row:
    outcomes = [IN_TIME] * good + [None] * (10 - good)
    return make_row("steps", contender, repeat, outcomes, TARGETS, 10.0, 5.0, path, 2.0)


def test_the_best_fixed_cap_is_marked_and_ours_is_told_beside_it() -> None:
    rows = [
        row("cap 4", 0, 5, [(0.0, 4)]),
        row("cap 8", 0, 8, [(0.0, 8)]),
        row(OURS, 0, 6, [(0.0, 2), (4.0, 6)]),
    ]
    assert best_fixed(rows, "steps") == "cap 8"
    assert best_fixed(rows[2:], "steps") is None
    lines = table(rows).splitlines()
    assert "**cap 8**" in lines[3]
    assert "**" not in lines[2] + lines[4]
    assert lines[4].endswith("| 2, 6 |")
    told = next(findings(rows, ceiling=8))
    assert "60.0 % smooth, 75.0 % of cap 8" in told
    assert "-20.0 points" in told
    assert "1.0 changes, the last at 4.0 s" in told


def test_rows_are_put_in_order_however_their_runs_were_drawn() -> None:
    names = (OURS, "cap 2", "cap 16", "cap 16, whole chunks")
    ours, small, large, whole = (row(name, 0, 5, [(0.0, 4)]) for name in names)
    again, other = (replace(small, repeat=1), replace(small, trace="bursts"))
    drawn = [again, other, ours, whole, large, small]
    assert in_order(drawn) == [small, again, large, whole, ours, other]


def test_how_far_the_worker_has_become_faster_or_slower_is_told() -> None:
    rows = [replace(row(OURS, repeat, 5, [(0.0, 4)]), drift=0.1 - repeat / 5) for repeat in (1, 0)]
    *_, told = findings(rows, ceiling=4)
    assert told.endswith("than before: +10 %, -10 %.")


def test_repeats_are_told_as_medians_and_each_is_compared_within_itself() -> None:
    goods = {"cap 4": (9, 1, 2), "cap 8": (4, 5, 8), OURS: (2, 5, 6)}
    rows = [
        row(name, repeat, good, [(0.0, 4)])
        for name, found in goods.items()
        for repeat, good in enumerate(found)
    ]
    assert best_fixed(rows, "steps") == "cap 8"
    lines = table(rows).splitlines()
    assert len(lines) == 2 + len(goods)
    assert "50.0 (40.0 to 80.0)" in lines[3]
    assert "17 of 30" in lines[3]
    assert lines[4].endswith("| 4 |")
    told = next(findings(rows, ceiling=4))
    assert "ours 50.0 (20.0 to 60.0) % smooth" in told
    assert "75.0 (50.0 to 100.0) % of cap 8" in told
    assert "40.0 (-70.0 to 40.0) points" in told


def test_a_first_token_that_most_repeats_never_saw_has_no_time() -> None:
    rows = [row("cap 4", repeat, good, [(0.0, 4)]) for repeat, good in enumerate((10, 3, 2))]
    assert table(rows).splitlines()[2].split(" | ")[5:7] == ["-", "-"]


def test_an_overload_brings_more_than_the_worker_does_from_the_first_second_on() -> None:
    trace = real_trace(OVERLOAD, 10.0, 60.0, seed=1)
    rates = [sum(at <= one.t_s < at + 20 for one in trace) / 20 for at in (0, 20, 40)]
    assert all(11 < rate < 15 for rate in rates)
    assert real_trace("steps", 10.0, 60.0, seed=1) == scaled_trace("steps", 10.0, 60.0, seed=1)
    assert num_early(trace) == sum(one.t_s < 10 for one in trace)


def test_the_first_arrivals_are_told_apart_and_count_in_the_whole_too() -> None:
    outcomes = [LATE, None, IN_TIME, STALLED, IN_TIME, IN_TIME]
    found = make_row("steps", OURS, 0, outcomes, TARGETS, 10.0, 5.0, [(0.0, 4)], 2.0, early=4)
    assert (found.early_good_share, found.early_smooth_share) == (2 / 4, 1 / 4)
    assert found.good_share == 4 / 6
    assert " 50/25 " in table([found])
    assert " -/- " in table([row(OURS, 0, 5, [(0.0, 4)])])


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=5))
def test_a_ratio_is_of_one_repeat_and_equal_shares_are_1(goods: list[tuple[int, int]]) -> None:
    rows = [
        row(name, repeat, good, [(0.0, 4)])
        for repeat, pair in enumerate(goods)
        for name, good in zip((OURS, BEFORE), pair, strict=True)
    ]
    rows.append(row(BEFORE, len(goods), 5, [(0.0, 4)]))  # a repeat that was cut
    found = ratios(rows, "steps", OURS, BEFORE, "good_share")
    assert len(found) == len(goods)
    for ratio, (ours, before) in zip(found, goods, strict=True):
        if ours == before:
            assert ratio == 1
        else:
            assert ratio * before == pytest.approx(ours) or (ratio, before) == (float("inf"), 0)


def test_what_has_no_first_token_at_p99_is_the_longest_and_what_came_late_has_no_early_share() -> (
    None
):
    rows = [row(name, 0, good, [(0.0, 4)]) for name, good in ((OURS, 10), (BEFORE, 5))]
    told = compared(rows, "steps", OURS, BEFORE)
    assert "good 2.00, smooth 2.00, tokens/s 2.00, P99 gap 1.00" in told
    assert "P99 first token 0.00" in told
    assert "first 10 s" not in told


def test_the_profile_of_a_start_is_told_beside_what_was_true() -> None:
    model = StepModel(a=5.0, b=0.05, c=0.0, d=0.0213, n=100, resid_q=1.2)
    looked = replace(
        row(OURS, 0, 5, [(0.0, 69)]), profile=model, fitted=structs.replace(model, d=0.03)
    )
    (told,) = models([looked, row("cap 64", 0, 5, [(0.0, 64)]), row(OURS, 0, 5, [(0.0, 4)])])
    assert "a cap of 69 by 5.00 + 0.050 decodes + 0 kv + 0.0213 prefill ms (P99 1.20" in told
    assert "0.0300 prefill" in told
