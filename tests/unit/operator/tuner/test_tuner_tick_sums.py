"""What a run of ticks adds up to is worked out once, and is what the ticks say one by one."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.contract import TICK_RING, FirstTokens, Tick, Waiting
from sluice_operator.tuner import constants as k
from sluice_operator.tuner import tick_sums
from sluice_operator.tuner.detect import NOTHING, Bets, Moments, Series, evidence_of
from sluice_operator.tuner.tick_sums import TickSlice, TickWindow, series_of
from sluice_operator.tuner.verdicts import _busy_periods, _on_end
from unit.operator.tuner.made import gaps, tick

LOOKED_AT: list[int] = []


def each(parts: Sequence[TickSlice], factor: int = 1) -> list[int]:
    """The arrivals of each span, as `TickWindow` find them."""
    return TickWindow(parts).joined(in_a_row, arrivals, "arrivals", factor)


def in_a_row(lists: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def arrivals(parts: list[tuple[Tick, ...]], reading: str, factor: int = 1) -> list[int]:
    LOOKED_AT.extend(t.seq for part in parts for t in part)
    return [factor * sum(getattr(t, reading) for t in part) for part in parts]


@given(st.integers(0, 200), st.integers(0, 40), st.integers(1, 3))
def test_runs_say_what_the_ticks_say_wherever_they_begin(first: int, num: int, pods: int) -> None:
    parts = [
        tuple(tick(seq, arrivals=seq * (pod + 1)) for pod in range(pods))
        for seq in range(first, first + 3 * num)
    ]
    for factor in (1, 2):
        told = each(parts, factor)
        assert told == arrivals(parts, "arrivals", factor)


def test_only_ticks_at_the_ends_are_looked_at_again() -> None:
    ticks = [(tick(seq, boot_id="looked at once"),) for seq in range(20 * k.RUN_TICKS)]
    each(ticks)
    each(ticks[5:])
    LOOKED_AT.clear()
    each(ticks[6:])
    assert list(range(6, k.RUN_TICKS)) == LOOKED_AT


def test_a_tick_that_differs_is_not_taken_for_the_one_before() -> None:
    for num in (1, 2):
        ticks = [(tick(seq, boot_id="alike", arrivals=num),) for seq in range(k.RUN_TICKS)]
        assert each(ticks) == [num] * k.RUN_TICKS


def test_sums_follow_the_ticks_and_unused_runs_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(tick_sums, "_known", tick_sums._Known())
    monkeypatch.setattr(tick_sums, "monotonic", lambda: now_s[0])
    ticks = [
        (tick(seq, boot_id="a day", itl=gaps(1000, seq % 7)),) for seq in range(10 * TICK_RING)
    ]
    for end in range(TICK_RING, len(ticks), 77):
        now_s[0] += 2.0
        ring = ticks[end - TICK_RING : end]
        spans = TickWindow(ring)
        assert spans.total(gaps_of) == (1000 * TICK_RING, sum(part[0].itl.over for part in ring))
        assert sum(spans.sketch(lambda t: t.itl.sketch).values()) == 1000 * TICK_RING
    kept = len(tick_sums._known.runs)
    assert TICK_RING // k.RUN_TICKS <= kept <= 3 * TICK_RING // k.RUN_TICKS


def gaps_of(tick: Tick) -> tuple[int, int]:
    return tick.itl.n, tick.itl.over


def parts_of(first: int, series: Series) -> list[TickSlice]:
    return [(tick(seq, itl=gaps(*counted)),) for seq, counted in enumerate(series, first)]


def evidence_on(parts: list[TickSlice], threshold: float) -> float:
    return TickWindow(parts).breach_evidence(0.01, threshold, series_of, gaps_of)


counts = st.integers(0, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
slow = st.tuples(st.just(300), st.integers(0, 12))


@given(
    st.integers(0, 2 * k.RUN_TICKS),
    st.lists(st.one_of(slow, counts), min_size=1, max_size=4 * k.RUN_TICKS),
    st.sampled_from([1.5, k.BREACH_EVIDENCE]),
)
def test_bets_on_runs_are_bets_on_all_ticks(
    first: int, series: list[tuple[int, int]], threshold: float
) -> None:
    parts = parts_of(first, series)
    whole = TickWindow(parts).joined(in_a_row, _whole) or parts
    sizes = [n for n, _ in series_of(whole, gaps_of) if n]
    mean_size = sum(sizes) / len(sizes) if sizes else 1.0
    bets = Bets(0.01, mean_size, k.EVIDENCE_KEPT * threshold)
    told = evidence_of([NOTHING, *bets.path(series)][-1])
    assert evidence_on(parts, threshold) == pytest.approx(told)


def _whole(parts: Sequence[TickSlice]) -> list[TickSlice]:
    return list(parts) if len(parts) == k.RUN_TICKS else []


def test_bets_on_many_runs_begin_with_a_whole_one() -> None:
    late, quiet_run = [(1000, 1000)] * 2, [(0, 0)] * k.RUN_TICKS
    few = [*late, *quiet_run * (k.RUNS_FROM_WHOLE - 1)]
    many = [*late, *quiet_run * k.RUNS_FROM_WHOLE]
    assert evidence_on(parts_of(k.RUN_TICKS - 2, few), 1e6) > 1
    assert evidence_on(parts_of(k.RUN_TICKS - 2, many), 1e6) == 1
    assert evidence_on(parts_of(k.RUN_TICKS, many), 1e6) > 1


@given(
    st.integers(0, 2 * k.RUN_TICKS),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=99),
)
def test_busy_periods_go_on_from_run_to_run(
    first: int, series: list[tuple[int, int, bool]]
) -> None:
    parts = [
        (tick(seq, ttft=FirstTokens(sketch={1: low, 3: high}), waiting=Waiting(cap=waits)),)
        for seq, (low, high, waits) in enumerate(series, first)
    ]
    periods, n, above = [], 0, 0
    for low, high, waits in series:
        n, above = n + low + high, above + high
        if not waits:
            periods.append((n, above))
            n = above = 0
    told = TickWindow(parts).joined(_on_end, _busy_periods, sketch_of, 2)
    assert told.moments == Moments.of([*periods, (n, above)])


def sketch_of(tick: Tick) -> dict[int, int]:
    return tick.ttft.sketch
