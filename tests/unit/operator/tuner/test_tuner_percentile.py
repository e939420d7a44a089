"""The upper bound of a percentile holds as often as it says; too few values have none."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from sluice_core.sketch import bucket_of, quantile_ms
from sluice_operator.tuner.verdicts import bound_ms


@pytest.mark.parametrize(("allowed", "least"), [(0.01, 300), (0.1, 30), (0.5, 6)])
def test_too_few_values_show_no_bound(allowed: float, least: int) -> None:
    assert bound_ms({}, allowed) is None
    assert bound_ms({1: least - 1}, allowed) is None
    assert bound_ms({1: least}, allowed) == quantile_ms({1: 1}, 0)


@pytest.mark.parametrize(
    ("n", "allowed"), [(300, 0.01), (479, 0.01), (1000, 0.01), (5000, 0.01), (60, 0.1), (200, 0.5)]
)
def test_the_true_percentile_is_over_its_bound_at_most_once_in_twenty_times(
    n: int, allowed: float
) -> None:
    rng, over, runs = random.Random(n), 0, 2000
    true_ms = 1000 * (1 - allowed)
    for _ in range(runs):
        values = Counter(bucket_of(rng.uniform(0, 1000)) for _ in range(n))
        bound = bound_ms(values, allowed)
        assert bound is not None
        over += bucket_of(bound) < bucket_of(true_ms)
    assert over / runs <= 0.065  # 0.05, and three deviations


def test_more_values_bring_the_bound_nearer() -> None:
    bounds = []
    for n in (400, 4_000, 40_000):
        values = Counter(bucket_of(1 + i / n * 1000) for i in range(n))
        bound, percentile = bound_ms(values, 0.01), quantile_ms(values, 0.99)
        assert bound is not None
        assert percentile is not None
        assert bound >= percentile
        bounds.append(bound)
    assert bounds == sorted(bounds, reverse=True)
