"""Lengths of recently finished requests, in tokens and in time. Pure."""

import math
from collections import deque

from sluice_core.contract import Lengths

LENGTHS_KEPT = 1024
SERVICE_TIMES_KEPT = 64
"""Number of finished requests behind each mean: few enough to show a shift of the traffic."""


class RecentRequests:
    """Lengths and times in service."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=LENGTHS_KEPT)
        self._service_s: deque[float] = deque(maxlen=SERVICE_TIMES_KEPT)

    def add(self, length: int) -> None:
        """Take in one more length, prompt plus output."""
        self._lengths.append(length)

    def add_service(self, seconds: float) -> None:
        """Take in one more time from admission to end."""
        self._service_s.append(seconds)

    def service_s(self) -> float | None:
        """Mean time in service; None before any."""
        return sum(self._service_s) / len(self._service_s) if self._service_s else None

    def lengths(self) -> Lengths:
        """Mean length and standard deviation; zeros before any. Their sums are exact."""
        if not (n := len(self._lengths)):
            return Lengths(mean=0.0, sigma=0.0, n=0)
        total, squares = sum(self._lengths), sum(each**2 for each in self._lengths)
        return Lengths(mean=total / n, sigma=math.sqrt((n * squares - total**2) / n**2), n=n)
