"""How long the requests are that finished lately, in tokens and in time. Pure."""

import math
from collections import deque

from sluice_core.contract import Lengths

LENGTHS_KEPT = 1024
SERVICE_TIMES_KEPT = 64
"""Numbers of finished requests behind each mean: few enough that a shift of the traffic shows."""


class RecentRequests:
    """Lengths and times in service. Sums of lengths are whole numbers, and so exact."""

    def __init__(self) -> None:
        self._kept: deque[int] = deque()
        self._sum = self._sum_of_squares = 0
        self._service_s: deque[float] = deque(maxlen=SERVICE_TIMES_KEPT)

    def add(self, length: int) -> None:
        """Take in one more length, prompt plus output, and drop the oldest."""
        self._book(length, 1)
        self._kept.append(length)
        if len(self._kept) > LENGTHS_KEPT:
            self._book(self._kept.popleft(), -1)

    def _book(self, length: int, times: int) -> None:
        self._sum += times * length
        self._sum_of_squares += times * length * length

    def add_service(self, seconds: float) -> None:
        """Take in one more time from admission to end."""
        self._service_s.append(seconds)

    def service_s(self) -> float | None:
        """Mean time in service; None before any."""
        return sum(self._service_s) / len(self._service_s) if self._service_s else None

    def lengths(self) -> Lengths:
        """Mean length and standard deviation; zeros before any."""
        n = len(self._kept)
        if n == 0:
            return Lengths(mean=0.0, sigma=0.0, n=0)
        variance = (n * self._sum_of_squares - self._sum**2) / n**2
        return Lengths(mean=self._sum / n, sigma=math.sqrt(variance), n=n)
