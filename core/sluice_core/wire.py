"""Messages between a frontend and its engine: of a worker, its API process and its engine process.

Transport: one AF_UNIX stream socket pair; each frame is a 4-byte little-endian length and a msgpack
body. `encode_frame` writes one; the reader of each side cuts the stream with `split_frames`.
Times are CLOCK_MONOTONIC seconds, which both processes share. No torch in here.

What an engine sends is bounded, as behind a gate it is somebody else's. A message with an
impossible number is no message. A tick adds numbers up, so they are far below its bounds.
"""

import math
import struct
from array import array
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import Struct

from sluice_core.bounded import (
    Count,
    Finite,
    NonNegative,
    Positive,
    Share,
    StepSeconds,
    Tokens,
)
from sluice_core.contract import MemoryReport, SchedulingPolicy, StepModel

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_FRAME_BYTES = 64 << 20
TOKEN_BYTES = array("i").itemsize
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as a `Submit` has them."""
    return array("i", token_ids).tobytes()


def unpacked(prompt: bytes) -> list[int]:
    """The token ids of a `Submit`'s prompt."""
    token_ids = array("i")
    token_ids.frombytes(prompt)
    return token_ids.tolist()


class Frame(Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages; the class name is the tag."""


# API process -> engine process


class Sampling(Struct, frozen=True, array_like=True):
    """Parameters that change a request's distribution beyond temperature; defaults change nothing.

    `top_k` 0: all. `allowed_token_ids` None: all. `bad_words`: token ids of each spelling.
    `logprobs`, `prompt_logprobs`: likeliest tokens to report beside each; None: report nothing.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_plain(self) -> bool:
        """True if only temperature and seed decide, and only token ids are reported."""
        return self == _PLAIN

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before temperature divides them."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
        )


_PLAIN = Sampling()


class Submit(Frame, frozen=True):
    """A request that the API process has validated, and sent at `submitted_s`.

    `prompt`: token ids as packed int32; a list would take ten times the memory, and many may wait.
    `arrived_s`, `ttft_ms`: start and length of its own first-token deadline, if it has one.
    `is_another`: it has the prompt of the request before it, and another answer is wanted.
    `client`: whose share of the places it takes.
    """

    request_id: str
    prompt: bytes
    max_tokens: int
    temperature: float
    seed: int | None
    ignore_eos: bool
    stop_token_ids: list[int]
    min_tokens: int
    submitted_s: float
    cache_salt: str = ""
    sampling: Sampling = Sampling()
    arrived_s: float = 0.0
    ttft_ms: float | None = None
    priority: int = 0
    is_another: bool = False
    client: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def prompt_token_ids(self) -> list[int]:
        """A new list of them."""
        return unpacked(self.prompt)


class Abort(Frame, frozen=True):
    """Free the request's blocks within one step: its client left. Unknown ids are ignored.

    `if_waiting`: only if it has not begun, as it can no longer be in time; `Finished` tells.
    """

    request_id: str
    if_waiting: bool = False


class EngineLimits(Frame, frozen=True):
    """The live limits, in force from the next step on. The API process has checked them.

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
        """When the first token is due to the order. `ttft_ms`: the request's own deadline."""
        limit_ms = ttft_ms or self.ttft_ms
        if self.policy != "deadline" or limit_ms is None:
            return math.inf
        return arrived_s + limit_ms / 1e3


class CheckIntegrity(Frame, frozen=True):
    """Asks for an `Integrity` answer."""


class Shutdown(Frame, frozen=True):
    """Leave the step loop once nothing runs or waits, then exit 0."""


ToEngine = Submit | Abort | EngineLimits | CheckIntegrity | Shutdown


# engine process -> API process


class Starting(Frame, frozen=True):
    """Progress of the start: weights, memory, profile."""

    phase: str
    percent: Count


class Ready(Frame, frozen=True):
    """The engine serves. `predicted_cap`: the cap that the start-up profile predicts.

    `kernels`: the kernels in use, and the reason if they are not the best ones.
    """

    ceiling: Positive
    predicted_cap: Positive
    cap: Positive
    max_model_len: Positive
    block_size: Count
    num_blocks: Count
    kv_tokens: Count
    memory: MemoryReport
    step_model: StepModel | None
    kernels: str


class FirstToken(Struct, frozen=True, array_like=True):
    """The parts of a request's time to its first token (seconds), and the tokens from the cache.

    `prefill_s`: all time since submission but the two waits; includes a step under way.
    `passed_s`: its part in steps filled by requests that the order puts before this one.
    """

    wait_cap_s: Finite
    wait_kv_s: Finite
    prefill_s: Finite
    cached_tokens: Tokens
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


class PromptScores(Struct, frozen=True, array_like=True):
    """Scores of the next tokens of a request's prompt; its first token has none."""

    request_id: str
    scores: Scores


class TokenOut(Struct, frozen=True, array_like=True):
    """One new token of one request. `first` only with the first token.

    `num_preemptions`: how often the request has been preempted so far.
    """

    request_id: str
    token_id: Tokens
    finish_reason: FinishReason | None
    first: FirstToken | None
    scores: Scores | None = None
    num_preemptions: Count = 0


class SpeculationTotals(Struct, frozen=True, array_like=True):
    """Drafts since the start: how many, their tokens, and those accepted by place in the draft."""

    num_drafts: Count
    draft_tokens: Count
    accepted_by_position: list[Count]


class Snapshot(Struct, frozen=True, array_like=True):
    """The engine's state after a step. `rounding_waste`: share of KV slots. `waiting_turn`: waiting
    requests that cap and blocks would admit, while the order serves others first."""

    running: Tokens
    waiting_cap: Tokens
    waiting_kv: Tokens
    used_blocks: Count
    cached_blocks: Count
    num_blocks: Count
    num_preemptions: Count
    preempted_tokens: Count
    prefix_queries: Count
    prefix_hits: Count
    rounding_waste: Finite = 0.0
    speculation: SpeculationTotals | None = None
    waiting_turn: Tokens = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for cap or blocks."""
        return self.waiting_cap + self.waiting_kv

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0


class StepReport(Frame, frozen=True):
    """One step: its tokens and its record. `started_s`: it was scheduled, with all that had come.

    `at_cap`: it ran at the cap (`AT_CAP_SHARE`).

    `num_decodes` are sequences; drafted tokens and a static batch's padding come on top. `is_slow`:
    under interference, see `StepTimes.slowdown`. `prompts`: its scores of prompts; a request's
    last ones come no later than its first token. `admitted`: requests that began.
    `price_s`: seconds that the order assumes for a prefill token; 0 without an order. `is_long`:
    the law made it longer than the gap target, for first tokens.
    """

    tokens: list[TokenOut]
    epoch: Count
    started_s: Finite
    step_s: StepSeconds
    num_decodes: Tokens
    num_kv_tokens: Count
    num_prefill_tokens: Tokens
    num_running: Tokens
    at_cap: bool
    snapshot: Snapshot
    step_model: StepModel | None = None
    num_draft_tokens: Tokens = 0
    num_padding: Tokens = 0
    is_slow: bool = False
    prompts: list[PromptScores] = []
    admitted: list[str] = []
    price_s: NonNegative = 0.0
    is_long: bool = False


class Finished(Frame, frozen=True):
    """A request ended without a token: aborted, or failed with `error` (its sentence)."""

    request_id: str
    error: str | None
    snapshot: Snapshot


class Heartbeat(Frame, frozen=True):
    """Sent at least once a second, also when idle. `steps`: their counter; `busy`: work exists."""

    steps: Count
    busy: bool
    snapshot: Snapshot


class Integrity(Frame, frozen=True):
    """Answer to `CheckIntegrity`: None, or the sentence that says which invariant fails."""

    problem: str | None


class Failed(Frame, frozen=True):
    """The engine cannot start or go on; it exits non-zero after this."""

    message: str


FromEngine = Starting | Ready | StepReport | Finished | Heartbeat | Integrity | Failed

_encoder = msgspec.msgpack.Encoder()
to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: object) -> bytes:
    """`message` as one frame."""
    body = _encoder.encode(message)
    return struct.pack("<I", len(body)) + body


def split_frames(buffer: bytearray, most: int = MAX_FRAME_BYTES) -> list[bytes]:
    """Cut complete frame bodies off the front of `buffer`, leaving the rest in it. Raises
    ValueError for one of more than `most` bytes."""
    bodies, start = [], 0
    while len(buffer) - start >= 4:
        (length,) = struct.unpack_from("<I", buffer, start)
        if length > most:
            raise ValueError(f"a frame of {length} bytes is over the limit of {most}")
        if len(buffer) - start - 4 < length:
            break
        bodies.append(bytes(buffer[start + 4 : start + 4 + length]))
        start += 4 + length
    del buffer[:start]
    return bodies
