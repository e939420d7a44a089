"""Exact quantiles of the values of the last minute. Pure.

A histogram is read off between its edges, which is too coarse for a P99 that is to be held. Values
are kept as whole microseconds in slices of a second, each of which is sorted once; a quantile is
found by halving, so that a scrape of a busy worker costs milliseconds and no second copy.
"""

from array import array
from bisect import bisect_right
from collections import deque
from fractions import Fraction

SLICE_S = 1.0
NUM_SLICES = 60
_PER_S = 1_000_000


class Window:
    """Seconds by when they were measured; calls need not be in order of `now_s`."""

    def __init__(self) -> None:
        self._slices: deque[tuple[int, array[int]]] = (
            deque()
        )  # oldest first; all but the last sorted

    def add(self, seconds: float, now_s: float) -> None:
        """One value, measured at `now_s`."""
        number = int(now_s // SLICE_S)
        if not self._slices or self._slices[-1][0] < number:
            self._close()
            self._slices.append((number, array("q")))
            self._drop(number)
        self._slices[-1][1].append(round(seconds * _PER_S))

    def count(self, now_s: float) -> int:
        """Values of the minute that ends at `now_s`."""
        self._drop(int(now_s // SLICE_S))
        return sum(len(values) for _, values in self._slices)

    def quantile(self, share: Fraction, now_s: float) -> float | None:
        """The least of the values that at least `share` of all are not over; None without any."""
        num_values = self.count(now_s)
        if not num_values:
            return None
        self._close()
        parts = [values for _, values in self._slices]
        rank = max(-(-share.numerator * num_values // share.denominator), 1)
        low, high = min(part[0] for part in parts), max(part[-1] for part in parts)
        while low < high:
            middle = (low + high) // 2
            if sum(bisect_right(part, middle) for part in parts) >= rank:
                high = middle
            else:
                low = middle + 1
        return low / _PER_S

    def _close(self) -> None:
        """Sort the newest slice; what comes into it later makes it unsorted again."""
        if self._slices:
            number, values = self._slices.pop()
            self._slices.append((number, array("q", sorted(values))))

    def _drop(self, number: int) -> None:
        """Forget slices that ended more than a minute before slice `number` ends."""
        while self._slices and self._slices[0][0] <= number - NUM_SLICES:
            self._slices.popleft()
