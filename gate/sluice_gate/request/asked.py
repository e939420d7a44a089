"""A request to a foreign engine, read once: what is counted here is what the engine gets. Pure.

A body goes to the engine as it came, or as it is written here, or is refused. What no reader takes
for JSON is refused on the routes that take JSON, since some readers stop early or repair it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec
from msgspec import Raw
from sluice_core.contract import MAX_MS
from sluice_core.errors import RequestError
from sluice_core.work import Deadlines, Work, is_background
from sluice_frontend.api.operations import Counting

from . import ollama
from .encoding import decoded
from .estimate import BYTES_PER_TOKEN, TokenSize
from .json_object import check_spelling, first, items, members, scalar
from .operations import COUNTED, counting_of

MAX_SEQUENCES = 1 << 14
"""Of one request, as vLLM's VLLM_MAX_N_SEQUENCES: each has a timer here."""
PICTURE_BYTES = 4096
"""What a picture or sound inside a body counts as text; its own bytes are no tokens."""
_INLINE = re.compile(rb'"data:[^"]{1024,}"')
_NUMBERS = re.compile(rb"\[\s*[-\d]")
_BEFORE_JSON = b"\xef\xbb\xbf\xfe\xff\x00 \t\r\n"
"""Spaces and byte order marks, which some readers skip."""
_COUNTS = ("n", "n_cmpl", "best_of")  # llama.cpp's is the second; beams are `n` as well (vLLM)
_INSIDE = ("parameters", "sampling_params", "options")
"""Objects with fields that decide: TGI's `best_of`, SGLang's `n`, Ollama's options."""
_OWN = ("slo_ttft_ms", "slo_tpot_ms", "priority")
_DECIDING = frozenset(
    (*_COUNTS, *_INSIDE, *_OWN, "stream", "model", "name", "keep_alive", "messages")
    + counting_of("").prompts
)
_YES = (True, "true", "True", "1", "on", "yes")
"""What an engine on pydantic takes for true."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request asks of the engine. `prompts`: bytes of each; `n`: answers to each prompt.
    `priority`: vLLM's, lower goes first. `is_background`: as in `Work`. `body`: what the engine
    gets, None for what came."""

    prompts: tuple[int, ...]
    n: int = 1
    is_stream: bool = False
    priority: int = 0
    deadlines: Deadlines = Deadlines()
    is_background: bool = False
    body: bytes | None = None

    def work(self, size: TokenSize, client: str) -> Work:
        """The same with estimated tokens, for the share of `client`."""
        tokens = tuple(size.tokens(num) for num in self.prompts)
        return Work(
            *(tokens, self.n, self.is_stream, self.deadlines, self.priority, client),
            is_exact=False,
            is_background=self.is_background,
        )


@dataclass(frozen=True, slots=True)
class Door:
    """What decides of every request to an engine. `engine`: its name; `model`: that it serves, if
    known; `max_bytes`: of a body, also when it is decoded."""

    engine: str
    model: str | None
    max_bytes: int


def read(door: Door, path: str, body: bytes, headers: Mapping[str, str]) -> Asked:
    """The request to `path`, which does not only read; names of `headers` are lower case.

    Raises RequestError for what has two readings, and for what the engine must not get.
    """
    deadlines, is_behind = Deadlines().with_headers(headers), is_background(headers)
    text = decoded(body, headers.get("content-encoding", ""), door.max_bytes)
    found = None if text is None else _object(path, text, headers.get("content-type", ""))
    if text is None or found is None:
        if door.engine == "ollama":
            raise RequestError("this route takes a JSON object")
        return Asked((len(body),), deadlines=deadlines, is_background=is_behind)
    check_spelling(found, _DECIDING)
    inside = {name: list(_inside(found.get(name))) for name in _INSIDE}
    asked = _counted(counting_of(path), found, inside, _text_bytes(text))
    own = Deadlines(_deadline(found, "slo_ttft_ms"), _deadline(found, "slo_tpot_ms"))
    asked = replace(asked, deadlines=own.with_headers(headers), is_background=is_behind)
    if door.engine == "ollama":
        given = ollama.checked(path, found, inside["options"], door.model)
        if given is not found:
            return replace(asked, body=msgspec.json.encode(given))
    return asked


def _object(path: str, text: bytes, content_type: str) -> dict[str, Raw] | None:
    """The members of a JSON body; None for a body of another kind, on a route without a row."""
    is_json = path in COUNTED or "json" in content_type.lower()
    if not is_json and not text.lstrip(_BEFORE_JSON).startswith(b"{"):
        return None
    found = members(text)
    if found is None and path in COUNTED:
        raise RequestError("the body must be a JSON object")
    return found


def _inside(value: Raw | None) -> Iterator[dict[str, Raw]]:
    """The members of an object, or of each in a list of them."""
    each = None if value is None else items(value)
    for one in ([] if value is None else [value]) if each is None else each:
        found = members(one)
        if found is not None:
            check_spelling(found, ("n", "best_of"))
            yield found


def _counted(
    counting: Counting,
    found: Mapping[str, Raw],
    inside: Mapping[str, list[dict[str, Raw]]],
    num_bytes: int,
) -> Asked:
    prompts = tuple(_sizes(found, counting, num_bytes)) or (0,)
    counts = [found.get(name) for name in _COUNTS]
    counts += [each.get("best_of") for each in inside["parameters"]]
    counts += [each.get("n") for each in inside["sampling_params"]]
    n = max(1, *map(_whole, map(scalar, counts))) if counting.has_n else 1
    if n * len(prompts) > MAX_SEQUENCES:
        raise RequestError(f"one request may ask for {MAX_SEQUENCES:,} sequences at most")
    stream = scalar(found.get("stream"))
    is_stream = counting.is_stream if stream is None else stream in _YES
    return Asked(prompts, n, is_stream, _whole(scalar(found.get("priority"))))


def _sizes(found: Mapping[str, Raw], counting: Counting, num_bytes: int) -> Iterator[int]:
    """Bytes of each prompt; a conversation's are those of the whole body, tools and all."""
    if (conversation := _given(found, counting.chat)) is not None:
        lists = [each for each in items(conversation) or () if first(each) == b"["]
        yield from map(len, map(bytes, lists)) if lists else (num_bytes,)
    for name in counting.prompts:
        if (value := _given(found, name)) is not None:
            yield from _prompts(bytes(value))


def _given(found: Mapping[str, Raw], name: str) -> Raw | None:
    value = found.get(name)
    return None if value is None or bytes(value) == b"null" else value


def _prompts(value: bytes) -> Iterator[int]:
    """Bytes of each prompt of a field: a text, token ids, embeddings, or a list of these."""
    if not value.startswith(b"[") or _NUMBERS.match(value):
        yield _size(value)
    else:
        yield from (_size(bytes(each)) for each in items(Raw(value)) or ())


def _size(value: bytes) -> int:
    if value.startswith(b"["):
        return BYTES_PER_TOKEN * (value.count(b",") + 1)
    return len(value) - 2 if value.startswith(b'"') else len(value)


def _text_bytes(text: bytes) -> int:
    """Bytes of a body without those of pictures and sounds in it."""
    inline = [len(found[0]) for found in _INLINE.finditer(text)] if b"data:" in text else []
    return len(text) - sum(inline) + PICTURE_BYTES * len(inline)


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


def _deadline(found: Mapping[str, Raw], name: str) -> float | None:
    if (given := _given(found, name)) is None:
        return None
    value = scalar(given)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_MS:
        raise RequestError(
            f"{name} must be milliseconds over 0 and at most {MAX_MS:.0f}", param=name
        )
    return float(value)
