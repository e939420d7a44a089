"""One request's state. `num_computed_tokens` catches up with `num_tokens`; there are no phases.

Prefill, decode, a prefix hit and resumption after a preemption are all the same case.
"""

from collections.abc import Set
from dataclasses import dataclass, field

from sluice_core.port import EngineLimits, FinishReason, FirstParts, Scores
from sluice_core.wire import Submit

from .edits import Editor
from .speculation import Drafter


@dataclass(slots=True, eq=False)
class Sequence:
    """A request, its tokens (prompt, then output) and the KV blocks that hold the computed ones.

    `seed` is the request's own or one drawn for it. Seed and position decide a token's noise, so a
    preempted sequence samples the same tokens again.
    """

    request: Submit
    seed: int
    token_ids: list[int] = field(default_factory=list)
    """Empty until the scheduler looks for room for it; until then its prompt stays packed."""
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_trusted_tokens: int = 0
    """Computed tokens that gave finite logits, or came from the prefix cache."""
    num_sealed_blocks: int = 0
    sealed_key: int = 0
    """Identity of the last block put into the prefix cache: the parent of the next."""
    matched_at: int = -1
    """The pool's `version` at its last lookup in the prefix cache."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache spared, at the first admission."""
    order: int = 0
    """Rank by arrival: who is older."""
    num_findable_tokens: int = 0
    """Prompt tokens that the prefix cache had at its arrival."""
    queued_s: float = 0.0
    first_s: float = 0.0
    """When it had its first token."""
    last_s: float = 0.0
    """When it had its last token."""
    num_late: int = 0
    """Gaps over the target that was in force."""
    is_in_time: bool = True
    """False if its first token came after its deadline."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Computed tokens that it had when it was preempted, until it runs again."""
    drafter: Drafter | None = None
    """Its guesses, if it may speculate."""
    has_begun: bool = False
    """True once it was admitted."""
    is_background: bool = False
    """True if it runs only where others leave room."""
    wait_cap_s: float = 0.0
    wait_kv_s: float = 0.0
    passed_s: float = 0.0
    """Seconds of steps filled by sequences that the order puts before it."""
    queued_at: tuple[float, ...] = ()
    """Readings of the scheduler's wait clocks when it was queued."""
    editor: Editor | None = None
    """State of penalties, biases and word lists; made when first needed."""
    scores: Scores | None = None
    """Scores of the last sampled token, if the request asks for log-probabilities."""
    prompt_scores: Scores | None = None
    """Scores of the prompt tokens of the last step, if the request asks for them."""
    num_scored_tokens: int = 1
    """Prompt tokens that need no more scores; the first never has one."""
    num_prompt_tokens: int = field(init=False)
    stop_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.request.num_prompt_tokens
        self.stop_token_ids = frozenset(self.request.stop_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) or self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def has_first(self) -> bool:
        """True if it has had its first token."""
        return self.num_output_tokens > 0

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before its next one, without those that the cache may have."""
        found = 0 if self.block_ids else self.num_findable_tokens
        return self.num_uncomputed_tokens - found

    @property
    def is_drafting(self) -> bool:
        """True if it speculates and its recent drafts were right."""
        return self.drafter is not None and self.drafter.is_on

    @property
    def needs_prompt_scores(self) -> bool:
        """True if it needs logits of prompt positions, which no cached block has."""
        wants = self.request.sampling.prompt_logprobs is not None
        return wants and self.num_scored_tokens < self.num_prompt_tokens

    def due_s(self, limits: EngineLimits) -> float:
        """When its first token is due."""
        return limits.due_s(self.request.arrived_s, self.request.ttft_ms)

    def time_spent(self, now: float) -> FirstParts:
        """The parts of its time until `now`, when its first token came."""
        waited_s = self.wait_cap_s + self.wait_kv_s
        prefill_s = now - self.request.submitted_s - waited_s
        return FirstParts(
            self.wait_cap_s, self.wait_kv_s, prefill_s, self.cached_tokens, self.passed_s
        )

    def append(self, token_id: int, eos_token_ids: Set[int]) -> FinishReason | None:
        """Add one sampled token; returns the finish reason, or None."""
        self.token_ids.append(token_id)
        request = self.request
        if self.num_output_tokens >= request.min_tokens:
            if token_id in eos_token_ids and not request.ignore_eos:
                return "stop"
            if token_id in self.stop_token_ids:
                return "stop"
        return "length" if self.num_output_tokens >= request.max_tokens else None

    def forbidden_tokens(self, eos_token_ids: Set[int], ahead: int = 0) -> list[int]:
        """Tokens that must not be sampled next: those that would end it before `min_tokens`.

        `ahead`: drafted tokens before that token. As in vLLM, the end tokens stay forbidden even
        with ignore_eos.
        """
        if self.num_output_tokens + ahead >= self.request.min_tokens:
            return []
        return [*sorted(eos_token_ids), *self.stop_token_ids]
