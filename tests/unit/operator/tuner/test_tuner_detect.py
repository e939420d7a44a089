"""The two tests hold the error rates that they promise."""

from random import Random

import pytest
from sluice_operator.tuner import constants as k
from sluice_operator.tuner.detect import (
    NOTHING,
    Bets,
    Moments,
    Series,
    design_effect,
    evidence_of,
    headroom,
)
from sluice_operator.tuner.sketch import merge, quantile_ms

BETS = Bets(allowed=0.01, mean_size=1000, most=k.EVIDENCE_KEPT * k.BREACH_EVIDENCE)


def breach_evidence(series: Series) -> float:
    return evidence_of([NOTHING, *BETS.path(series)][-1])


def ticks_until_breach(share: float) -> int:
    series: list[tuple[int, int]] = []
    while breach_evidence(series) < k.BREACH_EVIDENCE:
        series.append((1000, round(1000 * share)))
        assert len(series) < 1000
    return len(series)


@pytest.mark.parametrize(("share", "at_most"), [(1.0, 4), (0.2, 6), (0.05, 16), (0.02, 125)])
def test_a_breach_is_seen_within_ticks(share: float, at_most: int) -> None:
    assert ticks_until_breach(share) <= at_most


def test_a_share_at_the_limit_is_no_breach() -> None:
    assert breach_evidence([(1000, 10)] * 2000) < 2


@pytest.mark.parametrize("burst", [20, 100])
def test_false_breaches_at_the_limit_are_rarer_than_one_a_day(burst: int) -> None:
    """Whole groups of samples are over together: any dependence inside a tick is allowed."""
    random, breaches, hours = Random(7), 0, 120
    for _ in range(hours):
        series = [(1000, _grouped(random, 1000, burst, 0.01)) for _ in range(1800)]
        breaches += _ever_breaches(series)
    assert breaches <= hours / 24 + 3


def _grouped(random: Random, n: int, group: int, share: float) -> int:
    return group * sum(random.random() < share for _ in range(n // group))


def _ever_breaches(series: Series) -> bool:
    return any(evidence_of(held) >= k.BREACH_EVIDENCE for held in BETS.path(series))


def test_a_small_tick_bets_little() -> None:
    usual = [(1000, 5)] * 20
    small = breach_evidence([*usual, (2, 2)])
    large = breach_evidence([*usual, (1000, 1000)])
    assert small < 1.5 < large


def test_a_breach_is_forgotten_after_clean_ticks_however_long_it_lasted() -> None:
    overload = [(1000, 1000)] * 800
    assert breach_evidence(overload) >= k.BREACH_EVIDENCE
    clean = [*overload, *[(1000, 0)] * 3]
    assert breach_evidence(clean) < k.BREACH_EVIDENCE


def test_headroom_for_p99_takes_214_clean_independent_samples() -> None:
    assert not headroom(213, 0, 1.0, 0.01).shown
    assert headroom(214, 0, 1.0, 0.01).shown
    assert headroom(0, 0, 1.0, 0.01).samples_needed == 214


def test_dependent_samples_count_for_less() -> None:
    assert not headroom(2130, 0, 10.0, 0.01).shown
    assert headroom(0, 0, 10.0, 0.01).samples_needed == 2133


def test_batches_that_agree_cost_nothing_and_batches_that_clump_do() -> None:
    even = design_effect(Moments.of([(100, 10)] * 60))
    clumped = design_effect(Moments.of([(100, 100), *[(100, 0)] * 9] * 6))
    assert even == 1.0
    assert 90 < clumped < 110


def test_few_batches_count_as_one_sample_each() -> None:
    assert design_effect(Moments.of([(50, 5)] * 10)) == 50


def test_one_slow_spell_counts_once() -> None:
    assert design_effect(Moments.of([(100, 10)] * 60), 0.5) == pytest.approx(3.0)


def test_merged_quantiles_are_those_of_all_values() -> None:
    fast, slow = {100: 99}, {300: 1}
    merged = merge([fast, slow])
    assert quantile_ms(merged, 0.5) == pytest.approx(1.02**100, rel=0.011)
    assert quantile_ms(merged, 1.0) == pytest.approx(1.02**300, rel=0.011)
    assert quantile_ms({}, 0.99) is None
