"""The tick that is being filled, and the buckets of its sketches. Pure."""

import math
from dataclasses import dataclass, field
from typing import Literal

from .contract import (
    SKETCH_GAMMA,
    Causes,
    FirstTokens,
    Requests,
    Tick,
    TokenGaps,
    Waiting,
)
from .wire import Snapshot

Cause = Literal["cap", "kv", "prefill", "cold"]

SMALLEST_MS = 0.01
_LOG_GAMMA = math.log(SKETCH_GAMMA)


def bucket(value_ms: float) -> int:
    """The sketch bucket i with GAMMA**(i-1) < value_ms <= GAMMA**i."""
    return math.ceil(math.log(max(value_ms, SMALLEST_MS)) / _LOG_GAMMA)


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
class OpenTick:
    """The tick that is being filled; the fields are those of `contract.Tick`."""

    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    good: int = 0
    smooth: int = 0
    ttft: Share = field(default_factory=Share)
    by: dict[Cause, int] = field(default_factory=dict)
    itl: Share = field(default_factory=Share)
    over_after_over: int = 0
    n_at_cap: int = 0
    over_at_cap: int = 0
    e2e: Share = field(default_factory=Share)
    steps: int = 0
    slow_steps: int = 0
    decodes: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    max_running: int = 0

    def closed(
        self,
        state: Snapshot,
        *,
        seq: int,
        t_s: float,
        epoch: int,
        boot_id: str,
        settled: bool,
        max_num_seqs: int,
        throttled_s: float,
    ) -> Tick:
        """The tick as it ends; `state`: the engine's then."""
        return Tick(
            seq=seq,
            t_s=t_s,
            epoch=epoch,
            boot_id=boot_id,
            settled=settled,
            max_num_seqs=max_num_seqs,
            arrivals=self.arrivals,
            refused=self.refused,
            finished=self.finished,
            good=self.good,
            smooth=self.smooth,
            ttft=FirstTokens(self.ttft.n, self.ttft.over, Causes(**self.by), self.ttft.sketch),
            itl=TokenGaps(
                n=self.itl.n,
                over=self.itl.over,
                over_after_over=self.over_after_over,
                n_at_cap=self.n_at_cap,
                over_at_cap=self.over_at_cap,
                sketch=self.itl.sketch,
            ),
            e2e=Requests(self.e2e.n, self.e2e.over, self.e2e.sketch),
            steps=self.steps,
            decodes=self.decodes,
            prefill_tokens=self.prefill_tokens,
            generated_tokens=self.generated_tokens,
            busy_s=self.busy_s,
            throttled_s=throttled_s,
            running=state.running,
            max_running=self.max_running,
            waiting=Waiting(cap=state.waiting_cap, kv=state.waiting_kv),
            slow_steps=self.slow_steps,
        )
