"""One line of a batch: what it must be, and how its results look; as OpenAI's. Pure."""

import hashlib
import uuid
from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct
from sluice_core.bounded import Tokens
from sluice_core.words import clean

from ..api.operations import all_operations

MAX_SHOWN = 80
"""Characters of an input that a sentence quotes."""
START_BYTES = 256
"""Bytes of a prompt that are compared with those of others."""
MAX_DETAIL = 300
"""Characters that are told of an error."""
TOO_MANY = 429


class Item(NamedTuple):
    """One request. `number`: of its line, or of its file in the folder; 1 is the first.

    `prefix`: digest of the prompt's start, 0 if it has none. `size`: bytes of its line or file.
    `offset`: of the line in the file.
    """

    number: int
    custom_id: str
    route: str
    prefix: int
    size: int
    offset: int = 0


class Refusal(Exception):
    """The input, the file of results or the engine cannot be used; the message says why.

    `code`: OpenAI's, of a line.
    """

    def __init__(self, message: str, code: str = "invalid_json_line") -> None:
        super().__init__(message)
        self.code = code


class Line(Struct, frozen=True):
    """A line of the input. `body` stays bytes: it is sent as it is."""

    custom_id: str
    method: str
    url: str
    body: Raw


class Body(Struct, frozen=True):
    """Fields of a body that are read; the server reads the others."""

    model: Any = None
    stream: Any = False
    messages: Raw = Raw(b"")
    prompt: Raw = Raw(b"")
    input: Raw = Raw(b"")


class Response(Struct, frozen=True):
    """The answer of HTTP; its `body` is the server's JSON, or a text if that was none."""

    status_code: Tokens
    request_id: str
    body: Raw


class Failure(Struct, frozen=True):
    """Why there is no answer of HTTP, or none that can be read."""

    code: str
    message: str


class Result(Struct, frozen=True):
    """A line of the output."""

    id: str
    custom_id: str
    response: Response | None
    error: Failure | None

    @property
    def status(self) -> int:
        """The status of HTTP, 0 without an answer that can be read."""
        return self.response.status_code if self.response and not self.error else 0

    @property
    def is_ok(self) -> bool:
        """True if the server did what it was asked."""
        return 200 <= self.status < 300

    @property
    def is_temporary(self) -> bool:
        """True if the server may answer otherwise soon."""
        return self.status == TOO_MANY or self.status >= 500


def served_routes() -> frozenset[str]:
    """Routes that a line may name: they bring an engine work, and answer without a stream."""
    return frozenset(
        each.path
        for each in all_operations()
        if each.method == "POST" and each.counting and each.has_work and not each.counting.is_stream
    )


def read_line(data: bytes) -> Line:
    """A line of the input; raises `Refusal` if it is none."""
    try:
        data.decode()
        line = msgspec.json.decode(data, type=Line)
    except UnicodeDecodeError as e:
        raise Refusal("it is not UTF-8") from e
    except msgspec.ValidationError as e:
        raise Refusal(clean(str(e), MAX_SHOWN)) from e
    except (msgspec.DecodeError, RecursionError) as e:
        raise Refusal(f"it is not JSON: {clean(str(e), MAX_SHOWN)}") from e
    if not line.custom_id:
        raise Refusal("its custom_id is empty")
    return line


def check(line: Line, routes: Collection[str]) -> Body:
    """The body of a line that may be sent to one of `routes`; raises `Refusal`."""
    if line.method != "POST":
        raise Refusal(f"its method is {clean(line.method, MAX_SHOWN)!r}, not POST")
    if line.url not in routes:
        why = "no route that is served" if len(routes) != 1 else f"not {next(iter(routes))}"
        raise Refusal(f"its url {clean(line.url, MAX_SHOWN)!r} is {why}", "url_mismatch")
    try:
        body = msgspec.json.decode(line.body, type=Body)
    except (msgspec.ValidationError, RecursionError) as e:
        raise Refusal("its body is not a JSON object") from e
    if body.stream is True:
        raise Refusal("its body asks for a stream, and a batch has whole answers only")
    return body


def prefix_of(body: Body) -> int:
    """A digest of the first of many messages, or of the first bytes of a prompt; 0 without one."""
    start = bytes(body.messages or body.prompt or body.input)[:START_BYTES]
    try:
        messages = msgspec.json.decode(body.messages or b"[]", type=list[Raw])
    except msgspec.ValidationError:
        messages = []
    if len(messages) > 1:
        start = bytes(messages[0])
    digest = hashlib.blake2b(start, digest_size=8).digest()
    return int.from_bytes(digest, signed=True) if start else 0


def answered(custom_id: str, status: int, request_id: str, data: bytes) -> Result:
    """The result of an answer of HTTP. A body that is no JSON becomes a text, and an error of a
    request that went well otherwise."""
    own, error = _new_id(), None
    try:
        data.decode()
        body = msgspec.json.format(data, indent=-1)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        body = msgspec.json.encode(data.decode(errors="replace"))
        if 200 <= status < 300:
            error = Failure("invalid_answer", "The answer is not JSON.")
    return Result(own, custom_id, Response(status, request_id or own, Raw(body)), error)


def unanswered(custom_id: str, code: str, why: Exception) -> Result:
    """The result of a request that got no answer of HTTP."""
    message = clean(f"{type(why).__name__}: {why}", MAX_DETAIL)
    return Result(_new_id(), custom_id, None, Failure(code, message))


def expired(custom_id: str) -> Result:
    """The result of a request that was not sent within the batch's window."""
    message = "This request could not be executed before the completion window expired."
    return Result(_new_id(), custom_id, None, Failure("batch_expired", message))


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
