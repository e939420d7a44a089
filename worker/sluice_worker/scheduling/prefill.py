"""The choice of prompts to compute next, and the admission of their sequences. Pure.

A step admits only sequences within its budget: others would hold blocks for nothing.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from heapq import nlargest

from msgspec import structs
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.port import EngineLimits
from sluice_core.work import QUIET_S

from .division import ChunkLaw, shape_of
from .kv_cache import KvCache
from .running import Running
from .sequence import Sequence
from .step import StepWork
from .waiting import WaitingQueue

STEPS, LEAST_STEPS = 512, 64
"""Recent steps whose 99th percentile the background does not exceed, each taken without it; the
fewest that tell that."""


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
                if not self.admit(sequence, ()) or len(running) >= places:
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
                    if has_no_time or not self.admit(sequence, chosen):
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

    def admit(self, sequence: Sequence, chosen: Seq[Sequence]) -> bool:
        """Start a waiting sequence; False if too few blocks are left.

        Background sequences give their blocks to any other. One in time may also take those of a
        late one that is not among `chosen`.
        """
        pool, (known, enough) = self._cache.pool, self._lacking
        victim = self._victim(sequence, chosen)
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
            victim = self._victim(sequence, chosen)
        self._running.start(sequence, matched)
        return True

    def _victim(self, sequence: Sequence, chosen: Seq[Sequence]) -> Sequence | None:
        if sequence.is_background:
            return None
        return self._running.newest_background or self._late_prefill(sequence, chosen)

    def _late_prefill(self, sequence: Sequence, chosen: Seq[Sequence]) -> Sequence | None:
        """The latest unfinished prefill that is late, if `sequence` is not. Prefills that end in
        this step are left out."""
        line, running = self._queue.line, self._running.sequences
        if sequence not in line or line.is_late(sequence):
            return None
        others = (s for s in reversed(running[1:]) if s in line)
        late = (s for s in others if s not in chosen and line.is_late(s))
        return next((s for s in late if s.num_uncomputed_tokens > 1), None)


class BackgroundPlaces:
    """Background sequences have the places that others leave: of the cap, and of all that the
    memory holds (`ceiling`) once nobody else has come for `QUIET_S`."""

    def __init__(
        self,
        queue: WaitingQueue,
        running: Running,
        cache: KvCache,
        admission: PromptAdmission,
        ceiling: int,
    ) -> None:
        self._queue, self._running, self._cache = queue, running, cache
        self._admission, self._ceiling = admission, ceiling
        self._num, self._is_quiet = 0, True
        self._steps_ms = deque[float](maxlen=STEPS)
        self._others_s = -QUIET_S

    def make_room(self, limits: EngineLimits, now: float) -> None:
        """Send those back that have places which others need now, the newest first."""
        background = self._running.background
        num_others = len(self._running.sequences) - len(background) + len(self._queue.waiting)
        if num_others:
            self._others_s = now
        self._is_quiet = now - self._others_s >= QUIET_S
        self._num = max((self._ceiling if self._is_quiet else limits.cap) - num_others, 0)
        for sequence in background[self._num :]:
            self._running.preempt(sequence)

    def fitting(self, law: ChunkLaw, decodes: list[StepWork]) -> list[StepWork]:
        """Those of `decodes` that go into a step. Beside others the newest of the background wait,
        if it would take longer than the longest steps without them; but the oldest goes."""
        own = [work for work in decodes if work.sequence.is_background]
        if not own or len(own) == len(decodes) or (most_ms := self._longest_ms()) is None:
            return decodes
        waiting = set[Sequence]()
        num, kv_tokens = shape_of(decodes)
        for work in reversed(own[1:]):
            step_ms = law.step_ms(num, kv_tokens, 0)
            if step_ms is None or step_ms <= most_ms:
                break
            num, kv_tokens = num - 1, kv_tokens - work.start - 1
            waiting.add(work.sequence)
        return [work for work in decodes if work.sequence not in waiting]

    def note(self, law: ChunkLaw, works: Iterable[StepWork]) -> None:
        """Note how long a step would be without the background, if others decode in it."""
        others = [work for work in works if not work.sequence.is_background]
        decodes = [work for work in others if work.is_decode]
        if decodes:
            num_others = sum(work.num_tokens for work in others) - len(decodes)
            step_ms = law.step_ms(*shape_of(decodes), num_others)
            if step_ms is not None:
                self._steps_ms.append(step_ms)

    @property
    def counts(self) -> tuple[int, int]:
        """How many run, and how many wait."""
        return len(self._running.background), len(self._queue.background)

    @property
    def has_prompts(self) -> bool:
        """True if one has a prompt to compute and may do so."""
        background = self._running.background
        may_begin = len(background) < self._num and self._queue.background
        return bool(may_begin) or any(s.num_uncomputed_tokens > 1 for s in background)

    def chunks(
        self, limits: EngineLimits, law: ChunkLaw, works: Seq[StepWork], num_scored: int
    ) -> list[StepWork]:
        """Their part of a step behind `works`, oldest first. It begins as many new ones as places,
        blocks and budget allow."""
        if not self.has_prompts:
            return []
        budget = self._budget(limits, law, works)
        background = self._running.background
        prompts = [s for s in background if s.num_uncomputed_tokens > 1]
        left = budget - sum(s.num_uncomputed_tokens for s in prompts)
        num_free, waiting = self._num - len(background), self._queue.background
        while num_free > 0 and left > 0 and waiting:
            sequence = waiting[0]
            if not self._admission.admit(sequence, ()):
                break
            prompts.append(sequence)
            left -= sequence.num_uncomputed_tokens
            num_free -= 1
        return list(chunks(prompts, budget, num_scored, self._cache))

    def _budget(self, limits: EngineLimits, law: ChunkLaw, works: Seq[StepWork]) -> int:
        """Prompt tokens behind `works`. They keep the step within the gap target, and within what
        one of a hundred steps lasts without them; also where nobody else decodes, as whoever comes
        next waits for its end."""
        left = limits.max_num_batched_tokens - sum(work.num_tokens for work in works)
        if self._is_quiet:
            return left
        decodes = [work for work in works if work.is_decode]
        before = sum(work.num_tokens for work in works) - len(decodes)
        most_ms, room = self._longest_ms(), 0
        if most_ms is not None:
            within = min(limits.itl_ms or most_ms, most_ms)
            limits = structs.replace(limits, itl_ms=within)
            room = law.chunk_limit(limits, *shape_of(decodes)) - before
        if all(work.sequence.is_background for work in works):
            room = max(room, MIN_CHUNK_TOKENS)
        return min(left, room)

    def _longest_ms(self) -> float | None:
        """The 99th percentile of others' recent steps; None while they are too few."""
        if len(self._steps_ms) < LEAST_STEPS:
            return None
        return nlargest(1 + len(self._steps_ms) // 100, self._steps_ms)[-1]


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
