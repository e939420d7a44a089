"""What a frontend exchanges with any engine, whatever speaks for it. Pure.

A worker's engine process, another engine's server behind a gate, and a simulated pod all give it
these values. How a message of the worker's socket carries them is the business of `wire`.
"""

import math
from typing import Literal, NamedTuple

from msgspec import Struct

from .bounded import Count, Finite, Positive, Share, Tokens
from .contract import CapIs, ChunkIs, GapsFrom, MemoryReport, SchedulingPolicy, StepModel

FinishReason = Literal["stop", "length", "abort", "error"]
NO_MEMORY = MemoryReport(planned={}, measured={}, kv_tokens=0)


class EngineLimits(Struct, frozen=True, tag=True, array_like=True):
    """The live limits, in force from the next step on. The frontend has checked them.

    `ttft_ms`: deadline of requests without one of their own. `policy`: the order of service.
    `hold_share`: share of the time to a deadline for which a computed prompt may be held (`law`).
    """

    epoch: int
    cap: int
    max_num_batched_tokens: int
    itl_ms: float | None = None
    ttft_ms: float | None = None
    policy: SchedulingPolicy = "fcfs"
    hold_share: Share = 1.0

    def due_s(self, arrived_s: float, ttft_ms: float | None) -> float:
        """Return when a first token is due to the order. `ttft_ms`: the request's own deadline."""
        limit_ms = ttft_ms or self.ttft_ms
        if self.policy != "deadline" or limit_ms is None:
            return math.inf
        return arrived_s + limit_ms / 1e3


class Manner(NamedTuple):
    """How an engine is steered and measured, as in `contract.RuntimeConfig`; by default our own."""

    cap_is: CapIs = "live"
    gaps_from: GapsFrom = "tokens"
    chunk_is: ChunkIs = "live"


class EngineFacts(Struct, frozen=True, array_like=True):
    """What an engine that serves says of itself. Servers of others do not tell the defaults.

    `predicted_cap`: the cap that the start-up profile predicts. `kernels`: the kernels in use, and
    the reason if they are not the best ones; or another engine's name.
    """

    ceiling: Positive
    predicted_cap: Positive
    cap: Positive
    max_model_len: Positive
    block_size: Count = 1
    num_blocks: Count = 0
    kv_tokens: Count = 0
    memory: MemoryReport = NO_MEMORY
    step_model: StepModel | None = None
    kernels: str = ""


class SpeculationTotals(Struct, frozen=True, array_like=True):
    """Drafts since the start: how many, their tokens, and those accepted by place in the draft."""

    num_drafts: Count
    draft_tokens: Count
    accepted_by_position: list[Count]


class EngineLoad(Struct, frozen=True, array_like=True):
    """The engine's state after a step. `rounding_waste`: share of KV slots. `waiting_turn`: waiting
    requests that cap and blocks would admit, while the order serves others first. Background
    requests are in their own two counts alone."""

    running: Tokens = 0
    waiting_cap: Tokens = 0
    waiting_kv: Tokens = 0
    used_blocks: Count = 0
    cached_blocks: Count = 0
    num_blocks: Count = 0
    num_preemptions: Count = 0
    preempted_tokens: Count = 0
    prefix_queries: Count = 0
    prefix_hits: Count = 0
    rounding_waste: Finite = 0.0
    speculation: SpeculationTotals | None = None
    waiting_turn: Tokens = 0
    background_running: Tokens = 0
    background_waiting: Tokens = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for cap or blocks."""
        return self.waiting_cap + self.waiting_kv

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0


class Background(Struct, frozen=True, array_like=True):
    """The part of a step that was for background requests: tokens decoded and prefilled, tokens
    given to them, and how many of them ran."""

    decodes: Tokens = 0
    prefill_tokens: Tokens = 0
    tokens: Tokens = 0
    running: Tokens = 0


NO_BACKGROUND = Background()


class EngineStep(Struct, frozen=True):
    """One step of an engine that tells its steps. Fields are as in `wire.StepReport`.

    `num_tokens`: tokens that it gave to requests; 0 where they are counted on their way.
    `background`: its part in all of these.
    """

    epoch: int
    started_s: float
    step_s: float
    num_decodes: int
    num_prefill_tokens: int
    num_running: int
    num_tokens: int = 0
    step_model: StepModel | None = None
    num_draft_tokens: int = 0
    num_padding: int = 0
    is_slow: bool = False
    admitted: list[str] = []
    price_s: float = 0.0
    background: Background = NO_BACKGROUND


class FirstParts(Struct, frozen=True, array_like=True):
    """The parts of a request's time to its first token (seconds), and the tokens from the cache.

    `prefill_s`: all time since submission but the two waits; includes a step under way.
    `passed_s`: its part in steps filled by requests that the order puts before this one.
    """

    wait_cap_s: Finite = 0.0
    wait_kv_s: Finite = 0.0
    prefill_s: Finite = 0.0
    cached_tokens: Tokens = 0
    passed_s: Finite = 0.0


class Scores(Struct, frozen=True, array_like=True):
    """Raw log-probabilities of successive tokens: before temperature, penalties or any other edit.

    `width` = 1 + the requested number of likeliest tokens. `token_ids` (int32) and `logprobs`
    (float32) are [tokens, width]: the token itself, then the likeliest in order. `ranks` (int32):
    the token's own rank, 1 for the likeliest. Packed bytes: a prompt may have a million of them.
    """

    width: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
