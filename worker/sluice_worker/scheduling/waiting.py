"""What waiting requests wait for, as clocks. Pure.

Clocks run while the head of the queue cannot start: one for the cap, one for KV blocks, and where
there is an order one for steps that others fill.
Everyone behind it waits for the same thing, so a request's wait is a difference of two readings.
"""

from typing import Literal

from .sequence import Sequence

Lack = Literal["cap", "kv", "time"]


class WaitClocks:
    """Seconds during which the queue stood, by what its head lacked."""

    def __init__(self) -> None:
        self.blocked_by: Lack | None = None
        self._cap_s = 0.0
        self._kv_s = 0.0
        self._time_s = 0.0
        self._at: float | None = None

    @property
    def now(self) -> float:
        """The newest time that it was told."""
        return self._at or 0.0

    def advance(self, now: float) -> None:
        """Let the clock that runs go on to `now`."""
        elapsed = 0.0 if self._at is None else max(now - self._at, 0.0)
        self._at = now
        if self.blocked_by == "cap":
            self._cap_s += elapsed
        elif self.blocked_by == "kv":
            self._kv_s += elapsed
        elif self.blocked_by == "time":
            self._time_s += elapsed

    def enqueue(self, sequence: Sequence) -> None:
        """`sequence` begins to wait."""
        sequence.queued_at = (self._cap_s, self._kv_s, self._time_s)

    def dequeue(self, sequence: Sequence) -> None:
        """`sequence` starts: what it waited for is booked."""
        sequence.wait_cap_s += self._cap_s - sequence.queued_at[0]
        sequence.wait_kv_s += self._kv_s - sequence.queued_at[1]
        sequence.passed_s += self._time_s - sequence.queued_at[2]
