"""The choice of prompts to compute next, and the admission of their sequences. Pure.

A step admits only sequences within its budget: others would hold blocks for nothing.
"""

from collections.abc import Hashable, Iterable, Iterator, Set
from collections.abc import Sequence as Seq

from .kv_cache import KvCache
from .running import Running
from .sequence import Sequence
from .step import StepWork
from .waiting import WaitingQueue


class PromptAdmission:
    """Gives waiting sequences the blocks of all their tokens while places and blocks last."""

    def __init__(self, queue: WaitingQueue, running: Running, cache: KvCache) -> None:
        self._queue = queue
        self._running = running
        self._cache = cache
        # The sequence that lacked blocks at the last check, and the `version` at which to recheck.
        self._lacking: tuple[Sequence | None, int] = (None, 0)

    def by_arrival(self, places: int) -> None:
        """First come, first served, while fewer than `places` run."""
        running = self._running.sequences
        if len(running) < places:
            for sequence in self._queue.by_arrival():
                if not self._admit(sequence, ()) or len(running) >= places:
                    return

    def by_order(
        self, candidates: Iterable[Sequence], others: Seq[Sequence], places: int, budget: int
    ) -> tuple[list[Sequence], bool]:
        """Sequences that a step may serve, in order, and True if time ended the choice.

        `candidates`: in the order of the line. `others`: running ones that do not decode.
        `places`: below the cap beside decodes. `budget`: tokens of the step.
        """
        paused, line = self._running.paused, self._queue.line
        num_free = places - sum(s not in paused for s in others)
        chosen: list[Sequence] = []
        takes_place = has_no_time = False
        for sequence in candidates:
            if not sequence.block_ids or sequence in paused:
                is_ahead = sequence in line and len(chosen) < places
                if num_free <= 0 and not is_ahead:
                    break
                if not sequence.block_ids:
                    has_no_time = budget <= 0 and sequence in line
                    if has_no_time or not self._admit(sequence, chosen):
                        break
                takes_place = takes_place or num_free <= 0
                num_free -= 1
            budget -= sequence.num_uncomputed_tokens
            chosen.append(sequence)
        for sequence in sorted(set(others).difference(chosen), key=self._queue.rank):
            is_held = sequence in paused and len(chosen) >= places
            if sequence.block_ids and not is_held:
                chosen.append(sequence)
        return chosen[:places] if takes_place else chosen, has_no_time

    def _admit(self, sequence: Sequence, chosen: Seq[Sequence]) -> bool:
        """Start a waiting sequence; False if too few blocks are left.

        A sequence in time may take the blocks of a late one that is not among `chosen`.
        """
        pool, (known, enough) = self._cache.pool, self._lacking
        victim = self._late_prefill(sequence, chosen)
        is_as_before = sequence is known and pool.version < enough
        if is_as_before and self._running.sequences and victim is None:
            return False  # matching a long prompt takes milliseconds
        sequence.token_ids = sequence.token_ids or sequence.request.prompt_token_ids
        while True:
            matched = self._cache.find(sequence)
            # A margin for running ones: else the next step may preempt the one admitted here.
            margin = max(1, pool.num_total // 100) if self._running.sequences else 0
            lacking = self._cache.num_lacking(sequence, matched, margin)
            self._lacking = (sequence, pool.version + lacking)
            if lacking <= 0:
                break
            if victim is None:
                return False
            self._running.preempt(victim)
            victim = self._late_prefill(sequence, chosen)
        self._running.start(sequence, matched)
        return True

    def _late_prefill(self, sequence: Sequence, chosen: Seq[Sequence]) -> Sequence | None:
        """The latest unfinished prefill that is late, if `sequence` is not. Prefills that end in
        this step are left out."""
        line, running = self._queue.line, self._running.sequences
        if sequence not in line or line.is_late(sequence):
            return None
        others = (s for s in reversed(running[1:]) if s in line)
        late = (s for s in others if s not in chosen and line.is_late(s))
        return next((s for s in late if s.num_uncomputed_tokens > 1), None)


def chunks(
    prefills: Seq[Sequence],
    budget: int,
    num_scored: int,
    cache: KvCache,
    held: Set[Hashable] = frozenset(),
) -> Iterator[StepWork]:
    """Prefill of `budget` tokens, in the order of `prefills`.

    The first computes a prefix that several lack; the others find it in the next step. Bursts often
    share one system prompt. `num_scored`: the most prompt tokens with logits. `held`: those that
    stop one token before their end, unless others can then find their prefix.
    """
    ending: list[Sequence] = []
    for sequence in prefills:
        if budget <= 0:
            return
        cache.extend_from_cache(sequence)
        if any(cache.will_find(sequence, other) for other in ending):
            continue
        count = min(sequence.num_uncomputed_tokens, budget)
        if sequence in held and count == sequence.num_uncomputed_tokens:
            others = (other for other in prefills if other is not sequence)
            count -= not any(cache.will_find(other, sequence) for other in others)
        if not count:
            continue
        if sequence.needs_prompt_scores:
            count = min(count, num_scored)
            num_scored -= count
            if not count:
                continue
        budget -= count
        samples = count == sequence.num_uncomputed_tokens
        if samples:
            ending.append(sequence)
        yield StepWork(sequence, sequence.num_computed_tokens, count, samples)
