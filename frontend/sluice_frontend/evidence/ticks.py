"""Closed ticks, each under the configuration that was in force. Pure.

Times are CLOCK_MONOTONIC seconds (`now_s`) and Unix time (`wall_s`).
"""

from collections import deque
from dataclasses import dataclass

from sluice_core.contract import TICK_RING, TICK_SECONDS, Slo, Tick, Waiting
from sluice_core.port import EngineLoad

from .open_tick import OpenTick
from .totals import Totals


@dataclass(frozen=True, slots=True)
class _Settling:
    """A change of the cap that has not taken effect yet."""

    before: int
    after: int

    def is_over(self, num_running: int) -> bool:
        """True once a lowered cap has drained, or one was admitted above the old cap."""
        if self.after < self.before:
            return num_running <= self.after
        return self.after == self.before or num_running > self.before


class Ticks:
    """The open tick, into which others count, and the ring of closed ones.

    `epoch`, `cap`, `slo`: in force. `next_seq`: of the open tick. `totals`: of all closed ones.
    """

    def __init__(self, boot_id: str, now_s: float) -> None:
        self.boot_id = boot_id
        self.epoch = 0
        self.cap = 1
        self.slo = Slo()
        self.next_seq = 1
        self.open = OpenTick()
        self.totals = Totals()
        self.start_s = now_s
        self._closed: deque[Tick] = deque(maxlen=TICK_RING)
        self._throttled_s: float | None = None  # the first reading is where we begin
        self._settling: _Settling | None = None
        self._is_mixed = True
        self._is_started = False

    # -- what is in force

    def start(self, epoch: int, cap: int, slo: Slo) -> None:
        """Put this in force, from the engine's first step on."""
        self.epoch, self.cap, self.slo = epoch, cap, slo
        self._is_started = True

    def configure(self, epoch: int, cap: int, slo: Slo) -> None:
        """Put a change in force. Ticks are not settled until it has taken effect."""
        if (epoch, cap, slo) == (self.epoch, self.cap, self.slo):
            return
        self._is_mixed = True
        self._settling = _Settling(self._cap_before(cap), cap)
        self.epoch, self.cap, self.slo = epoch, cap, slo

    def _cap_before(self, cap: int) -> int:
        """The cap before a change to `cap`. A pending change keeps its own if it is
        repeated, or still drains."""
        pending = self._settling
        if pending and (cap == pending.after or pending.after < pending.before):
            return pending.before
        return self.cap

    def settle(self, num_running: int) -> None:
        if self._settling is not None and self._settling.is_over(num_running):
            self._settling = None

    # -- ticks

    @property
    def end_s(self) -> float:
        return self.start_s + TICK_SECONDS

    def is_due(self, now_s: float) -> bool:
        return now_s - self.start_s >= TICK_SECONDS

    def close(self, wall_s: float, throttled_s: float, state: EngineLoad) -> None:
        """Close the open tick, which ended at `wall_s`. `throttled_s`: the cgroup's total."""
        # An engine without work sends no steps; a lowered cap holds there too.
        if self._settling is not None and self._settling.after <= self._settling.before:
            self.settle(state.running)
        before_s = throttled_s if self._throttled_s is None else self._throttled_s
        closed = self.open.closed(
            seq=self.next_seq,
            t_s=max(0.0, wall_s),
            epoch=self.epoch,
            boot_id=self.boot_id,
            settled=not self._is_mixed and self._settling is None,
            cap=self.cap,
            throttled_s=max(0.0, throttled_s - before_s),
            running=state.running,
            waiting=Waiting(state.waiting_cap, state.waiting_kv),
        )
        self.start_s = self.end_s
        self.append(closed)
        self._throttled_s = throttled_s
        self.open = OpenTick()
        self._is_mixed = self._settling is not None or not self._is_started

    def append(self, closed: Tick) -> None:
        """Keep a closed tick, and as many older ones as the ring holds."""
        self._closed.append(closed)
        self.totals.add(closed)
        self.next_seq += 1

    def after(self, seq: int) -> list[Tick]:
        """All closed ticks with a higher `seq`, oldest first."""
        return [tick for tick in self._closed if tick.seq > seq]

    def newest(self, num: int) -> list[Tick]:
        """The last `num` closed ticks, oldest first."""
        return list(self._closed)[-num:]
