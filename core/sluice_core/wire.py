"""Messages between a frontend and its engine: of a worker, its API process and its engine process.

Transport: one AF_UNIX stream socket pair; each frame is a 4-byte little-endian length and a msgpack
body. `encode_frame` writes one; the reader of each side cuts the stream with `split_frames`.
Times are CLOCK_MONOTONIC seconds, which both processes share. No torch in here.

What an engine sends is bounded, as behind a gate it is somebody else's. A message with an
impossible number is no message. A tick adds numbers up, so they are far below its bounds.
"""

import struct
from array import array
from collections.abc import Iterable

import msgspec
from msgspec import Struct

from .bounded import Count, Finite, NonNegative, StepSeconds, Tokens
from .contract import StepModel
from .port import (
    NO_BACKGROUND,
    Background,
    EngineFacts,
    EngineLimits,
    EngineLoad,
    EngineStep,
    FinishReason,
    FirstParts,
    Scores,
)
from .work import TOKEN_BYTES, Sampling

MAX_FRAME_BYTES = 64 << 20


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


class Submit(Frame, frozen=True):
    """A request that the API process has validated, and sent at `submitted_s`.

    `prompt`: token ids as packed int32; a list would take ten times the memory, and many may wait.
    `arrived_s`, `ttft_ms`: start and length of its own first-token deadline, if it has one.
    `is_another`: it has the prompt of the request before it, and another answer is wanted.
    `client`: whose share of the places it takes. `is_background`: as in `Work`.
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
    is_background: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def prompt_token_ids(self) -> list[int]:
        """A new list of them."""
        return unpacked(self.prompt)


class Encode(Frame, frozen=True):
    """A text that becomes one vector, or the numbers of its classes. `prompt`: token ids, as in
    `Submit`. `num_skipped`: its first tokens that do not count for the vector. `num_second`: its
    last ones, which are a pair's second text. `pixels`: of an image in place of a text, uint8
    [height, width, 3]. `is_background`: as in `Work`."""

    request_id: str
    prompt: bytes
    num_skipped: Tokens = 0
    num_second: Tokens = 0
    pixels: bytes = b""
    is_background: bool = False


class Abort(Frame, frozen=True):
    """Free the request's blocks within one step: its client left. Unknown ids are ignored.

    `if_waiting`: only if it has not begun, as it can no longer be in time; `Finished` tells.
    """

    request_id: str
    if_waiting: bool = False


class CheckIntegrity(Frame, frozen=True):
    """Asks for an `Integrity` answer."""


class Shutdown(Frame, frozen=True):
    """Leave the step loop once nothing runs or waits, then exit 0."""


ToEngine = Submit | Encode | Abort | EngineLimits | CheckIntegrity | Shutdown


# engine process -> API process


class Starting(Frame, frozen=True):
    """Progress of the start: weights, memory, profile."""

    phase: str
    percent: Count


class Ready(EngineFacts, frozen=True, tag=True, array_like=True):
    """The engine serves."""


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
    first: FirstParts | None
    scores: Scores | None = None
    num_preemptions: Count = 0


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
    snapshot: EngineLoad
    step_model: StepModel | None = None
    num_draft_tokens: Tokens = 0
    num_padding: Tokens = 0
    is_slow: bool = False
    prompts: list[PromptScores] = []
    admitted: list[str] = []
    price_s: NonNegative = 0.0
    is_long: bool = False
    background: Background = NO_BACKGROUND

    def as_step(self, num_tokens: int | None = None) -> EngineStep:
        """Return the step as a frontend counts it. `num_tokens`: as in `EngineStep`; None: its
        own."""
        num = len(self.tokens) if num_tokens is None else num_tokens
        return EngineStep(
            self.epoch, self.started_s, self.step_s, self.num_decodes, self.num_prefill_tokens,
            self.num_running, num, self.step_model, self.num_draft_tokens, self.num_padding,
            self.is_slow, self.admitted, self.price_s, self.background,
        )  # fmt: skip


class Vector(Struct, frozen=True, array_like=True):
    """A text's vector: `values` are packed float32."""

    request_id: str
    values: bytes


class EncodeReport(Frame, frozen=True):
    """One step over texts, as `StepReport`. `num_tokens`, `num_running`: of its texts."""

    vectors: list[Vector]
    epoch: Count
    started_s: Finite
    step_s: StepSeconds
    num_tokens: Tokens
    num_running: Tokens
    snapshot: EngineLoad
    step_model: StepModel | None = None
    is_slow: bool = False
    admitted: list[str] = []
    background: Background = NO_BACKGROUND

    def as_step(self) -> EngineStep:
        """Return the step as a frontend counts it."""
        return EngineStep(
            self.epoch, self.started_s, self.step_s, 0, self.num_tokens, self.num_running,
            step_model=self.step_model, is_slow=self.is_slow, admitted=self.admitted,
            background=self.background,
        )  # fmt: skip


class Finished(Frame, frozen=True):
    """A request ended without a token: aborted, or failed with `error` (its sentence)."""

    request_id: str
    error: str | None
    snapshot: EngineLoad


class Heartbeat(Frame, frozen=True):
    """Sent at least once a second, also when idle. `steps`: their counter; `busy`: work exists."""

    steps: Count
    busy: bool
    snapshot: EngineLoad


class Integrity(Frame, frozen=True):
    """Answer to `CheckIntegrity`: None, or the sentence that says which invariant fails."""

    problem: str | None


class Failed(Frame, frozen=True):
    """The engine cannot start or go on; it exits non-zero after this."""

    message: str


FromEngine = (
    Starting | Ready | StepReport | EncodeReport | Finished | Heartbeat | Integrity | Failed
)

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
