"""A request to a foreign engine, as the gate counts it. Pure.

The body is read and never changed. If it makes no sense, it counts as one sequence, because the
engine answers with its own error. Only what harms others, and the gate's own fields, are refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct
from sluice_core.contract import MAX_MS
from sluice_core.errors import RequestError, UnsupportedParameter
from sluice_core.work import Deadlines, Work

Framing = Literal["sse", "ndjson", "none"]
"""How events of a streamed answer are told apart; "none" for an answer in one piece."""
BYTES_PER_TOKEN = 4
"""Of text, before any answer told better; token ids count as so many bytes each."""


class Dialect(NamedTuple):
    """A route's body. `prompts`: fields with a prompt or a list of them; `chat`: the field of a
    conversation, which is one prompt; `framing`: of a streamed answer, if it can be streamed;
    `is_stream`: what a body that does not say gets."""

    prompts: tuple[str, ...] = ()
    chat: str = "messages"
    framing: Framing = "none"
    is_stream: bool = False


_INPUTS = Dialect(("input", "inputs", "prompt"))
_RANKED = Dialect(("documents", "texts"))
_SCORED = Dialect(("documents", "data_2", "text_2"))
_GENERATE = ("inputs", "prompt", "text", "input_ids")  # TGI's, ours, and two of SGLang

GENERATING: Mapping[str, Dialect] = {
    "/v1/completions": Dialect(("prompt",), framing="sse"),
    "/v1/chat/completions": Dialect(framing="sse"),
    "/completions": Dialect(("prompt",), framing="sse"),  # llama.cpp's aliases
    "/chat/completions": Dialect(framing="sse"),
    "/v1/responses": Dialect(chat="input", framing="sse"),
    "/api/generate": Dialect(("prompt",), framing="ndjson", is_stream=True),
    "/api/chat": Dialect(framing="ndjson", is_stream=True),
    "/generate": Dialect(_GENERATE, framing="sse"),
    "/generate_stream": Dialect(_GENERATE, framing="sse", is_stream=True),
    "/v1/messages": Dialect(framing="sse"),
    "/completion": Dialect(("prompt",), framing="sse"),  # llama.cpp's own
    "/infill": Dialect(("prompt",), framing="sse"),
    "/v1/rerank": _RANKED,
    "/rerank": _RANKED,
    "/v1/score": _SCORED,
    "/score": _SCORED,
} | dict.fromkeys(
    (
        "/v1/embeddings",
        "/embeddings",
        "/embed",
        "/api/embed",
        "/api/embeddings",
        "/classify",
        "/pooling",
    ),
    _INPUTS,
)
"""The routes whose bodies are counted. All others pass, and count as one sequence."""

_RUNNER_OPTIONS = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread")
"""Ollama loads the model anew if one of them differs (`api.Runner`, `needsReload` in its 0.17)."""
_YES = (True, "true", "True", "1", "on", "yes")
"""What an engine on pydantic takes for true."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the engine. `prompts`: bytes of each; `n`: answers to each prompt.
    `framing`: of this answer. `priority`: vLLM's, lower goes first."""

    prompts: tuple[int, ...]
    n: int
    is_stream: bool
    framing: Framing
    priority: int
    deadlines: Deadlines

    def work(self, size: "TokenSize", client: str) -> Work:
        """The same with estimated tokens, for the share of `client`."""
        tokens = tuple(size.tokens(num) for num in self.prompts)
        return Work(tokens, self.n, self.is_stream, self.deadlines, self.priority, client)


class _Body(Struct):
    """The fields of all dialects that say how much is asked, of any kind."""

    prompt: Any = None
    messages: Any = None
    input: Any = None
    inputs: Any = None
    input_ids: Any = None
    text: Any = None
    texts: Any = None
    documents: Any = None
    data_2: Any = None
    text_2: Any = None
    n: Any = None
    n_cmpl: Any = None  # llama.cpp's
    best_of: Any = None
    parameters: Any = None
    sampling_params: Any = None
    stream: Any = None
    priority: Any = None
    slo_ttft_ms: Any = None
    slo_tpot_ms: Any = None
    options: Any = None
    keep_alive: Any = None


_decoder = msgspec.json.Decoder(_Body)


def read(path: str, body: bytes, headers: Mapping[str, str], engine: str) -> Asked:
    """The request to `path`; names of `headers` are lower case.

    Raises RequestError for a deadline that is none, and for what makes Ollama load its model anew.
    """
    dialect = GENERATING.get(path)
    fields = _parsed(body) if dialect is not None else None
    if dialect is None or fields is None:
        return Asked((len(body),), 1, False, "none", 0, Deadlines().with_headers(headers))
    if engine == "ollama" and path.startswith("/api/"):
        _refuse_reload(fields)
    own = Deadlines(
        _deadline(fields.slo_ttft_ms, "slo_ttft_ms"), _deadline(fields.slo_tpot_ms, "slo_tpot_ms")
    )
    streams = dialect.is_stream if fields.stream is None else fields.stream in _YES
    is_stream = streams and dialect.framing != "none"
    return Asked(
        prompts=tuple(_sizes(fields, dialect)) or (0,),
        n=_num_answers(fields) if dialect.framing != "none" else 1,
        is_stream=is_stream,
        framing=dialect.framing if is_stream else "none",
        priority=_whole(fields.priority),
        deadlines=own.with_headers(headers),
    )


def _parsed(body: bytes) -> _Body | None:
    """None if no engine can read it. Python's parser takes NaN and huge numbers, so engines do."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return msgspec.convert(json.loads(body), _Body)
    except (ValueError, msgspec.ValidationError, RecursionError):
        return None


def _sizes(fields: _Body, dialect: Dialect) -> Iterator[int]:
    conversation = getattr(fields, dialect.chat)
    if isinstance(conversation, list):
        yield sum(_size(item.get("content")) for item in conversation if isinstance(item, dict))
    elif conversation is not None:
        yield _size(conversation)
    for name in dialect.prompts:
        value = getattr(fields, name)
        if isinstance(value, list) and not _is_ids(value):
            yield from map(_size, value)
        elif value is not None:
            yield _size(value)


def _is_ids(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], int)


def _size(value: object) -> int:
    """Bytes of the text or of the token ids in a prompt, a document or a message's content."""
    if isinstance(value, list):
        if _is_ids(value):
            return BYTES_PER_TOKEN * len(value)
        return sum(len(_text(part).encode("utf-8", "surrogatepass")) for part in value)
    return len(_text(value).encode("utf-8", "surrogatepass"))


def _text(part: object) -> str:
    text = part.get("text", part.get("content")) if isinstance(part, dict) else part
    return text if isinstance(text, str) else ""


def _num_answers(fields: _Body) -> int:
    """Beams are `n` as well (vLLM)."""
    told = (
        fields.n,
        fields.n_cmpl,
        fields.best_of,
        _inside(fields.parameters, "best_of"),  # TGI's
        _inside(fields.sampling_params, "n"),  # SGLang's
    )
    return max(1, *map(_whole, told))


def _inside(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _whole(value: object) -> int:
    """3, 3.0 and "3" are whole numbers for an engine on pydantic; all else is 0."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 0
    if isinstance(value, float):
        return int(value) if value.is_integer() else 0
    return int(value) if isinstance(value, int) else 0


def _deadline(value: object, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_MS:
        raise RequestError(
            f"{name} must be milliseconds over 0 and at most {MAX_MS:.0f}", param=name
        )
    return float(value)


def _refuse_reload(fields: _Body) -> None:
    options = fields.options if isinstance(fields.options, dict) else {}
    for name in _RUNNER_OPTIONS:
        if options.get(name) is not None:
            raise UnsupportedParameter(
                f"options.{name} would load the model anew for everyone; set it where it is served",
                param=f"options.{name}",
            )
    if _is_zero(fields.keep_alive):
        raise UnsupportedParameter(
            "keep_alive 0 would unload the model for everyone", param="keep_alive"
        )


def _is_zero(keep_alive: object) -> bool:
    """Also as a duration of Go: "0", "0s", "0h0m"."""
    if isinstance(keep_alive, str):
        return "0" in keep_alive and not any(digit in keep_alive for digit in "123456789")
    return keep_alive is not None and keep_alive == 0


class TokenSize:
    """Mean bytes of text per token, learnt from what answers tell of their prompts."""

    def __init__(self) -> None:
        self._bytes, self._tokens = BYTES_PER_TOKEN, 1

    def learn(self, num_bytes: int, num_tokens: int) -> None:
        """A prompt of so many bytes was so many tokens."""
        if num_bytes > 0 and num_tokens > 0:
            self._bytes += num_bytes
            self._tokens += num_tokens

    def tokens(self, num_bytes: int) -> int:
        """Tokens of a prompt of so many bytes; at least 1."""
        return max(1, round(num_bytes * self._tokens / self._bytes))
