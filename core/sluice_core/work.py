"""What admission, queue, order and forecast need to know of a request. Pure.

A frontend reads it once, from the request. Nobody behind it reads the request again for these.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Struct

from .bounded import number
from .contract import MAX_MS
from .errors import RequestError

TOKEN_BYTES = array("i").itemsize
"""Bytes of a token id where a prompt waits."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


CLASS_HEADER, BACKGROUND = "x-slo-class", "background"
"""Header of a request that takes only the places that others leave, and its one value."""
QUIET_S = 10.0
"""Seconds without other requests after which background ones may pass the cap: no latency is left
that it protects."""


def is_background(headers: Mapping[str, str]) -> bool:
    """True if `headers` say so; raises RequestError for a class that there is not."""
    said = headers.get(CLASS_HEADER)
    if said not in (None, BACKGROUND):
        raise RequestError(f"{CLASS_HEADER} must be {BACKGROUND}, or left out", param=CLASS_HEADER)
    return said is not None


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Milliseconds to the first token, and mean per token after it; None: no deadline.

    Body fields, or the headers that load tools send. If a request has both, they must agree.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def with_headers(self, headers: Mapping[str, str]) -> "Deadlines":
        """These and those of `headers`; raises RequestError naming the header that is wrong."""
        return Deadlines(
            _merged(self.ttft_ms, headers, "x-slo-ttft-ms"),
            _merged(self.tpot_ms, headers, "x-slo-tpot-ms"),
        )


def _merged(field_ms: float | None, headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return field_ms
    header_ms = number(text, MAX_MS)
    if not header_ms:
        raise RequestError(
            f"{name} must be milliseconds over 0 and at most {MAX_MS:.0f}", param=name
        )
    if field_ms is not None and field_ms != header_ms:
        raise RequestError(f"{name} and the body's field ask for different deadlines", param=name)
    return header_ms


@dataclass(frozen=True, slots=True)
class Work:
    """A request as the engine will do it. `prompts`: tokens of each; `n`: answers to each.
    `priority`: lower goes first, as in vLLM. `client`: whose share it takes. `is_exact`: tokens
    and answers are counted as the engine counts them. `is_background`: it takes only the places
    that others leave, and counts in no target."""

    prompts: tuple[int, ...]
    n: int = 1
    is_stream: bool = False
    deadlines: Deadlines = Deadlines()
    priority: int = 0
    client: str = ""
    is_exact: bool = True
    is_background: bool = False

    @property
    def num_sequences(self) -> int:
        """Places that it takes in the engine."""
        return len(self.prompts) * self.n

    @property
    def num_tokens(self) -> int:
        """Prompt tokens, counted for each answer."""
        return self.n * sum(self.prompts)


class Sampling(Struct, frozen=True, array_like=True):
    """Parameters that change a request's distribution beyond temperature; defaults change nothing.

    `top_k` 0: all. `allowed_token_ids` None: all. `bad_words`: token ids of each spelling.
    `logprobs`, `prompt_logprobs`: likeliest tokens to report beside each; None: report nothing.
    `label_ids`: tokens to report in place of the likeliest ones and of the token itself.
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
    label_ids: tuple[int, ...] = ()

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
