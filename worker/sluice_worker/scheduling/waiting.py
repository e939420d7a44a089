"""The queue: its order, and the resource that its head lacks. Pure.

A clock runs while the head of the queue cannot start. There is one for the cap, one for KV blocks,
and one for steps that the order gives to others. All requests behind the head wait for the same, so
a request's wait is the difference of two readings.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from sluice_core.ordering import Pace, Terms
from sluice_core.shares import Shares

from .sequence import Sequence

Lack = Literal["cap", "kv", "time"]


class WaitClocks:
    """Seconds during which the queue stood, by what its head lacked."""

    def __init__(self) -> None:
        self.blocked_by: Lack | None = None
        self.now = 0.0
        self._seconds: dict[Lack, float] = {"cap": 0.0, "kv": 0.0, "time": 0.0}

    def advance(self, now: float) -> None:
        """Advance the running clock to `now`."""
        if self.blocked_by is not None:
            self._seconds[self.blocked_by] += max(now - self.now, 0.0)
        self.now = now

    def enqueue(self, sequence: Sequence) -> None:
        """Let `sequence` wait."""
        sequence.queued_at = tuple(self._seconds.values())

    def dequeue(self, sequence: Sequence) -> None:
        """Let `sequence` start, and book its wait by cause."""
        both = zip(self._seconds.values(), sequence.queued_at, strict=True)
        cap_s, kv_s, time_s = (now - before for now, before in both)
        sequence.wait_cap_s += cap_s
        sequence.wait_kv_s += kv_s
        sequence.passed_s += time_s


class WaitingQueue:
    """Sequences without blocks, and the line of all that have no first token yet.

    Other waiting sequences were preempted; they resume before the line, by arrival. `terms_of`: a
    sequence's terms for the order. Each client has its share of the places. Background sequences
    wait beside all this, by arrival, and hold no share.
    """

    def __init__(self, terms_of: Callable[[Sequence], Terms]) -> None:
        self.waiting: deque[Sequence] = deque()  # a preempted sequence takes its old place again
        self.background: list[Sequence] = []
        self.line = Shares(terms_of, lambda sequence: sequence.request.client)
        self.clocks = WaitClocks()
        self._resumed: list[Sequence] = []
        self._newest: Sequence | None = None  # the next one may have the same prompt
        self._num_added = 0

    def add(self, sequence: Sequence, now: float) -> None:
        """Put a newcomer behind all others."""
        self.clocks.advance(now)
        self.clocks.enqueue(sequence)
        sequence.order, sequence.queued_s = self._num_added, now
        self._num_added += 1
        if sequence.is_background:
            self.background.append(sequence)
            return
        self.waiting.append(sequence)
        is_another = sequence.request.is_another
        self.line.add(sequence, self._newest if is_another else None)
        if not is_another:
            self._newest = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all that came later."""
        if sequence.is_background:
            insort(self.background, sequence, key=lambda other: other.order)
            return
        self.clocks.enqueue(sequence)
        before = sum(1 for other in self.waiting if other.order < sequence.order)
        self.waiting.insert(before, sequence)
        if sequence not in self.line:
            self._resumed.append(sequence)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that now has blocks."""
        if sequence.is_background:
            self.background.remove(sequence)
            return
        self.waiting.remove(sequence)
        if sequence in self._resumed:
            self._resumed.remove(sequence)
        self.clocks.dequeue(sequence)
        self.line.hold(sequence, self.clocks.now)

    def give_back(self, sequence: Sequence) -> None:
        """Free the place that a sequence has lost or left."""
        self.line.leave(sequence, self.clocks.now)

    def leave_line(self, sequence: Sequence) -> None:
        """Take it out of the line: it has its first token, or its client left."""
        self.line.remove(sequence)
        if self._newest is sequence:
            self._newest = None

    def drop(self, sequence: Sequence) -> None:
        """Forget it, whether it waits or runs."""
        self.leave_line(sequence)
        if sequence in self.background:
            self.background.remove(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if sequence in self._resumed:
            self._resumed.remove(sequence)

    def by_arrival(self) -> Iterator[Sequence]:
        """Waiting sequences, each of which is taken before the next is asked for: those of several
        clients in turn."""
        if self.line.num_waiting_clients > 1:
            every = self.candidates((), self.clocks.now, Pace(0.0))
            yield from (sequence for sequence in every if not sequence.block_ids)
        while self.waiting:
            yield self.waiting[0]

    def candidates(self, running: Iterable[Sequence], now: float, pace: Pace) -> Iterator[Sequence]:
        """First sequences that had a first token, by arrival; then the line."""
        resumed = [*self._resumed, *(s for s in running if s not in self.line)]
        yield from sorted(resumed, key=lambda sequence: sequence.order)
        yield from self.line.ordered(now, pace)

    def rank(self, sequence: Sequence) -> tuple[bool, int, bool, float, float]:
        """A key that sorts sequences as `candidates` does, but without turns of the late."""
        if sequence not in self.line:
            return False, 0, False, 0, sequence.order
        return True, *self.line.rank(sequence)
