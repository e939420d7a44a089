"""Continuous batching: one token budget per step, no phases. Pure.

Admission gives a sequence the blocks of all its tokens and a place below the cap; from then on it
is running. Each step first serves sequences that lack one token (decodes). The rest of the budget
goes to chunks of prefill, sized for the inter-token target. Sequences without a first token stand
in a line (`ordering`); its order decides which are admitted and computed. A place below the cap is
for computing: an unfinished prefill that loses its place keeps its blocks, and waits for the cap.
A request waits for the cap or for KV blocks; all other time is prefill time.
A step without prefill may verify drafts (`drafts`). In static mode (`static_batch`) the cap is the
size of a batch, which stays full until its longest sequence has ended.
Background sequences have what is left of places, blocks and budget, and give it back at once.
"""

from collections.abc import Hashable, Iterable, Iterator, Set
from collections.abc import Sequence as Seq
from itertools import chain, islice
from math import inf

import numpy as np
from sluice_core.law import NOBODY, Division
from sluice_core.model.sizing import blocks_for
from sluice_core.ordering import Pace, Terms
from sluice_core.port import EngineLimits
from sluice_core.window import over_window
from sluice_core.wire import Submit

from ..base.config import NgramSpeculation
from .blocks import BlockPool
from .division import ChunkLaw, load_of, room_for_drafts, shape_of
from .drafts import Drafts
from .kv_cache import KvCache
from .prefill import BackgroundPlaces, PromptAdmission, chunks
from .running import Running
from .sequence import Sequence
from .speculation import Growth, few_decodes
from .static_batch import StaticBatching
from .step import BookedToken, Counters, Step, StepWork
from .waiting import Lack, WaitingQueue

SCORED_LOGITS = 1 << 22
"""Default limit of scored prompt logits in a step beside decodes. Each token takes the whole head
and a pass over the vocabulary (152k: 3 ms on a core)."""
ALONE_TIMES = 16
"""Factor of that limit without decodes: newcomers, aborts and health probes still wait for it."""


class Scheduler:
    """Waiting and running sequences over one block pool. `now` is an argument everywhere."""

    def __init__(
        self,
        pool: BlockPool,
        limits: EngineLimits,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        static: StaticBatching | None = None,
        speculation: NgramSpeculation | None = None,
        num_ahead: int = 0,
        scored_logits: int = SCORED_LOGITS,
        ceiling: int = 0,
    ) -> None:
        """`num_ahead`: as in `KvCache`. `scored_logits`: of prompts, in a step beside decodes.
        `ceiling`: sequences for which there is memory; 0: as many as the cap."""
        self.pool = pool
        self.limits = limits
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.static = static
        self.counters = Counters()
        most_drafts = speculation.num_speculative_tokens if speculation is not None else 0
        self.cache = KvCache(pool, self.counters, num_ahead=num_ahead, most_drafts=most_drafts)
        self.drafts = Drafts(speculation, self.cache, self.counters) if speculation else None
        self.price_s = 0.0  # of a prefill token, where there is an order
        self._scored_at_once = max(scored_logits // vocab_size, 1)
        self._queue = WaitingQueue(self._terms)
        self._running = Running(self._queue, self.cache, self.counters)
        self._admission = PromptAdmission(self._queue, self._running, self.cache)
        self.background = BackgroundPlaces(
            self._queue, self._running, self.cache, self._admission, ceiling or limits.cap
        )
        self._has_no_time = False  # for the next of the line, in this step
        self._passed: list[Sequence] = []  # prefills without room in this step
        self._held: frozenset[Hashable] = NOBODY  # prompts that end one token before their end
        self._scheduled_s = 0.0
        self.waiting = self._queue.waiting
        self.running = self._running.sequences

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._queue.background)

    def num_waiting_for(self, lack: Lack) -> int:
        """The number of waiting sequences if the head of the queue lacks `lack`, else 0."""
        return len(self.waiting) if self._queue.clocks.blocked_by == lack else 0

    def starts_at(self, now: float) -> float:
        """The time at which the next step can work: now, or when the next static batch is due."""
        if self.static is None or self.running or not self.waiting:
            return now
        return max(now, self.static.starts_at(self.waiting))

    def can_admit(self, request: Submit) -> str | None:
        """The reason why `request` can never run, as a sentence, or None. Changes nothing."""
        prompt = np.frombuffer(request.prompt, dtype=np.int32)
        if not len(prompt) or request.max_tokens < 1:
            return "a request needs at least one token in and one out."
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            return f"a prompt token is not in the vocabulary of {self.vocab_size}."
        if sentence := over_window(len(prompt), request.max_tokens, self.max_model_len):
            return sentence
        num_tokens = len(prompt) + request.max_tokens
        needs = blocks_for(num_tokens, self.pool.block_size)
        if needs > self.pool.num_total:
            return f"{num_tokens} tokens need {needs} KV blocks; there are {self.pool.num_total}."
        return None

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that `can_admit` does not refuse."""
        # Static batches have no places to leave.
        sequence.is_background = sequence.request.is_background and self.static is None
        if self.drafts is not None:
            self.drafts.watch(sequence)
        if self.limits.policy == "deadline" and not sequence.needs_prompt_scores:
            prompt, salt = sequence.request.prompt_token_ids, sequence.request.cache_salt
            num_blocks = len(self.pool.match(prompt, salt))
            sequence.num_findable_tokens = num_blocks * self.pool.block_size
        self._queue.add(sequence, now)

    def abort(self, request_id: str, *, if_waiting: bool = False) -> bool:
        """Forget a request (`if_waiting`: only if it has not begun); True if there was one."""
        all_sequences = (*self.waiting, *self._queue.background, *self.running)
        sequence = next((s for s in all_sequences if s.request_id == request_id), None)
        if sequence is None or (if_waiting and sequence.has_begun):
            return False
        self._queue.drop(sequence)
        if sequence.block_ids:
            self._running.remove(sequence)
        self._running.end_batch()
        return True

    def schedule(
        self, now: float, law: ChunkLaw, growth: Growth = few_decodes, *, is_ahead: bool = False
    ) -> Step:
        """Choose the next step's work; takes blocks for it, and preempts if none is left. is_ahead:
        the device has begun with the decodes, so prefill, which would read all weights once more
        beside this step, waits for the next one."""
        running, (ready, is_short) = self._running, self._begin_step(law, now)
        works = [work for work in ready if work.sequence not in self._held]
        line = iter(()) if is_short else self._line(works, law, now)
        first = list(islice(line, max(self.limits.cap - len(works), 0)))
        division = self._divide(law, works, first, now, may_hold=not is_short)
        released = self._held.difference(division.held)
        works += (free := [work for work in ready if work.sequence in released])
        self._held = division.held
        decoding = {work.sequence for work in works}
        budget = division.chunk - len(free)
        prefills = self._prefills(decoding, chain(first, line), budget, now, may_admit=not is_short)
        works = [work for work in works if work.sequence.block_ids]  # still theirs
        running.pause(set(running.others(decoding)) - set(prefills))
        self._queue.clocks.blocked_by = self._why_blocked()
        unfinished = [s for s in prefills if s.num_uncomputed_tokens > (s in self._held)]
        has_prompts = bool(unfinished) or self.background.has_prompts
        is_held_back = bool(has_prompts and works) and is_ahead
        if unfinished and not is_held_back:
            scored = self._scored_at_once * (1 if works else ALONE_TIMES)
            works += chunks(prefills, budget, scored, self.cache, self._held)
        elif not has_prompts and self.drafts is not None:
            works = self.drafts.add_to(works, room_for_drafts(works, law, self.limits), growth)
        if not works and self._held:  # nobody else can move
            works, self._held = [work for work in ready if work.sequence.block_ids], NOBODY
        if not is_held_back:
            works += self.background.chunks(self.limits, law, works, self._scored_at_once)
        self.background.note(law, works)
        served = {work.sequence for work in works} if self._has_order else set(prefills)
        self._passed = [sequence for sequence in unfinished if sequence not in served]
        works = sorted(works + running.padding(), key=lambda work: work.num_tokens > 1)
        is_long = division.is_long and not is_held_back
        return Step.of(
            works, running.num_computing, self.limits, running.begun, is_held_back, is_long=is_long
        )

    def commit(self, step: Step, sampled: Seq[int | None], now: float) -> list[BookedToken]:
        """Book a step that ran. `sampled`: a token per sampled position, None for NaN logits."""
        self._queue.clocks.advance(now)
        tokens = iter(sampled)
        outcomes: list[BookedToken] = []
        for work in step.works:
            if work.drafts:
                outcomes += self._commit_drafts(work, list(islice(tokens, work.num_samples)))
            elif not work.is_padding:
                work.sequence.num_computed_tokens += work.num_tokens
                if work.samples:
                    outcomes.append(self._book(work.sequence, next(tokens)))
        if self.drafts is not None:
            self.drafts.show(self.running)
        self._running.end_batch()
        return outcomes

    def check_integrity(self) -> str | None:
        """The first invariant that does not hold, or None."""
        if any(sequence.block_ids for sequence in (*self.waiting, *self._queue.background)):
            return "a waiting sequence holds blocks"
        return self.pool.check_integrity(self._running.held_blocks())

    # Choosing the work of a step

    def _begin_step(self, law: ChunkLaw, now: float) -> tuple[list[StepWork], bool]:
        """Advance the clocks; the decodes of the step, and whether blocks were short for them."""
        self._queue.clocks.advance(now)
        for sequence in self._passed:
            sequence.passed_s += now - self._scheduled_s
        self._scheduled_s = now
        self._running.begun.clear()
        before = self.counters.num_preemptions
        self.background.make_room(self.limits, now)
        ready = self._running.decodes()
        return self.background.fitting(law, ready), self.counters.num_preemptions > before

    def _line(self, decodes: Seq[StepWork], law: ChunkLaw, now: float) -> Iterator[Sequence]:
        """Those without a place among `decodes`, in order."""
        decoding = {work.sequence for work in decodes}
        others = self._running.others(decoding)
        if not self._has_order or not (self.waiting or len(others) > 1):
            return iter(others)
        ordered = self._queue.candidates(others, now, self._pace(decodes, law))
        return (sequence for sequence in ordered if sequence not in decoding)

    def _divide(
        self,
        law: ChunkLaw,
        decodes: Seq[StepWork],
        first: Seq[Sequence],
        now: float,
        *,
        may_hold: bool,
    ) -> Division:
        """The chunk of the step and who is held. `first`: those that may have a place."""
        if not self.waiting and not self._running.others({work.sequence for work in decodes}):
            return Division(0)
        may_hold = may_hold and self._queue.clocks.blocked_by != "kv"
        prompts = first if self._has_order else ()
        load = load_of(decodes, prompts, self.limits, now, may_hold=may_hold)
        return law.divide(self.limits, load)

    def _prefills(
        self,
        decoding: Set[Sequence],
        line: Iterable[Sequence],
        budget: int,
        now: float,
        *,
        may_admit: bool,
    ) -> list[Sequence]:
        """Prefills that this step may serve beside `decoding`, in order. Admits the next in the
        line."""
        self._has_no_time = False
        if not self._has_order and may_admit:
            places = self.limits.cap
            if self.static is not None:
                places = min(places, self.static.places(self.waiting, self.running, now))
            self._admission.by_arrival(places)
        others = self._running.others(decoding)
        if not self._has_order:
            if self._queue.line.num_waiting_clients > 1:
                ordered = self._queue.candidates(others, now, Pace(0.0))
                others = [s for s in ordered if s.block_ids and s not in decoding]
            return others
        places = self.limits.cap - len(decoding)
        candidates = (sequence for sequence in line if sequence not in decoding)
        prefills, self._has_no_time = self._admission.by_order(candidates, others, places, budget)
        return prefills

    @property
    def _has_order(self) -> bool:
        """True if anything but arrival decides the order of service."""
        return self.static is None and self.limits.policy != "fcfs"

    def _pace(self, decodes: Seq[StepWork], law: ChunkLaw) -> Pace:
        """How fast the line moves beside `decodes`."""
        self.price_s = law.price_s(self.limits, *shape_of(decodes))
        cap = self.limits.cap
        return Pace(self.price_s, self._running.decode_s / cap, cap - len(decodes))

    def _terms(self, sequence: Sequence) -> Terms:
        request = sequence.request
        if not self._has_order:
            return Terms(0, inf, sequence.order, sequence.prefill_left)
        due_s = sequence.due_s(self.limits)
        return Terms(request.priority, due_s, sequence.order, sequence.prefill_left)

    def _why_blocked(self) -> Lack | None:
        """The resource that a request arriving now would wait for."""
        is_closed = self.static is not None and bool(self.running or self.waiting)
        num_computing = self._running.num_computing - len(self._running.background)
        if is_closed or num_computing >= self.limits.cap:
            return "cap"
        if self._has_no_time:
            return "time"
        return "kv" if self.waiting else None

    # Booking the results of a step

    def _commit_drafts(self, work: StepWork, sampled: Seq[int | None]) -> list[BookedToken]:
        assert self.drafts is not None
        sequence, verified = work.sequence, self.drafts.verify(work, sampled)
        if not verified.tokens:
            sequence.num_computed_tokens += 1  # and not to be trusted
            self._running.start_over(sequence)
            return []
        outcomes: list[BookedToken] = []
        for token in verified.tokens:
            sequence.num_computed_tokens += 1
            outcomes.append(self._book(sequence, token, verified.is_spoiled))
            if outcomes[-1].finish_reason is not None:
                break
        self.drafts.count(work, verified, len(outcomes))
        if outcomes[-1].finish_reason is None:
            if verified.is_spoiled:  # the next tokens would attend to NaN
                self._running.start_over(sequence)
            else:
                self.cache.roll_back(sequence)
        return outcomes

    def _book(
        self, sequence: Sequence, token_id: int | None, is_spoiled: bool = False
    ) -> BookedToken:
        """Book one token. `is_spoiled`: its blocks hold non-finite values behind it."""
        if token_id is None:
            self.cache.forget(sequence)
            self._queue.leave_line(sequence)
            self._running.remove(sequence)
            return BookedToken(sequence, None, "error")
        sequence.num_trusted_tokens = sequence.num_computed_tokens - is_spoiled
        self.cache.cache_block(sequence)
        now = self._queue.clocks.now
        if sequence in self._queue.line:
            self._queue.leave_line(sequence)
            sequence.first_s, sequence.is_in_time = now, now <= sequence.due_s(self.limits)
        elif self.limits.itl_ms is not None:
            sequence.num_late += 1e3 * (now - sequence.last_s) > self.limits.itl_ms
        sequence.last_s = now
        reason = sequence.append(token_id, self.eos_token_ids)
        if reason is not None:
            self._running.end(sequence, is_padded=self.static is not None)
        return BookedToken(sequence, token_id, reason)
