"""The two tests of the evidence: is a target breached, and is there headroom. Otherwise: hold."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log

from . import constants as k

Series = Sequence[tuple[int, int]]
"""(samples, samples over target) of each tick, oldest first."""


@dataclass(frozen=True, slots=True)
class Bets:
    """A betting CUSUM (e-detector: Shin, Ramdas, Rinaldo 2023) on the ticks' fractions, so any
    dependence inside a tick is allowed. A tick smaller than `mean_size` bets less. Clipped at
    `most`, so that it can be forgotten again."""

    allowed: float
    mean_size: float
    most: float
    stakes: tuple[float, ...]

    @classmethod
    def on(cls, series: Series, allowed: float, threshold: float) -> "Bets":
        """The bets for the ticks of `series`."""
        sizes = [n for n, _ in series if n]
        mean_size = sum(sizes) / len(sizes) if sizes else 1.0
        stakes = tuple(bet * 0.01 / allowed for bet in k.BETS)
        return cls(allowed, mean_size, k.EVIDENCE_KEPT * threshold, stakes)

    def wins(self, series: Series) -> list[float]:
        """What each tick with samples pays for each unit that is staked on it."""
        size, allowed = self.mean_size, self.allowed
        return [(n / size if n < size else 1.0) * (over / n - allowed) for n, over in series if n]

    def after(self, capital: Sequence[float], win: float) -> tuple[Sequence[float], float]:
        """The capital of each bet after a tick, and their mean; what was lost before the tick is
        made up for."""
        capital = [
            (held if held > 1.0 else 1.0) * (1.0 + stake * win)
            for held, stake in zip(capital, self.stakes, strict=True)
        ]
        mean = sum(capital) / len(capital)
        if mean <= self.most:
            return capital, mean
        return [held * self.most / mean for held in capital], self.most

    def path(self, wins: Iterable[float]) -> Iterator[float]:
        """The mean capital after each of `wins`."""
        nothing: Sequence[float] = (1.0,) * len(self.stakes)
        capital, mean = nothing, 1.0
        for win in wins:
            if win > 0.0 or capital is not nothing:
                capital, mean = self.after(capital, win)
                if mean <= 1.0 and max(capital) <= 1.0:
                    capital, mean = nothing, 1.0
            yield mean


def is_breach(series: Series, allowed: float, threshold: float) -> bool:
    """Whether the evidence after the last tick reaches `threshold`, which is over 1.

    A bet's capital is a product of 1 + stake * win since some tick, so at most exp(stake * sum of
    the wins since then). Where not even the largest such sum is enough, the bets need not be made;
    where it is 0, no bet has gained anything, and they start anew.
    """
    bets = Bets.on(series, allowed, threshold)
    wins = bets.wins(series)
    total, start = 0.0, 0
    for index, win in enumerate(wins, 1):
        total += win
        if total <= 0.0:
            total, start = 0.0, index
    if max(bets.stakes) * total < k.BOUND_MARGIN * log(threshold):
        return False
    return _last(bets.path(wins[start:])) >= threshold


def breach_evidence(series: Series, allowed: float, threshold: float) -> float:
    """Evidence after the last tick that more than `allowed` is over: a breach from `threshold`."""
    return _last(breach_path(series, allowed, threshold))


def _last(path: Iterator[float]) -> float:
    evidence = 1.0
    for evidence in path:  # noqa: B007 - the last one
        pass
    return evidence


def breach_path(series: Series, allowed: float, threshold: float) -> Iterator[float]:
    """The evidence after each tick that has samples: the mean capital of the bets, and 1 where none
    has gained anything, as the next tick starts from there."""
    bets = Bets.on(series, allowed, threshold)
    return bets.path(bets.wins(series))


def design_effect(batches: Series, spell_correlation: float = 0.0) -> float:
    """By how much the variance of a share exceeds that of independent samples, at least 1.

    `batches`: (samples, marked samples) of each batch. With fewer than `MIN_BATCHES` a whole batch
    counts as one sample. `spell_correlation`: share of slow samples that follow a slow one.
    """
    batches = [batch for batch in batches if batch[0]]
    total = sum([n for n, _ in batches])
    if not total:
        return 1.0
    rho = min(max(spell_correlation, 0.0), k.MAX_SPELL_CORRELATION)
    return max(1.0, _batch_effect(batches, total)) * (1 + rho) / (1 - rho)


def _batch_effect(batches: Series, total: int) -> float:
    num = len(batches)
    if num < k.MIN_BATCHES:
        return total / num
    share = sum([marked for _, marked in batches]) / total
    if not 0 < share < 1:
        return 1.0
    spread = sum([(marked - n * share) ** 2 for n, marked in batches]) * num / (num - 1)
    return spread / (total * share * (1 - share))


@dataclass(frozen=True, slots=True)
class Headroom:
    """Whether a share of m/4 has been shown against m, and how many clean samples are missing."""

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
