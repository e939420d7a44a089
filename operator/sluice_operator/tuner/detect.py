"""Two tests of the evidence: is a target breached, and is there headroom? Otherwise: hold."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log
from operator import mul
from typing import NamedTuple

from . import constants as k

Series = Sequence[tuple[int, int]]
"""(samples, samples over target) of each tick, oldest first."""
Capital = tuple[float, ...]
NOTHING: Capital = (1.0,) * len(k.BETS)
"""The capital of bets that have gained nothing: the next tick starts from there."""


class Bets(NamedTuple):
    """A betting CUSUM (e-detector: Shin, Ramdas, Rinaldo 2023) on the ticks' fractions, so any
    dependence inside a tick is allowed. A tick smaller than `mean_size` bets less. Capital is
    clipped at `most`, so that a breach can be forgotten."""

    allowed: float
    mean_size: float
    most: float

    @property
    def stakes(self) -> tuple[float, ...]:
        """The stake of each bet on a tick, in units of its capital."""
        return tuple([bet * 0.01 / self.allowed for bet in k.BETS])

    def path(self, series: Series, capital: Capital = NOTHING) -> Iterator[Capital]:
        """The capital of each bet after each tick of `series`; `capital`: before the first. A bet
        below 1 starts the next tick at 1."""
        size, allowed, stakes = self.mean_size, self.allowed, self.stakes
        for n, over in series:
            if n:
                win = (n / size if n < size else 1.0) * (over / n - allowed)
                if win > 0.0 or capital is not NOTHING:
                    capital = self._after(capital, stakes, win)
            yield capital

    def _after(self, capital: Capital, stakes: Capital, win: float) -> Capital:
        won = [
            (held if held > 1.0 else 1.0) * (1.0 + stake * win)
            for held, stake in zip(capital, stakes, strict=True)
        ]
        mean = sum(won) / len(won)
        if mean > self.most:
            return tuple([held * self.most / mean for held in won])
        return tuple(won) if mean > 1.0 or max(won) > 1.0 else NOTHING


def evidence_of(capital: Capital) -> float:
    """The evidence that more than the allowed share is over: the mean capital of the bets."""
    return sum(capital) / len(capital)


class Moments(NamedTuple):
    """Sums over batches of (samples, marked samples): the number of batches, samples and marked
    ones, and their squares and products."""

    num: int
    n: int
    marked: int
    n_n: int
    n_marked: int
    marked_marked: int

    @classmethod
    def of(cls, batches: Series) -> "Moments":
        """The sums over `batches`."""
        ns, marks = [n for n, _ in batches], [marked for _, marked in batches]
        return cls(
            sum(map(bool, ns)),
            sum(ns),
            sum(marks),
            sum(map(mul, ns, ns)),
            sum(map(mul, ns, marks)),
            sum(map(mul, marks, marks)),
        )

    @classmethod
    def total(cls, parts: Iterable["Moments"]) -> "Moments":
        """The sums over all batches of `parts`."""
        return cls(*map(sum, zip(cls.of(()), *parts, strict=True)))


def design_effect(batches: Moments, interference_correlation: float = 0.0) -> float:
    """The variance of a share over that of independent samples, at least 1.

    With fewer than `MIN_BATCHES` a whole batch counts as one sample. `interference_correlation`:
    share of slow samples that follow a slow one.
    """
    if not batches.n:
        return 1.0
    rho = min(max(interference_correlation, 0.0), k.MAX_INTERFERENCE_CORRELATION)
    return max(1.0, _batch_effect(batches)) * (1 + rho) / (1 - rho)


def _batch_effect(batches: Moments) -> float:
    num, total = batches.num, batches.n
    if num < k.MIN_BATCHES:
        return total / num
    share = batches.marked / total
    if not 0 < share < 1:
        return 1.0
    squares = batches.marked_marked - 2 * share * batches.n_marked + share**2 * batches.n_n
    return squares * num / (num - 1) / (total * share * (1 - share))


@dataclass(frozen=True, slots=True)
class Headroom:
    """The test of a share of m/4 against m: is it shown, and how many clean samples are missing."""

    shown: bool
    samples_needed: int


def headroom(n: int, over: int, effect: float, allowed: float) -> Headroom:
    """Wald's sequential probability ratio test on counts divided by the design `effect`."""
    low = allowed * k.HEADROOM_SHARE
    per_clean = log((1 - low) / (1 - allowed))
    per_over = log(low / allowed)
    ratio = ((n - over) * per_clean + over * per_over) / effect
    missing = log(1 / k.HEADROOM_ALPHA) - ratio
    return Headroom(missing <= 0, max(0, ceil(missing / per_clean * effect)))
