"""Which runs count, and what may be claimed from them. Pure.

A round runs all peers of a trace one after another. A run counts if it had no error and the
register peak before and after it was near its maximum. A ratio is of two runs of one round that
both count; if over half of the rounds do not, none is claimed.
"""

import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

NEAR = 0.9


class Run(Struct, frozen=True):
    """One peer, one repeat of a trace. Latencies are None where a peer gives only whole results."""

    peer: str
    repeat: int
    wall_s: float
    cpu_s: float
    engine_cpu_s: float
    others_cpu_s: float
    """CPU-seconds that the other peers took meanwhile: idle ones must take none."""
    peak_before: float
    peak_after: float
    prompt_tokens: int
    output_tokens: int
    flops: float
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    good_share: float | None = None
    smooth_share: float | None = None
    """Of the requests, those within the trace's targets; see `sluice.measure.targets`."""
    error: str = ""

    def counts(self, best_gflops: float) -> bool:
        """Whether the machine gave its speed throughout, as far as both probes can tell."""
        return not self.error and min(self.peak_before, self.peak_after) >= NEAR * best_gflops

    @property
    def peak_fraction(self) -> float:
        """Of the register peak around it, the part that went into the model's products."""
        peak = 1e9 * (self.peak_before + self.peak_after) / 2
        return self.flops / self.wall_s / peak


Value = Callable[[Run], float | None]


class Spread(Struct, frozen=True):
    """Median, least and most of so many values."""

    median: float
    least: float
    most: float
    count: int


class Claim(Struct, frozen=True):
    """A ratio of paired runs, or why there is none."""

    spread: Spread | None
    why_not: str = ""


def spread(values: Sequence[float]) -> Spread | None:
    """None without values."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values), len(values))


def counted(runs: Sequence[Run], peer: str, best_gflops: float) -> list[Run]:
    """The peer's runs that count."""
    return [run for run in runs if run.peer == peer and run.counts(best_gflops)]


def needs_more(
    runs: Sequence[Run], peers: Sequence[str], best_gflops: float, repeats: int
) -> list[str]:
    """The peers that count in fewer rounds than asked together with some other one."""
    rounds = {peer: {run.repeat for run in counted(runs, peer, best_gflops)} for peer in peers}
    return [
        peer
        for peer in peers
        if min(len(rounds[peer] & other) for other in rounds.values()) < repeats
    ]


def order(peers: Sequence[str], repeat: int) -> list[str]:
    """Each round begins with another peer, so that none is always behind the same one."""
    start = repeat % len(peers) if peers else 0
    return [*peers[start:], *peers[:start]]


def ratio(
    runs: Sequence[Run],
    peers: tuple[str, str],
    value: Value,
    best_gflops: float,
    at_least: int = 3,
) -> Claim:
    """value(first) / value(second), paired by round; claimed from `at_least` pairs on."""
    of = {(run.peer, run.repeat): run for run in runs}
    rounds = [repeat for repeat in {run.repeat: None for run in runs} if _both(of, peers, repeat)]
    if not rounds:
        return Claim(None, "not measured")
    found = []
    for repeat in rounds:
        pair = [of[peer, repeat] for peer in peers]
        if all(run.counts(best_gflops) for run in pair):
            upper, lower = (value(run) for run in pair)
            if upper is not None and lower:
                found.append(upper / lower)
    lost = len(rounds) - len(found)
    if 2 * lost > len(rounds):
        return Claim(None, f"{lost} of {len(rounds)} rounds discarded")
    if len(found) < at_least:
        return Claim(None, f"only {len(found)} rounds")
    return Claim(spread(found))


def _both(of: dict[tuple[str, int], Run], peers: tuple[str, str], repeat: int) -> bool:
    return all((peer, repeat) in of for peer in peers)
