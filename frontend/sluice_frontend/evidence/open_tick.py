"""The tick that is being filled. Pure."""

from dataclasses import dataclass, field, fields
from typing import Literal

import msgspec
from sluice_core.contract import Tick
from sluice_core.sketch import bucket_of

Cause = Literal["cap", "kv", "prefill", "outside"]


@dataclass(slots=True)
class Tally:
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
        """Add a value that is already counted to the sketch."""
        index = bucket_of(value_ms)
        self.sketch[index] = self.sketch.get(index, 0) + 1


@dataclass(slots=True)
class OpenFirstTokens(Tally):
    """As `contract.FirstTokens`."""

    by: dict[Cause, int] = field(default_factory=dict)

    def miss(self, cause: Cause) -> None:
        """Count a request that is over, or never came."""
        self.n += 1
        self.over += 1
        self.by[cause] = self.by.get(cause, 0) + 1


@dataclass(slots=True)
class OpenGaps(Tally):
    """As `contract.TokenGaps`."""

    over_after_over: int = 0
    n_at_cap: int = 0
    over_at_cap: int = 0
    n_in_prefill: int = 0
    over_in_prefill: int = 0


@dataclass(slots=True)
class OpenTick:
    """The fields of `contract.Tick` that are counted until it ends, under the same names."""

    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    good: int = 0
    smooth: int = 0
    ttft: OpenFirstTokens = field(default_factory=OpenFirstTokens)
    itl: OpenGaps = field(default_factory=OpenGaps)
    e2e: Tally = field(default_factory=Tally)
    steps: int = 0
    slow_steps: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    max_running: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    def closed(self, **at_end: object) -> Tick:
        """The tick with its other fields, `at_end`, which are known when it ends."""
        counted = {each.name: getattr(self, each.name) for each in fields(self)}
        return msgspec.convert({**counted, **at_end}, Tick, from_attributes=True)
