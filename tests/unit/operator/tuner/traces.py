"""Arrivals for the world."""

from collections.abc import Iterator, Sequence
from random import Random

from sluice.simulate.trace import Request


def poisson(
    phases: Sequence[tuple[float, float]], *, prompt: int = 64, output: int = 64, seed: int = 1
) -> Iterator[Request]:
    """Poisson arrivals in `phases` of (seconds, arrivals per second), with geometric lengths."""
    random, start_s = Random(seed), 0.0
    for length_s, per_s in phases:
        now = start_s
        start_s += length_s
        while per_s:
            now += random.expovariate(per_s)
            if now >= start_s:
                break
            yield Request(now, prompt, 1 + min(8 * output, int(random.expovariate(1 / output))))


def bursts(
    size: int, every_s: float, waves: int, *, prompt: int = 64, output: int = 64
) -> Iterator[Request]:
    """`waves` bursts of `size` at once, one every `every_s`."""
    for wave in range(waves):
        for _ in range(size):
            yield Request(5.0 + wave * every_s, prompt, output)
