"""Running sequences: those with blocks, the paused among them, and preemption. Pure."""

from bisect import insort
from collections.abc import Set

from .kv_cache import KvCache
from .preemption import choose_victim
from .sequence import Sequence
from .step import Counters, StepWork
from .waiting import WaitingQueue

RECENT = 32
"""Ended sequences behind the mean time after the first token."""


class Running:
    """Sequences from their admission to their end; preempted ones go back to `queue`."""

    def __init__(self, queue: WaitingQueue, cache: KvCache, counters: Counters) -> None:
        self.sequences: list[Sequence] = []  # in order of arrival
        self.paused: Set[Sequence] = set()
        self.begun: list[str] = []  # in the step at hand
        self.decode_s = 0.0
        """Mean seconds from the first token to the last, of recently ended sequences."""
        self._num_ended = 0
        self._padding: list[Sequence] = []  # ended in a static batch; rows are still computed
        self._queue = queue
        self._cache = cache
        self._counters = counters

    @property
    def num_computing(self) -> int:
        """Sequences that have a place below the cap."""
        return len(self.sequences) - len(self.paused)

    def start(self, sequence: Sequence, matched: list[int]) -> None:
        """Admit a waiting sequence; blocks for all its tokens are available."""
        self._queue.take(sequence)
        num_cached = self._cache.start(sequence, matched)
        if not sequence.has_begun:
            sequence.has_begun = True
            self.begun.append(sequence.request_id)
            sequence.cached_tokens = num_cached
        insort(self.sequences, sequence, key=lambda other: other.order)

    def decodes(self) -> list[StepWork]:
        """Work for every sequence that lacks one token, oldest first. Preempts others if needed."""
        works: list[StepWork] = []
        for sequence in list(self.sequences):
            if sequence.num_uncomputed_tokens == 1 and self._extend(sequence):
                works.append(StepWork(sequence, sequence.num_computed_tokens, 1, samples=True))
        return [work for work in works if work.sequence.block_ids]  # not preempted since

    def _extend(self, sequence: Sequence) -> bool:
        """Room for its next token, by preempting the cheapest; False if it preempts itself."""
        if not sequence.block_ids:
            return False  # preempted for another one in this very step
        while not self._cache.extend(sequence):
            if self._padding:
                self._cache.free(self._padding.pop())
            elif self.preempt(self._victim()) is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        """Background sequences go first, the newest before others."""
        return self.newest_background or choose_victim(self.sequences, self._cache.pool)

    def others(self, decoding: Set[Sequence]) -> list[Sequence]:
        """Those that are neither among `decoding` nor background ones, oldest first."""
        return [s for s in self.sequences if s not in decoding and not s.is_background]

    @property
    def background(self) -> list[Sequence]:
        """Background sequences, oldest first."""
        return [sequence for sequence in self.sequences if sequence.is_background]

    @property
    def newest_background(self) -> Sequence | None:
        """The one that has the least to lose."""
        return next((s for s in reversed(self.sequences) if s.is_background), None)

    def padding(self) -> list[StepWork]:
        """Ended rows of a static batch: they repeat their last computed token."""
        return [
            StepWork(s, s.num_computed_tokens - 1, 1, samples=False, is_padding=True)
            for s in self._padding
        ]

    def pause(self, paused: Set[Sequence]) -> None:
        """Let admitted prefills whose places others took wait for the cap."""
        for sequence in paused - self.paused:
            self._queue.clocks.enqueue(sequence)
        for sequence in self.paused - paused:
            if sequence.block_ids:
                self._queue.clocks.dequeue(sequence)
        self.paused = paused

    def preempt(self, victim: Sequence) -> Sequence:
        """Take the victim's blocks for another sequence; returns the victim. That a background one
        gives way is no lack of memory."""
        self._counters.num_preemptions += not victim.is_background
        victim.num_preemptions += 1
        self.start_over(victim)
        return victim

    def start_over(self, sequence: Sequence) -> None:
        """Send it back to the queue; it will be computed again."""
        sequence.num_lost_tokens = sequence.num_computed_tokens
        self.remove(sequence)
        self._queue.put_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence and its blocks out."""
        self._leave(sequence)
        self._cache.free(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self._queue.give_back(sequence)

    def end(self, sequence: Sequence, *, is_padded: bool) -> None:
        """End it with its last token. `is_padded`: its row is computed until its batch ends."""
        if not sequence.is_background:
            took_s = self._queue.clocks.now - sequence.first_s
            self._num_ended += 1
            self.decode_s += (took_s - self.decode_s) / min(self._num_ended, RECENT)
        if is_padded:
            self._leave(sequence)
            self._padding.append(sequence)
        else:
            self.remove(sequence)

    def end_batch(self) -> None:
        """Free the rows of a static batch whose last sequence has ended."""
        while self._padding and not self.sequences:
            self._cache.free(self._padding.pop())

    def held_blocks(self) -> list[list[int]]:
        """The blocks of each sequence, rows of padding included."""
        return [sequence.block_ids for sequence in (*self.sequences, *self._padding)]
