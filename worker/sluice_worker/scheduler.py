"""Who may start and who continues: one token budget per step, no phases. Pure.

Admission gives a sequence the blocks of all its tokens and a place below the cap; from then on it
is running. Each step first serves those that lack one token (decodes), then hands the rest of the
budget to the others in order of admission (chunks of prefill), sized for the inter-token target.
So a request waits for one of two things only, the cap or KV blocks; all else is prefill time.
"""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from .blocks import BlockPool
from .sequence import Sequence
from .sizing import blocks_for
from .wire import FinishReason, Submit

MIN_CHUNK_TOKENS = 32
"""A prefill goes on by this much per step even where the step model leaves no room: it ends."""

ChunkLimit = Callable[[int, int], int]
"""(decodes, kv_tokens) of a step -> prefill tokens that keep it within the inter-token target."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The live limits, in force from the next step on."""

    epoch: int
    max_num_seqs: int
    max_num_batched_tokens: int
    itl_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never run. `code` is that of the error tree."""

    code: Literal["context_length_exceeded", "kv_capacity_exceeded", "invalid_request"]
    sentence: str


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, start + num_tokens) of one sequence; `samples`: its next token comes of it."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: its work, decodes first, and the record that the step model is fitted on.

    `num_kv_tokens`: context lengths summed over the work. `num_running`, `at_cap`: at its start.
    """

    works: tuple[Work, ...]
    num_decodes: int
    num_kv_tokens: int
    num_prefill_tokens: int
    num_running: int
    at_cap: bool
    limits: Limits


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one sequence: a token, or a failure (`token_id` None)."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_preemptions: int = 0
    preempted_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0


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
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._dirty: list[int] = []
        # Seconds during which the head of the queue could not start, by what it lacked. Everyone
        # behind it waits for the same thing, so a request's wait is a difference of two readings.
        self._clock_cap_s = 0.0
        self._clock_kv_s = 0.0
        self._clock_at: float | None = None
        self._blocked_by: Literal["cap", "kv"] | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def waiting_cap(self) -> int:
        return 0 if self._blocked_by == "kv" else len(self.waiting)

    @property
    def waiting_kv(self) -> int:
        return len(self.waiting) if self._blocked_by == "kv" else 0

    def can_admit(self, request: Submit) -> Refusal | None:
        """Why `request` can never run, or None. Asking changes nothing."""
        prompt = request.prompt_token_ids
        if not prompt or request.max_tokens < 1:
            return Refusal("invalid_request", "a request needs at least one token in and one out.")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            return Refusal(
                "invalid_request", f"a prompt token is not in the vocabulary of {self.vocab_size}."
            )
        num_tokens = len(prompt) + request.max_tokens
        if num_tokens > self.max_model_len:
            return Refusal(
                "context_length_exceeded",
                f"{len(prompt)} prompt tokens and {request.max_tokens} new ones are over the "
                f"window of {self.max_model_len}.",
            )
        needs = blocks_for(num_tokens, self.pool.block_size)
        if needs > self.pool.num_total:
            return Refusal(
                "kv_capacity_exceeded",
                f"{num_tokens} tokens need {needs} KV blocks; there are {self.pool.num_total}.",
            )
        return None

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that `can_admit` does not refuse."""
        self._advance_clocks(now)
        self._enqueue(sequence)
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; whether there was one."""
        for queue in (self.waiting, self.running):
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    self._free(sequence)
                    return True
        return False

    def schedule(self, now: float, chunk_limit: ChunkLimit) -> Step:
        """Choose the next step's work, taking blocks for it and preempting where none is left."""
        self._advance_clocks(now)
        before = self.counters.num_preemptions
        works = self._decodes(now)
        if self.counters.num_preemptions == before:
            self._admit(now)
        self._blocked_by = self._why_blocked()
        budget = self._prefill_budget(works, chunk_limit)
        works += self._chunks({id(work.sequence) for work in works}, budget)
        works.sort(key=lambda work: work.num_tokens > 1)
        return self._as_step(tuple(works))

    def commit(self, step: Step, sampled: Seq[int | None], now: float) -> list[Outcome]:
        """Book a step that ran. `sampled`: a token per work that samples, None for NaN logits."""
        self._advance_clocks(now)
        tokens = iter(sampled)
        outcomes = []
        for work in step.works:
            work.sequence.num_computed_tokens += work.num_tokens
            if work.samples:
                outcomes.append(self._outcome(work.sequence, next(tokens)))
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
        return self.pool.check_integrity([sequence.block_ids for sequence in self.running])

    # Who continues

    def _decodes(self, now: float) -> list[Work]:
        """Work for every running sequence that lacks one token, oldest first."""
        works: list[Work] = []
        for sequence in list(self.running):
            if sequence.num_uncomputed_tokens != 1 or not self._extend(sequence, now):
                continue
            works.append(Work(sequence, sequence.num_computed_tokens, 1, samples=True))
        return works

    def _extend(self, sequence: Sequence, now: float) -> bool:
        """Room for the sequence's next token, at the newest's expense; False if it was itself."""
        if not sequence.block_ids:
            return False  # preempted by an older one in this very step
        while len(sequence.block_ids) * self.pool.block_size < sequence.num_tokens:
            if self.pool.num_available:
                sequence.block_ids += self.pool.allocate(1)
            elif self._preempt_newest(now) is sequence:
                return False
        return True

    def _preempt_newest(self, now: float) -> Sequence:
        victim = self.running.pop()
        self.counters.num_preemptions += 1
        self.counters.preempted_tokens += victim.num_computed_tokens
        self._free(victim)
        self._enqueue(victim)
        self.waiting.appendleft(victim)
        return victim

    def _prefill_budget(self, decodes: Seq[Work], chunk_limit: ChunkLimit) -> int:
        """Tokens left for prefill beside `decodes`; without any, no one waits between tokens."""
        left = max(self.limits.max_num_batched_tokens - len(decodes), 1)
        if not decodes or self.limits.itl_ms is None:
            return left
        kv_tokens = sum(work.start + 1 for work in decodes)
        return min(left, max(chunk_limit(len(decodes), kv_tokens), MIN_CHUNK_TOKENS))

    def _chunks(self, served: set[int], budget: int) -> Iterator[Work]:
        for sequence in self.running:
            if budget <= 0:
                return
            if id(sequence) in served:
                continue
            count = min(sequence.num_uncomputed_tokens, budget)
            budget -= count
            samples = count == sequence.num_uncomputed_tokens
            yield Work(sequence, sequence.num_computed_tokens, count, samples)

    def _as_step(self, works: tuple[Work, ...]) -> Step:
        return Step(
            works=works,
            num_decodes=sum(1 for work in works if work.num_tokens == 1),
            num_kv_tokens=sum(work.start + work.num_tokens for work in works),
            num_prefill_tokens=sum(work.num_tokens for work in works if work.num_tokens > 1),
            num_running=len(self.running),
            at_cap=len(self.running) >= 0.9 * self.limits.max_num_seqs,
            limits=self.limits,
        )

    # Who may start

    def _admit(self, now: float) -> None:
        """Start waiting sequences, first come first served, below the cap and within the pool."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            matched = []
            if not sequence.needs_prompt_scores:
                matched = self.pool.match(sequence.token_ids, sequence.request.cache_salt)
            total = blocks_for(sequence.num_tokens, self.pool.block_size)
            # A margin for those that run: else the next step may preempt whom this one admits.
            margin = max(1, self.pool.num_total // 100) if self.running else 0
            if not self.pool.can_take(matched, total - len(matched) + margin):
                break
            self._start(self.waiting.popleft(), matched, total, now)

    def _start(self, sequence: Sequence, matched: list[int], total: int, now: float) -> None:
        self.pool.acquire(matched)
        sequence.block_ids = matched + self.pool.allocate(total - len(matched))
        num_cached = len(matched) * self.pool.block_size
        sequence.num_computed_tokens = sequence.num_trusted_tokens = num_cached
        sequence.num_sealed_blocks = len(matched)
        if matched:
            sequence.sealed_key = self.pool.key_of(matched[-1])
        self.counters.prefix_queries += sequence.num_tokens
        self.counters.prefix_hits += num_cached
        self._leave_queue(sequence)
        if sequence.admitted_s is None:
            sequence.admitted_s = now
            sequence.cached_tokens = num_cached
        self.running.append(sequence)

    def _why_blocked(self) -> Literal["cap", "kv"] | None:
        """What a request that arrives now would wait for."""
        if len(self.running) >= self.limits.max_num_seqs:
            return "cap"
        return "kv" if self.waiting else None

    # What came of a step

    def _outcome(self, sequence: Sequence, token_id: int | None) -> Outcome:
        if token_id is None:
            # Its KV is not to be trusted, not even what earlier steps found sound.
            self._dirty += self.pool.forget(sequence.block_ids)
            sequence.num_trusted_tokens = sequence.num_computed_tokens
            self._retire(sequence)
            return Outcome(sequence, None, "error")
        sequence.num_trusted_tokens = sequence.num_computed_tokens
        self._seal(sequence)
        reason = sequence.append(token_id, self.eos_token_ids)
        if reason is not None:
            self._retire(sequence)
        return Outcome(sequence, token_id, reason)

    def _seal(self, sequence: Sequence) -> None:
        """Make the blocks that are now full findable; only after finite logits came of them."""
        if not self.pool.prefix_caching:
            return
        size = self.pool.block_size
        for index in range(sequence.num_sealed_blocks, sequence.num_computed_tokens // size):
            parent = sequence.sealed_key or sequence.request.cache_salt
            tokens = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.sealed_key = self.pool.seal(sequence.block_ids[index], parent, tokens)
            sequence.num_sealed_blocks += 1

    def _retire(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        """Give the blocks back; if it runs again, it starts from what the prefix cache kept."""
        if sequence.num_computed_tokens > sequence.num_trusted_tokens:
            self._dirty += sequence.block_ids[sequence.num_sealed_blocks :]
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed_tokens = sequence.num_trusted_tokens = 0
        sequence.num_sealed_blocks = 0
        sequence.sealed_key = 0

    # What waiting was for

    def _advance_clocks(self, now: float) -> None:
        elapsed = 0.0 if self._clock_at is None else max(now - self._clock_at, 0.0)
        self._clock_at = now
        if self._blocked_by == "cap":
            self._clock_cap_s += elapsed
        elif self._blocked_by == "kv":
            self._clock_kv_s += elapsed

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.queued_at = (self._clock_cap_s, self._clock_kv_s)

    def _leave_queue(self, sequence: Sequence) -> None:
        cap_s, kv_s = sequence.queued_at
        sequence.wait_cap_s += self._clock_cap_s - cap_s
        sequence.wait_kv_s += self._clock_kv_s - kv_s
