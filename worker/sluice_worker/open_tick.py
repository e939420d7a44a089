"""The tick that is being filled, and the buckets of its sketches. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import msgspec

from .contract import SKETCH_GAMMA, Tick

Cause = Literal["cap", "kv", "prefill", "cold"]

SMALLEST_MS = 0.01
_LOG_GAMMA = math.log(SKETCH_GAMMA)


def bucket(value_ms: float) -> int:
    """The sketch bucket i with GAMMA**(i-1) < value_ms <= GAMMA**i."""
    return math.ceil(math.log(max(value_ms, SMALLEST_MS)) / _LOG_GAMMA)


def quantile_ms(sketch: Mapping[int, int], quantile: float) -> float:
    """The `quantile` (0 to 1) of the values of a sketch that has any, in ms, within 1 %."""
    rank, seen = quantile * (sum(sketch.values()) - 1), 0
    for index in sorted(sketch):
        seen += sketch[index]
        if seen > rank:
            break
    return 2 * SKETCH_GAMMA**index / (1 + SKETCH_GAMMA)


@dataclass(slots=True)
class Share:
    """Values counted against a target."""

    n: int = 0
    over: int = 0
    sketch: dict[int, int] = field(default_factory=dict)

    def add(self, value_ms: float, target_ms: float | None) -> bool:
        """Count a value; True if it is over."""
        self.n += 1
        self.note(value_ms)
        is_over = target_ms is not None and value_ms > target_ms
        self.over += is_over
        return is_over

    def note(self, value_ms: float) -> None:
        """A value that is counted already."""
        index = bucket(value_ms)
        self.sketch[index] = self.sketch.get(index, 0) + 1


@dataclass(slots=True)
class OpenFirstTokens(Share):
    """As `contract.FirstTokens`."""

    by: dict[Cause, int] = field(default_factory=dict)


@dataclass(slots=True)
class OpenGaps(Share):
    """As `contract.TokenGaps`."""

    over_after_over: int = 0
    n_at_cap: int = 0
    over_at_cap: int = 0


@dataclass(slots=True)
class OpenTick:
    """The tick that is being filled: the fields of `contract.Tick` that are counted until it ends.

    `msgspec` makes one of the other by their names.
    """

    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    good: int = 0
    smooth: int = 0
    ttft: OpenFirstTokens = field(default_factory=OpenFirstTokens)
    itl: OpenGaps = field(default_factory=OpenGaps)
    e2e: Share = field(default_factory=Share)
    steps: int = 0
    slow_steps: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    max_running: int = 0

    def closed(self, **at_end: object) -> Tick:
        """The tick as it ends; `at_end`: the other fields, which are known then."""
        counted = {each.name: getattr(self, each.name) for each in fields(self)}
        return msgspec.convert({**counted, **at_end}, Tick, from_attributes=True)
