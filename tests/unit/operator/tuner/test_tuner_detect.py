"""The two tests hold the error rates that they promise."""

from math import comb, exp
from random import Random

import pytest
from sluice_core.sketch import merge, quantile_ms
from sluice_operator.tuner import constants as k
from sluice_operator.tuner.detect import (
    NOTHING,
    Bets,
    Capital,
    Moments,
    Series,
    design_effect,
    evidence_of,
    headroom,
)

BETS = Bets(allowed=0.01, mean_size=1000, most=k.EVIDENCE_KEPT * k.BREACH_EVIDENCE)

TICKS_PER_DAY = 43_200


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


@pytest.mark.parametrize("group", [20, 100])
def test_false_breaches_at_the_limit_are_at_most_one_a_day(group: int) -> None:
    """On the mean, of sixty days without an end between them; a breach begins anew, as an epoch
    does. Whole groups of samples are over together: any dependence inside a tick is allowed."""
    random, breaches, days, held = Random(7), 0, 60, NOTHING
    for _ in range(days):
        series = _at_the_limit(random, TICKS_PER_DAY, 1000, group)
        more, held = _breaches(series, held)
        breaches += more
    print(f"{breaches / days:.3f} false breaches a day, {group} samples over together")
    assert breaches <= _fewer_than_chance(days)


def _fewer_than_chance(mean: float) -> int:
    """So few, or fewer, are seen with a chance of 5 % where `mean` are expected (Poisson): 47 of
    60. What comes more often than that is found out in 19 of 20 tries or more."""
    num, term, total = 0, exp(-mean), exp(-mean)
    while total <= 0.05:
        num += 1
        term *= mean / num
        total += term
    return num - 1


def _at_the_limit(random: Random, num: int, n: int, group: int) -> Series:
    """`num` ticks of `n` samples; each group of them is over with a chance of 1 %."""
    groups = n // group
    chances = [comb(groups, over) * 0.01**over * 0.99 ** (groups - over) for over in range(groups)]
    return [(n, group * over) for over in random.choices(range(groups), chances, k=num)]


def _breaches(series: Series, held: Capital) -> tuple[int, Capital]:
    """How often the bets that go on from `held` breach, and what is held at the end."""
    found = 0
    while series:
        num, held = _until_breach(series, held)
        series = series[num:]
        if evidence_of(held) >= k.BREACH_EVIDENCE:
            found, held = found + 1, NOTHING
    return found, held


def _until_breach(series: Series, before: Capital) -> tuple[int, Capital]:
    """After how many ticks, or all of them, and what is held then."""
    num, held = 0, before
    for num, held in enumerate(BETS.path(series, before), 1):  # noqa: B007 - the last
        if evidence_of(held) >= k.BREACH_EVIDENCE:
            break
    return num, held


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
