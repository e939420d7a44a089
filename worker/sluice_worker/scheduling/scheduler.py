"""Who may start and who continues: one token budget per step, no phases. Pure.

Admission gives a sequence the blocks of all its tokens and a place below the cap; from then on it
is running. Each step first serves those that lack one token (decodes), then hands the rest of the
budget to the others (chunks of prefill), sized for the inter-token target. Those without a first
token stand in a line (`ordering`); its order decides who is admitted and who computes. Whom the
step's budget does not reach is not admitted there: it would hold blocks for nothing, and give them
up again. A place below the cap is for those who compute: an unfinished prefill whose place another
takes keeps its blocks, and waits for the cap. So a request waits for one of two things only, the
cap or KV blocks; all else is prefill time, also a step that others fill.
A step without prefill may verify drafts (`speculation`); in static mode (`static_batch`) the cap is
that of a batch, which is full until its longest has ended.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Set
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np
from sluice_core.contract import AT_CAP_SHARE
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.model.sizing import blocks_for
from sluice_core.ordering import Line, Pace, Terms
from sluice_core.window import over_window
from sluice_core.wire import Limits, Submit

from ..base.config import NgramSpeculation
from . import prefix
from .blocks import BlockPool
from .preemption import choose_victim
from .sequence import Sequence
from .speculation import (
    Drafter,
    Growth,
    draft_length,
    few_decodes,
    is_eligible,
    num_right,
    show,
)
from .static_batch import StaticBatching
from .step import Counters, Outcome, Step, Work
from .waiting import Lack, WaitClocks

Price = Callable[[int, int], float]
"""(decodes, kv_tokens) of a step -> seconds that a prefill token takes beside them."""
ChunkLimit = Callable[[int, int], int]
"""(decodes, kv_tokens) of a step -> prefill tokens that keep it within the inter-token target."""
SCORED_LOGITS = 1 << 22
"""Logits of prompts with log-probabilities in a step beside decodes, where no other number is
given: each token takes the whole head and a pass over the vocabulary (152k: 3 ms on a core)."""
ALONE_TIMES = 16
"""As many times more where nobody decodes: who comes, leaves or asks for health waits for it."""


RECENT = 32
"""Sequences that ended, of which the mean time after the first token is taken."""


class Scheduler:
    """Waiting and running sequences over one block pool. `now` is an argument everywhere."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        static: StaticBatching | None = None,
        speculation: NgramSpeculation | None = None,
        num_ahead: int = 0,
        scored_logits: int = SCORED_LOGITS,
    ) -> None:
        """`num_ahead`: slots that a sequence gets behind its tokens; who decodes, while any are
        free. `scored_logits`: of prompts, in a step beside decodes."""
        self.pool = pool
        self.limits = limits
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.static = static
        self._ended: list[Sequence] = []  # of a static batch, whose rows are padding
        self.speculation = speculation
        self.num_ahead = num_ahead
        self._scored_at_once = max(scored_logits // vocab_size, 1)
        # Both in order of arrival: a preempted sequence takes its old place again.
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # Those of both without a first token; others that wait are resumed before them, by arrival.
        self.line = Line(self._terms)
        self._resumed: list[Sequence] = []
        self._paused: set[Sequence] = set()
        self._has_no_time = False  # for the next of the line, in the step at hand
        self._begun: list[str] = []  # in the step at hand
        self._passed: list[Sequence] = []  # prefills that it has no room for
        self._scheduled_s = 0.0
        self.price_s = 0.0  # of a prefill token, where there is an order
        # Mean time from the first token to the last, of those that ended lately.
        self._num_retired, self._decode_s = 0, 0.0
        self._newest: Sequence | None = None  # whose prompt the next one may have
        self.counters = Counters()
        if speculation is not None:
            self.counters.accepted_by_position = [0] * speculation.num_speculative_tokens
        # Slots behind its computed tokens that a step may have written: drafts, and a step ahead.
        most_drafts = speculation.num_speculative_tokens if speculation is not None else 0
        self._num_behind = num_ahead + most_drafts
        self._num_added = 0
        self._dirty: list[int] = []
        self._clocks = WaitClocks()
        # Who lacked blocks at the last look, and the pool's gains before it can lack none.
        self._lacking: tuple[Sequence | None, int] = (None, 0)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_computing(self) -> int:
        """Running sequences that have a place below the cap."""
        return len(self.running) - len(self._paused)

    @property
    def waiting_cap(self) -> int:
        return len(self.waiting) if self._clocks.blocked_by == "cap" else 0

    @property
    def waiting_kv(self) -> int:
        return len(self.waiting) if self._clocks.blocked_by == "kv" else 0

    @property
    def waiting_turn(self) -> int:
        """Those that the order has behind whoever fills the steps."""
        return len(self.waiting) if self._clocks.blocked_by == "time" else 0

    @property
    def rounding_waste(self) -> float:
        """Share of the used KV slots that no token will have, because pages are whole."""
        size = self.pool.block_size
        wasted = sum(-sequence.num_tokens % size for sequence in self.running)
        return wasted / max(self.pool.num_used * size, 1)

    def starts_at(self, now: float) -> float:
        """When the next step can do anything: now, or when the next static batch is due."""
        if self.static is None or self.running or not self.waiting:
            return now
        return max(now, self.static.starts_at(self.waiting))

    def can_admit(self, request: Submit) -> str | None:
        """The sentence why `request` can never run, or None. Asking changes nothing."""
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
        self._clocks.advance(now)
        self._clocks.enqueue(sequence)
        sequence.order, sequence.queued_s = self._num_added, now
        self._num_added += 1
        if self.speculation is not None and is_eligible(sequence.request):
            sequence.drafter = Drafter(self.speculation)
        self.waiting.append(sequence)
        if self.limits.policy == "deadline":
            prompt, salt = sequence.request.prompt_token_ids, sequence.request.cache_salt
            num_found = len(self.pool.match(prompt, salt)) * self.pool.block_size
            sequence.num_findable_tokens = 0 if sequence.needs_prompt_scores else num_found
        self.line.add(sequence, self._newest if sequence.request.is_another else None)
        if not sequence.request.is_another:
            self._newest = sequence

    def abort(self, request_id: str, *, if_waiting: bool = False) -> bool:
        """Forget a request (`if_waiting`: one that has not begun); whether there was one."""
        for queue in (self.waiting, self.running):
            for sequence in queue:
                if sequence.request_id == request_id:
                    if if_waiting and sequence.has_begun:
                        return False
                    queue.remove(sequence)
                    self._leave_line(sequence)
                    if sequence in self._resumed:
                        self._resumed.remove(sequence)
                    self._free(sequence)
                    self._end_batch()
                    return True
        return False

    def schedule(
        self,
        now: float,
        chunk_limit: ChunkLimit,
        growth: Growth = few_decodes,
        price: Price = lambda decodes, kv_tokens: 0.0,
        *,
        is_ahead: bool = False,
    ) -> Step:
        """Choose the next step's work, taking blocks for it and preempting where none is left.

        is_ahead: the device has begun with what decodes. Prefill then waits for the next step, of
        which it is a part: beside this one it would read all weights once more.
        """
        self._clocks.advance(now)
        for sequence in self._passed:
            sequence.passed_s += now - self._scheduled_s
        self._scheduled_s = now
        self._begun.clear()
        before = self.counters.num_preemptions
        works = self._decodes()
        decoding = {work.sequence for work in works}
        is_short = self.counters.num_preemptions > before
        only_decodes = not self.waiting and len(self.running) == len(decoding)
        budget = 0 if only_decodes else self._prefill_budget(works, chunk_limit)
        prefills = self._prefills(works, decoding, price, now, budget, may_admit=not is_short)
        self._pause(set(self.running) - decoding - set(prefills))
        self._clocks.blocked_by = self._why_blocked()
        is_held_back = bool(prefills and works) and is_ahead
        if prefills and not is_held_back:
            works += self._chunks(prefills, budget, bool(works))
        elif not prefills:
            works = self._with_drafts(works, chunk_limit, growth)
        served = {work.sequence for work in works} if self._has_order else set(prefills)
        self._passed = [sequence for sequence in prefills if sequence not in served]
        works += self._padding()
        works.sort(key=lambda work: work.num_tokens > 1)
        return self._as_step(tuple(works), is_held_back)

    def commit(self, step: Step, sampled: Seq[int | None], now: float) -> list[Outcome]:
        """Book a step that ran. `sampled`: a token per sampled position, None for NaN logits."""
        self._clocks.advance(now)
        tokens = iter(sampled)
        outcomes: list[Outcome] = []
        for work in step.works:
            if work.drafts:
                outcomes += self._verify(work, list(islice(tokens, work.num_samples)))
            elif not work.is_padding:
                work.sequence.num_computed_tokens += work.num_tokens
                if work.samples:
                    outcomes.append(self._outcome(work.sequence, next(tokens)))
        show((s.drafter, s.token_ids) for s in self.running if s.drafter is not None)
        self._end_batch()
        return outcomes

    def take_dirty_blocks(self) -> list[int]:
        """Freed blocks whose content no finite logits vouch for, to be cleared before reuse.

        A masked slot is still multiplied by zero, and zero times NaN would reach its next owner.
        """
        dirty, self._dirty = self._dirty, []
        return dirty

    def check_integrity(self) -> str | None:
        """The first invariant that does not hold, or None."""
        if any(sequence.block_ids for sequence in self.waiting):
            return "a waiting sequence holds blocks"
        held = [sequence.block_ids for sequence in (*self.running, *self._ended)]
        return self.pool.check_integrity(held)

    # Who continues

    def _decodes(self) -> list[Work]:
        """Work for every running sequence that lacks one token, oldest first."""
        works: list[Work] = []
        for sequence in list(self.running):
            if sequence.num_uncomputed_tokens == 1 and self._extend(sequence):
                works.append(Work(sequence, sequence.num_computed_tokens, 1, samples=True))
        return [work for work in works if work.sequence.block_ids]  # not preempted since

    def _extend(self, sequence: Sequence) -> bool:
        """Room for the sequence's next token, at the cheapest's expense; False if it was itself."""
        if not sequence.block_ids:
            return False  # preempted for another one in this very step
        while len(sequence.block_ids) * self.pool.block_size < sequence.num_tokens:
            if self.pool.num_available:
                sequence.block_ids += self.pool.allocate(1)
            elif self._ended:
                self._free(self._ended.pop())
            elif self._preempt(choose_victim(self.running, self.pool)) is sequence:
                return False
        lacking = blocks_for(sequence.num_tokens + self.num_ahead, self.pool.block_size)
        lacking -= len(sequence.block_ids)
        if 0 < lacking <= self.pool.num_available:
            sequence.block_ids += self.pool.allocate(lacking)
        return True

    def _preempt(self, victim: Sequence) -> Sequence:
        self.counters.num_preemptions += 1
        victim.num_preemptions += 1
        self._requeue(victim)
        return victim

    def _requeue(self, sequence: Sequence) -> None:
        """Back into the queue, before all that came later; it will be computed again."""
        sequence.num_lost_tokens = sequence.num_computed_tokens
        self.running.remove(sequence)
        self._free(sequence)
        self._clocks.enqueue(sequence)
        before = sum(1 for other in self.waiting if other.order < sequence.order)
        self.waiting.insert(before, sequence)
        if sequence not in self.line:
            self._resumed.append(sequence)

    def _padding(self) -> list[Work]:
        """Rows of a static batch that ended: their last computed token, over and over."""
        return [
            Work(s, s.num_computed_tokens - 1, 1, samples=False, is_padding=True)
            for s in self._ended
        ]

    def _with_drafts(
        self, decodes: list[Work], chunk_limit: ChunkLimit, growth: Growth
    ) -> list[Work]:
        """`decodes`, with drafts to verify where they promise to be worth the step's time."""
        drafting = [work for work in decodes if work.sequence.is_drafting]
        if not drafting or self.speculation is None:
            return decodes
        num_decodes, kv_tokens = len(decodes), sum(work.start + 1 for work in decodes)
        room = self._prefill_budget(decodes, chunk_limit, floor=0)
        length = draft_length(
            min(self.speculation.num_speculative_tokens, room // len(drafting)),
            len(drafting),
            num_decodes,
            lambda drafted: growth(num_decodes, kv_tokens, drafted),
        )
        return [self._with_draft(work, length) for work in decodes]

    def _with_draft(self, work: Work, length: int) -> Work:
        sequence = work.sequence
        left = sequence.request.max_tokens - sequence.num_output_tokens
        most = min(length, left - 1)
        if most < 1 or sequence.drafter is None or not sequence.drafter.is_on:
            return work
        drafts = sequence.drafter.draft(sequence.token_ids, most)
        lacking = blocks_for(sequence.num_tokens + len(drafts), self.pool.block_size)
        lacking -= len(sequence.block_ids)
        if not drafts or lacking > self.pool.num_available:
            return work  # a guess is worth no preemption
        sequence.block_ids += self.pool.allocate(lacking)
        return replace(work, num_tokens=1 + len(drafts), drafts=drafts)

    def _prefill_budget(
        self, decodes: Seq[Work], chunk_limit: ChunkLimit, floor: int = MIN_CHUNK_TOKENS
    ) -> int:
        """Tokens left for prefill beside `decodes`."""
        left = max(self.limits.max_num_batched_tokens - len(decodes), min(floor, 1))
        kv_tokens = sum(work.start + 1 for work in decodes)
        return min(left, max(chunk_limit(len(decodes), kv_tokens), floor))

    def _chunks(self, prefills: Seq[Sequence], budget: int, has_decodes: bool) -> Iterator[Work]:
        """Prefill, for the first of `prefills` first. A prefix that several lack is computed by the
        first; the others find it in the next step: a burst with one system prompt comes at once."""
        ending: list[Sequence] = []
        scored = self._scored_at_once * (1 if has_decodes else ALONE_TIMES)
        for sequence in prefills:
            if budget <= 0:
                return
            self._count_found(sequence, prefix.take_more(sequence, self.pool))
            if any(prefix.will_find(sequence, other, self.pool) for other in ending):
                continue
            count = min(sequence.num_uncomputed_tokens, budget)
            if sequence.needs_prompt_scores:
                count = min(count, scored)
                scored -= count
                if not count:
                    continue
            budget -= count
            samples = count == sequence.num_uncomputed_tokens
            if samples:
                ending.append(sequence)
            yield Work(sequence, sequence.num_computed_tokens, count, samples)

    def _as_step(self, works: tuple[Work, ...], is_held_back: bool) -> Step:
        num_draft_tokens = sum(len(work.drafts) for work in works)
        num_padding = sum(work.is_padding for work in works)
        num_decodes = sum(work.num_tokens == 1 + len(work.drafts) for work in works) - num_padding
        num_tokens = sum(work.num_tokens for work in works)
        return Step(
            works=works,
            num_decodes=num_decodes,
            num_kv_tokens=sum(work.start + work.num_tokens for work in works),
            num_prefill_tokens=num_tokens - num_decodes - num_draft_tokens - num_padding,
            num_draft_tokens=num_draft_tokens,
            num_padding=num_padding,
            scores_prompts=any(work.sequence.needs_prompt_scores for work in works),
            num_running=self.num_computing,
            at_cap=self.num_computing >= AT_CAP_SHARE * self.limits.max_num_seqs,
            limits=self.limits,
            admitted=tuple(self._begun),
            prefill_follows=is_held_back,
        )

    # Who may start

    def _prefills(
        self,
        decodes: Seq[Work],
        decoding: Set[Sequence],
        price: Price,
        now: float,
        budget: int,
        *,
        may_admit: bool,
    ) -> list[Sequence]:
        """Those that this step may serve beside `decoding`, in their order; who is next and waits
        is admitted, as far as places and blocks reach; in the line, as far as `budget` does."""
        self._has_no_time = False
        if not self._has_order:
            if may_admit:
                self._admit_by_arrival(now)
            return [s for s in self.running if s not in decoding]
        running = [s for s in self.running if s not in decoding]
        places = self.limits.max_num_seqs - len(decoding)
        num_free = places - sum(s not in self._paused for s in running)
        prefills: list[Sequence] = []
        takes_place = False
        if may_admit and (self.waiting or len(running) > 1):
            pace = self._pace(decodes, price)
            for sequence in self._candidates(running, now, pace):
                if sequence in decoding:
                    continue
                if not sequence.block_ids or sequence in self._paused:
                    is_ahead = sequence in self.line and len(prefills) < places
                    if num_free <= 0 and not is_ahead:
                        break
                    if not sequence.block_ids:
                        self._has_no_time = budget <= 0 and sequence in self.line
                        if self._has_no_time or not self._admit(sequence, prefills):
                            break
                    takes_place = takes_place or num_free <= 0
                    num_free -= 1
                budget -= sequence.num_uncomputed_tokens
                prefills.append(sequence)
        for sequence in sorted(set(running).difference(prefills), key=self._rank):
            is_held = sequence in self._paused and len(prefills) >= places
            if sequence.block_ids and not is_held:
                prefills.append(sequence)
        return prefills[:places] if takes_place else prefills

    def _admit_by_arrival(self, now: float) -> None:
        """First come, first served."""
        cap = self.limits.max_num_seqs
        if self.static is not None:
            may_start = self.static.may_start(self.waiting, self.running, now)
            cap = min(cap, self.static.size) if may_start else 0
        while self.waiting and len(self.running) < cap and self._admit(self.waiting[0], ()):
            pass

    @property
    def _has_order(self) -> bool:
        """Whether anything but arrival says who is served first."""
        return self.static is None and self.limits.policy != "fcfs"

    def _pace(self, decodes: Seq[Work], price: Price) -> Pace:
        """How fast the line moves beside `decodes`."""
        self.price_s = price(len(decodes), sum(work.start + 1 for work in decodes))
        cap = self.limits.max_num_seqs
        return Pace(self.price_s, self._decode_s / cap, cap - len(decodes))

    def _candidates(self, running: Seq[Sequence], now: float, pace: Pace) -> Iterator[Sequence]:
        """Who has had a first token goes on before all others, by arrival; then the line."""
        resumed = [*self._resumed, *(s for s in running if s not in self.line)]
        yield from sorted(resumed, key=lambda sequence: sequence.order)
        yield from self.line.ordered(now, pace)

    def _rank(self, sequence: Sequence) -> tuple[bool, int, bool, float, float]:
        if sequence not in self.line:
            return False, 0, False, 0, sequence.order
        return True, *self.line.rank(sequence)

    def _terms(self, sequence: Sequence) -> Terms:
        """What the line asks of a sequence."""
        request = sequence.request
        if not self._has_order:
            return Terms(0, inf, sequence.order, sequence.prefill_left)
        due_s = self.limits.due_s(request.arrived_s, request.ttft_ms)
        return Terms(request.priority, due_s, sequence.order, sequence.prefill_left)

    def _admit(self, sequence: Sequence, prefills: Seq[Sequence]) -> bool:
        """Give a waiting sequence the blocks of all its tokens; False where too few are left.

        Whoever can be in time may have those of the late, but for what `prefills` will compute.
        """
        known, enough = self._lacking
        victim = self._late_prefill(sequence, prefills)
        as_before = self.running and sequence is known and self.pool.num_gains < enough
        if as_before and victim is None:
            return False  # to match a long prompt takes milliseconds
        sequence.token_ids = sequence.token_ids or sequence.request.prompt_token_ids
        while True:
            matched = prefix.find(sequence, self.pool)
            total = blocks_for(sequence.num_tokens + self.num_ahead, self.pool.block_size)
            # A margin for those that run: else the next step may preempt whom this one admits.
            margin = max(1, self.pool.num_total // 100) if self.running else 0
            lacking = self.pool.num_lacking(matched, total - len(matched) + margin)
            self._lacking = (sequence, self.pool.num_gains + lacking)
            if lacking <= 0:
                break
            if victim is None:
                return False
            self._preempt(victim)
            victim = self._late_prefill(sequence, prefills)
        self.waiting.remove(sequence)
        if sequence in self._resumed:
            self._resumed.remove(sequence)
        self._start(sequence, matched, total)
        return True

    def _late_prefill(self, sequence: Sequence, prefills: Seq[Sequence]) -> Sequence | None:
        """The latest unfinished prefill that is late, where `sequence` is not; none that this step
        ends."""
        if sequence not in self.line or self.line.is_late(sequence):
            return None
        others = (s for s in reversed(self.running[1:]) if s in self.line and s not in prefills)
        late = (s for s in others if self.line.is_late(s) and s.num_uncomputed_tokens > 1)
        return next(late, None)

    def _pause(self, paused: set[Sequence]) -> None:
        """Admitted prefills whose places others have now wait for the cap."""
        for sequence in paused - self._paused:
            self._clocks.enqueue(sequence)
        for sequence in self._paused - paused:
            if sequence.block_ids:
                self._clocks.dequeue(sequence)
        self._paused = paused

    def _leave_line(self, sequence: Sequence) -> None:
        self.line.remove(sequence)
        if self._newest is sequence:
            self._newest = None

    def _start(self, sequence: Sequence, matched: list[int], total: int) -> None:
        self.pool.acquire(matched)
        sequence.block_ids = matched + self.pool.allocate(total - len(matched))
        num_cached = prefix.book(sequence, self.pool, matched)
        if self.pool.prefix_caching and not sequence.needs_prompt_scores:
            self._count_found(sequence, num_cached, sequence.num_tokens)
        self.counters.preempted_tokens += max(sequence.num_lost_tokens - num_cached, 0)
        sequence.num_lost_tokens = 0
        self._clocks.dequeue(sequence)
        if not sequence.has_begun:
            sequence.has_begun = True
            self._begun.append(sequence.request_id)
            sequence.cached_tokens = num_cached
        insort(self.running, sequence, key=lambda other: other.order)

    def _count_found(self, sequence: Sequence, num_found: int, num_sought: int = 0) -> None:
        """Count what the cache was asked for and had. Who comes back finds what was its own."""
        if not sequence.num_preemptions:
            self.counters.prefix_hits += num_found
            self.counters.prefix_queries += num_sought

    def _why_blocked(self) -> Lack | None:
        """What a request that arrives now would wait for."""
        is_closed = self.static is not None and bool(self.running or self.waiting)
        if is_closed or self.num_computing >= self.limits.max_num_seqs:
            return "cap"
        if self._has_no_time:
            return "time"
        return "kv" if self.waiting else None

    # What came of a step

    def _verify(self, work: Work, sampled: Seq[int | None]) -> list[Outcome]:
        """Keep the drafts that the model itself chose, and the token after them."""
        sequence, drafts = work.sequence, work.drafts
        right = num_right(drafts, sampled)
        sound = sampled[: right + 1]
        if sampled[right] is None and right < len(drafts):
            # A guess behind it may have spoiled it: kernels multiply it by a weight of zero, and
            # NaN remains.
            sequence.drafter, sound = None, sampled[:right]
        is_spoiled = None in sampled[len(sound) :]
        if not sound:
            sequence.num_computed_tokens += 1  # and not to be trusted
            self._requeue(sequence)
            return []
        outcomes: list[Outcome] = []
        for token in sound:
            sequence.num_computed_tokens += 1
            outcomes.append(self._outcome(sequence, token, is_spoiled))
            if outcomes[-1].finish_reason is not None:
                break
        self._count_drafts(len(drafts), len(outcomes) - (len(sound) > right))
        if sequence.drafter is not None:
            sequence.drafter.judge(len(drafts), right)
        if outcomes[-1].finish_reason is None:
            self._roll_back(sequence, is_spoiled)
        return outcomes

    def _roll_back(self, sequence: Sequence, is_spoiled: bool) -> None:
        """Give back the blocks of rejected drafts, which hold nothing that counts."""
        if is_spoiled:
            # A wrong guess gave NaN, and now lies where the next tokens will look: start over.
            self._requeue(sequence)
            return
        kept = blocks_for(sequence.num_tokens, self.pool.block_size)
        self.pool.release(sequence.block_ids[kept:])
        del sequence.block_ids[kept:]

    def _count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        self.counters.num_drafts += 1
        self.counters.draft_tokens += num_drafted
        for position in range(num_accepted):
            self.counters.accepted_by_position[position] += 1

    def _outcome(
        self, sequence: Sequence, token_id: int | None, is_spoiled: bool = False
    ) -> Outcome:
        """Book one token. `is_spoiled`: behind it, its blocks hold what is not finite."""
        if token_id is None:
            # Its KV is not to be trusted, not even what earlier steps found sound.
            self._dirty += self.pool.forget(sequence.block_ids)
            sequence.num_trusted_tokens = sequence.num_computed_tokens
            self.running.remove(sequence)
            self._leave_line(sequence)
            self._free(sequence)
            return Outcome(sequence, None, "error")
        sequence.num_trusted_tokens = sequence.num_computed_tokens - is_spoiled
        prefix.seal(sequence, self.pool)
        if sequence in self.line:
            self._leave_line(sequence)
            sequence.first_s = self._clocks.now
        reason = sequence.append(token_id, self.eos_token_ids)
        if reason is not None:
            self._retire(sequence)
        return Outcome(sequence, token_id, reason)

    def _retire(self, sequence: Sequence) -> None:
        took_s = self._clocks.now - sequence.first_s
        self._decode_s += (took_s - self._decode_s) / min(self._num_retired + 1, RECENT)
        self._num_retired += 1
        self.running.remove(sequence)
        if self.static is None:
            self._free(sequence)
        else:
            self._ended.append(sequence)

    def _end_batch(self) -> None:
        """Free the rows of a static batch whose last sequence has ended."""
        while self._ended and not self.running:
            self._free(self._ended.pop())

    def _free(self, sequence: Sequence) -> None:
        """Give the blocks back; if it runs again, it starts from what the prefix cache kept."""
        if sequence.num_computed_tokens > sequence.num_trusted_tokens:
            written = sequence.num_computed_tokens + self._num_behind
            end = blocks_for(written, self.pool.block_size)
            self._dirty += sequence.block_ids[sequence.num_sealed_blocks : end]
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_trusted_tokens = 0
        sequence.num_sealed_blocks = 0
        sequence.sealed_key = 0
