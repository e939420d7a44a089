"""How long the requests are that finished lately. Pure."""

import math
from collections import deque

from sluice_core.contract import Lengths

LENGTHS_KEPT = 1024
"""Finished requests behind `Lengths`: recent ones, so that a shift of the traffic shows."""


class RecentLengths:
    """Whole lengths of the requests that finished lately. Their sums are kept: exact, as they are
    whole numbers."""

    def __init__(self) -> None:
        self._kept: deque[int] = deque()
        self._sum = self._sum_of_squares = 0

    def add(self, length: int) -> None:
        """One more; the oldest is let go."""
        self._book(length, 1)
        self._kept.append(length)
        if len(self._kept) > LENGTHS_KEPT:
            self._book(self._kept.popleft(), -1)

    def _book(self, length: int, times: int) -> None:
        self._sum += times * length
        self._sum_of_squares += times * length * length

    def stats(self) -> Lengths:
        """Their mean and standard deviation; zeros before any."""
        n = len(self._kept)
        if n == 0:
            return Lengths(mean=0.0, sigma=0.0, n=0)
        variance = (n * self._sum_of_squares - self._sum**2) / n**2
        return Lengths(mean=self._sum / n, sigma=math.sqrt(variance), n=n)
