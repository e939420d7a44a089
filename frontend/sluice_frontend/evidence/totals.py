"""What closed ticks add up to since the start, for counters of Prometheus. Pure."""

from collections import Counter
from dataclasses import dataclass, field

from msgspec.structs import asdict
from sluice_core.contract import TARGETS, Tick


@dataclass(slots=True)
class Totals:
    """`values`: those that a target judges, and `misses`: those of them over it, by target.
    `causes`: late first tokens, by cause."""

    values: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    generated_tokens: int = 0
    busy_s: float = 0.0

    def add(self, tick: Tick) -> None:
        """Count a tick once."""
        values = tick.ttft.n, tick.itl.n, tick.e2e.n
        self.values.update(dict(zip(TARGETS, values, strict=True)))
        misses = tick.ttft.over, tick.itl.over, tick.e2e.over
        self.misses.update(dict(zip(TARGETS, misses, strict=True)))
        self.causes.update(asdict(tick.ttft.by))
        self.generated_tokens += tick.generated_tokens
        self.busy_s += tick.busy_s
