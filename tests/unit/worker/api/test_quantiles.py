"""Quantiles of the last minute are those of a sorted list."""

import math
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st
from sluice_worker.quantiles import Window

SHARES = [Fraction(share) for share in ("0", "0.5", "0.99", "0.999", "1")]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 200)), min_size=1, max_size=80))
def test_quantiles_are_exact_over_the_slices_of_the_last_minute(
    measured: list[tuple[int, float]],
) -> None:
    window = Window()
    for at, (microseconds, now_s) in enumerate(sorted(measured, key=lambda pair: pair[1])):
        window.add(microseconds / 1e6, now_s)
        if at % 7 == 0:  # asking in between changes nothing
            window.quantile(SHARES[1], now_s)
        kept = sorted(
            v for v, t in sorted(measured, key=lambda p: p[1])[: at + 1] if now_s // 1 - t // 1 < 60
        )
        assert window.count(now_s) == len(kept)
        for share in SHARES:
            rank = max(math.ceil(share * len(kept)), 1)
            assert window.quantile(share, now_s) == kept[rank - 1] / 1e6


def test_a_minute_without_values_has_no_quantile() -> None:
    window = Window()
    assert window.quantile(SHARES[1], 0.0) is None
    window.add(1.0, 0.0)
    assert window.quantile(SHARES[1], 59.9) == 1.0
    assert window.quantile(SHARES[1], 60.0) is None


def test_a_value_that_comes_late_counts_where_it_is_told() -> None:
    window = Window()
    window.add(2.0, 10.0)
    window.add(1.0, 9.5)
    assert window.count(10.0) == 2
