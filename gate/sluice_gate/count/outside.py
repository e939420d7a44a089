"""The step model from outside: gaps and first tokens give what the engine does not tell. Pure.

A gap without prefill beside it is a step: a + b * decodes. A prefill's time beyond that is
d * tokens. A gate does not see the KV cache: c is 0, and its cost is a part of b.

The errors are relative to what the last fit predicts, not to what was measured. Chunks that arrive
together have gaps of nearly nothing, which would outweigh all others. A stall is a long gap of all
sequences at once: it counts as `MAX_STRETCH` times what was expected, or it would be the pod's
speed for minutes.
"""

from collections import deque
from math import ceil, exp, fsum, hypot
from typing import NamedTuple

from sluice_core.contract import StepModel

FORGET_S = 40.0
"""A record that is 120 s older than another has 5 % of its weight."""
MIN_GAPS = 100
MIN_PREFILLS = 8
"""Records before the first fit. Later, the memory is never shorter, however old they are."""
MAX_PREFILLS = 128
MIN_SPREAD = 0.1
"""Least deviation of a load over its mean, from which its cost can be told from a fixed one."""
JUDGED = 512
"""Newest steps behind `resid_q`, with one gap of each: the gaps of one step are all alike."""
QUANTILE = 0.99
MAX_STRETCH = 4.0
_LEAST_MS = 0.1  # of any step


class _Prefill(NamedTuple):
    at_s: float
    ms: float
    tokens: float
    decodes: int


class OutsideModel:
    """The law of an engine's steps, from gaps and first tokens as a client sees them."""

    def __init__(self) -> None:
        self._sums = _Sums()
        self._newest: deque[tuple[float, int]] = deque(maxlen=JUDGED)
        self._prefills: deque[_Prefill] = deque(maxlen=MAX_PREFILLS)
        self._num_gaps = self._num_skipped = 0
        self._mean_ms = 0.0
        self._model: StepModel | None = None

    def gap(self, gap_ms: float, decodes: int, now_s: float) -> None:
        """Add a gap without prefill beside it."""
        self._num_gaps += 1
        self._num_skipped += 1
        if self._num_skipped >= decodes or not self._newest:
            self._num_skipped = 0
            self._newest.append((gap_ms, decodes))
        if self._model is None:
            self._mean_ms += (gap_ms - self._mean_ms) / self._num_gaps
            expected_ms = self._mean_ms
        else:
            expected_ms = self._model.a + self._model.b * decodes
        if expected_ms < _LEAST_MS:
            expected_ms = _LEAST_MS
        if gap_ms > MAX_STRETCH * expected_ms:
            gap_ms = MAX_STRETCH * expected_ms
        self._sums.add(gap_ms, decodes, expected_ms, now_s)

    def prefill(self, prefill_ms: float, tokens: float, decodes: int, now_s: float) -> None:
        """Add a prompt of so many tokens, from its admission to its first token."""
        self._prefills.append(_Prefill(now_s, prefill_ms, tokens, decodes))

    def fit(self, now_s: float) -> StepModel | None:
        """The model of now; None before there are enough records of different loads."""
        if self._model is None and not self._is_enough():
            return None
        a, b = self._sums.fitted(self._model)
        ratios = sorted(ms / max(a + b * decodes, _LEAST_MS) for ms, decodes in self._newest)
        self._model = StepModel(
            a=a,
            b=b,
            c=0.0,
            d=self._per_token_ms(a, b, now_s),
            n=round(self._sums.num),
            resid_q=ratios[ceil(QUANTILE * len(ratios)) - 1],
        )
        return self._model

    def _is_enough(self) -> bool:
        if self._num_gaps < MIN_GAPS or len(self._prefills) < MIN_PREFILLS:
            return False
        sizes = [prefill.tokens for prefill in self._prefills]
        mean = fsum(sizes) / len(sizes)
        deviation = hypot(*(size - mean for size in sizes)) / len(sizes) ** 0.5
        return deviation > MIN_SPREAD * mean and self._sums.is_spread()

    def _per_token_ms(self, a: float, b: float, now_s: float) -> float:
        """The line through the origin with the least sum of absolute relative errors: a median of
        slopes, which a few prompts that had to wait in the engine do not move."""
        slopes = []
        for i, (at_s, ms, tokens, decodes) in enumerate(reversed(self._prefills)):
            if tokens > 0:
                age = 1.0 if i < MIN_PREFILLS else exp((at_s - now_s) / FORGET_S)
                excess_ms = ms - a - b * decodes
                slopes.append((excess_ms / tokens, age * tokens / max(ms, _LEAST_MS)))
        slopes.sort()
        half = fsum(weight for _, weight in slopes) / 2
        for slope, weight in slopes:
            half -= weight
            if half <= 0:
                return max(slope, 0.0)
        return 0.0


class _Sums:
    """Sums for a line through gaps against decodes, each weighted by its age and scale."""

    __slots__ = ("_at_s", "_x", "_xx", "_xy", "_y", "_weight", "num")

    def __init__(self) -> None:
        self.num = self._weight = self._x = self._xx = self._y = self._xy = 0.0
        self._at_s = 0.0

    def add(self, ms: float, decodes: int, expected_ms: float, now_s: float) -> None:
        """Add a gap; the older ones fade, but of MIN_GAPS equal ones none is lost at once."""
        if now_s > self._at_s:
            self._fade(max(exp((self._at_s - now_s) / FORGET_S), 1 - 1 / MIN_GAPS))
            self._at_s = now_s
        weight = 1 / (expected_ms * expected_ms)
        self.num += 1
        self._weight += weight
        x = weight * decodes
        self._x += x
        self._xx += x * decodes
        self._y += weight * ms
        self._xy += x * ms

    def _fade(self, share: float) -> None:
        self.num *= share
        self._weight *= share
        self._x *= share
        self._xx *= share
        self._y *= share
        self._xy *= share

    def is_spread(self) -> bool:
        """True if the loads differ enough to tell a from b."""
        mean = self._x / self._weight
        return self._xx / self._weight - mean * mean > (MIN_SPREAD * mean) ** 2

    def fitted(self, last: StepModel | None) -> tuple[float, float]:
        """a and b, none negative. Where the loads hardly differ now, `last` in other units."""
        if last is not None and not self.is_spread():
            square = last.a**2 * self._weight + 2 * last.a * last.b * self._x
            square += last.b**2 * self._xx
            share = (last.a * self._y + last.b * self._xy) / square if square else 1.0
            return last.a * share, last.b * share
        x, y = self._x / self._weight, self._y / self._weight
        b = (self._xy / self._weight - x * y) / (self._xx / self._weight - x * x)
        if b <= 0:
            return y, 0.0
        a = y - b * x
        return (a, b) if a >= 0 else (0.0, self._xy / self._xx)
