"""Between the network and the routes: bodies, bearer tokens, request ids, connection ages."""

import asyncio
import hashlib
import hmac
import logging
import re
import socket
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from sluice_core.bounded import count as count_of
from sluice_core.errors import (
    BodyTooLarge,
    ConfigError,
    MethodNotAllowed,
    RequestError,
    RequestTimeout,
    SluiceError,
    TooManyOpen,
    Unauthorized,
)
from sluice_core.work import is_background
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.generate import REQUEST_ID
from ..api.operations import JSON
from ..api.response_types import ErrorInfo, ErrorReply
from ..api.sse import encode, error_body
from ..config import read_secrets
from .clients import CLIENT, SALT, Network, client_of, has_too_many
from .connection import LIFE
from .orca import ASKED_BY, HEADER, load_report
from .target import read_target

PROBE_PATHS = ("/health", "/healthz", "/readyz", "/version")
"""Paths that answer without a bearer."""
OPEN_METHODS = ("GET", "HEAD")
METHODS = (*OPEN_METHODS, "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
ASKED_ID = "request_id"
"""Key in the ASGI scope's state: the id that a request brought or was given."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
log = logging.getLogger(__name__)
LINGER_S = 1.0
LINGER_BYTES = 16 << 20
UNREAD = BodyTooLarge | RequestTimeout | TooManyOpen
"""Errors that are answered while the request's body may still arrive."""


class Bearer:
    """Bearer tokens, reread when their file changes. Never shown: not in repr, log or error."""

    def __init__(self, tokens: Collection[str], path: Path | None = None) -> None:
        self._path, self._version = path, _version(path)
        self._take(tokens)

    @classmethod
    def of(cls, path: Path | None) -> "Bearer | None":
        """The file's tokens, or None if there is no file and so no check."""
        return None if path is None else cls(read_secrets(path), path)

    def __repr__(self) -> str:
        return f"Bearer({len(self._tokens)} tokens)"

    def check(self, authorization: bytes) -> str:
        """The salt of the token in a header's value: each token has a share of the prefix cache.

        Raises Unauthorized.
        """
        self._read_again()
        scheme, _, token = authorization.partition(b" ")
        # Compare with every token in constant time, so that the time reveals nothing.
        same = [each for each in self._tokens if hmac.compare_digest(token.strip(), each)]
        if scheme.lower() != b"bearer" or not same:
            raise Unauthorized("a valid bearer token is required")
        return hashlib.sha256(same[0]).hexdigest()

    def _read_again(self) -> None:
        """Read a rotated Secret, which reaches its volume within a minute. An invalid one changes
        nothing, and the log says why."""
        version = _version(self._path)
        if self._path is None or version in (None, self._version):
            return
        self._version = version
        try:
            self._take(read_secrets(self._path))
        except ConfigError as error:
            log.warning("tokens not read again", extra={"reason": error.message})

    def _take(self, tokens: Collection[str]) -> None:
        self._tokens = frozenset(token.encode() for token in tokens)


def _version(path: Path | None) -> tuple[int, int] | None:
    """Changes with the file's content; None while it is not there."""
    try:
        file = path.stat() if path else None
    except OSError:
        return None
    return (file.st_ino, file.st_mtime_ns) if file else None


class Inflight:
    """HTTP requests between their headers and the end of their reply, by client."""

    def __init__(self) -> None:
        self.num_open = 0
        self._num_of: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()

    def num_of(self, client: str) -> int:
        """The number of open ones of `client`."""
        return self._num_of[client]

    @contextmanager
    def open(self, client: str, most: int | None = None) -> Iterator[None]:
        """Count a request of `client` meanwhile. `most`: of a lone client, None without bound.

        Raises TooManyOpen.
        """
        num_own, num_all = self._num_of[client] + 1, self.num_open + 1
        if most is not None and has_too_many(num_own, num_all, most):
            raise TooManyOpen(f"{self.num_open} requests are open already", retry_after_s=1)
        self.num_open += 1
        self._num_of[client] += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            self._num_of[client] -= 1
            if not self._num_of[client]:
                del self._num_of[client]
            if self.num_open == 0:
                self._empty.set()

    async def until_empty(self, limit_s: float) -> bool:
        """Wait until all were answered; False if that takes longer than `limit_s`."""
        try:
            await asyncio.wait_for(self._empty.wait(), limit_s)
        except TimeoutError:
            return False
        return True


POD = socket.gethostname()
"""In Kubernetes the host name is the pod's name, so clients can tell which pod answered."""


@dataclass(frozen=True, slots=True)
class EdgeMiddleware:
    """The outermost layer: reads the target, checks the bearer, names request and pod, closes old
    connections. Layers inside find the target's one form in the scope.

    `open_paths`: answer GET and HEAD without a bearer. `check_room`: may refuse requests for which
    `is_bounded` (of method and path) holds, with their body unread; it gets the numbers of other
    open ones, of all clients and of this one. `trusted`: proxies whose word for a client is taken.
    `lifetime`: share of its age limit that a connection may reach now.
    `load`: sent with each answer to clients that ask for it. `on_answer`: called with the route
    ("none" if unknown), the method and the status of each answer.
    """

    app: ASGIApp
    _: KW_ONLY
    bearer: Bearer | None
    open_paths: Collection[str]
    is_bounded: Callable[[str, str], bool]
    check_room: Callable[[int, int, bool], None]
    inflight: Inflight
    lifetime: Callable[[], float]
    load: Callable[[], Mapping[str, float]]
    on_answer: Callable[[str, str, int], None]
    trusted: Sequence[Network] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        sent_id = headers.get("x-request-id", "")
        request_id = sent_id if re.fullmatch(REQUEST_ID, sent_id) else uuid.uuid4().hex
        scope["state"][ASKED_ID] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                told.setdefault("x-request-id", request_id)  # an engine may have one of its own
                told["x-sluice-pod"] = POD
                if report := load_report(headers.get(ASKED_BY, ""), self.load()):
                    told[HEADER] = report
                if _is_old(scope, self.lifetime()):
                    told["connection"] = "close"
                self.on_answer(self._route(scope), scope["method"], message["status"])
            await send(message)

        try:
            scope.update(_one_form(scope, headers.get("host", "")))
            scope["state"][SALT] = self._authorize(scope, headers)
            client = scope["state"][CLIENT] = client_of(scope, headers, self.trusted)
            if self.is_bounded(scope["method"], scope["path"]):
                num_open, num_own = self.inflight.num_open, self.inflight.num_of(client)
                self.check_room(num_open, num_own, is_background(headers))
        except SluiceError as error:
            await error_reply(error)(scope, receive, send_with_headers)
            return
        with self.inflight.open(client):
            await self.app(scope, receive, send_with_headers)

    def _authorize(self, scope: Scope, headers: Headers) -> str:
        is_open = scope["path"] in self.open_paths and scope["method"] in OPEN_METHODS
        if self.bearer is None or is_open:
            return ""
        return self.bearer.check(headers.get("authorization", "").encode("latin-1"))

    def _route(self, scope: Scope) -> str:
        """The route under which a request is counted, also if it was refused here."""
        bounded: str = scope["path"] if self.is_bounded(scope["method"], scope["path"]) else "none"
        path: str = getattr(scope.get("route"), "path", bounded)
        return path


def _one_form(scope: Scope, host: str) -> Scope:
    """The keys of `scope` that say what is asked for, in one form."""
    if scope["method"] not in METHODS:
        raise MethodNotAllowed(f"the method must be one of {', '.join(METHODS)}")
    target = read_target(scope["raw_path"], scope["query_string"], host)
    for name, value in scope["headers"]:
        if _CONTROL.search(value):  # h11 takes them, and others do not
            raise RequestError(f"the header {name.decode('latin-1')} holds a control character")
    return {"path": target.path, "raw_path": target.raw_path}


def _is_old(scope: Scope, lifetime: float) -> bool:
    made_s, max_age_s = scope["state"][LIFE]
    return bool(asyncio.get_running_loop().time() >= made_s + lifetime * max_age_s)


async def read_body(
    request: Request,
    max_bytes: int,
    timeout_s: float,
    count: Callable[[int], Awaitable[None]] | None = None,
    *,
    takes_encoded: bool = False,
) -> bytes:
    """The body, refused as soon as it is known to be over `max_bytes`.

    `count` gets the number of bytes so far, and may refuse more or wait. Raises RequestError
    (framing, and an encoding unless `takes_encoded`), BodyTooLarge, RequestTimeout.
    """
    length = request.headers.get("content-length")
    encoding = (request.headers.get("content-encoding") or "identity").lower()
    if encoding != "identity" and not takes_encoded:
        raise RequestError("Content-Encoding is not supported; send the body as it is")
    too_large = BodyTooLarge(f"the body is over the limit of {max_bytes} bytes")
    if length is not None and count_of(length, max_bytes) is None:
        raise too_large
    body = BytesIO()  # whose value is no second copy
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                num_bytes = body.tell() + len(chunk)
                if num_bytes > max_bytes:
                    raise too_large
                if count is not None:
                    await count(num_bytes)
                body.write(chunk)
    except TimeoutError as error:
        raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s") from error
    return body.getvalue()


def answer(body: object, status: int = 200) -> Response:
    """`body` as JSON."""
    return Response(encode(body), status, media_type=JSON)


def error_reply(error: SluiceError) -> Response:
    """`error` as a response, with Retry-After if waiting helps."""
    headers = {"allow": ", ".join(METHODS)} if isinstance(error, MethodNotAllowed) else {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    kind = LingeringReply if isinstance(error, UNREAD) else Response
    return kind(error_body(error), error.http_status, headers, JSON)


class ReadReply(Response):
    """An answer that is under way until its client has read all but the last few KB."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all, then an empty end, which waits until the connection has room."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await self._linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _linger(self, receive: Receive) -> None:
        """Called before the end is sent."""


class LingeringReply(ReadReply):
    """Answers while the request is still being sent, then closes.

    It reads and discards the rest for a moment: closing with unread bytes would reset the
    connection, and the client might never see the answer.
    """

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        super().init_headers(headers)
        self.raw_headers.append((b"connection", b"close"))

    async def _linger(self, receive: Receive) -> None:
        num_bytes = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while num_bytes < LINGER_BYTES:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):  # also of a disconnect
                        return


async def _typed(request: Request, error: SluiceError) -> Response:
    return error_reply(error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _no_route(request: Request, error: HTTPException) -> Response:
    kinds = {404: "NotFoundError", 405: "MethodNotAllowedError"}
    body = ErrorInfo(
        message=f"{request.method} {request.url.path[:256]}: {error.detail}",
        type=kinds.get(error.status_code, "BadRequestError"),
        param=None,
        code=error.status_code,
        reason="no_such_route",
    )
    headers = dict(error.headers or {})
    return Response(encode(ErrorReply(body)), error.status_code, headers, JSON)


async def _unexpected(request: Request, error: Exception) -> Response:
    return error_reply(SluiceError("an internal error occurred; the server's log names it"))


ERROR_HANDLERS: dict[
    int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]
] = {
    SluiceError: _typed,
    ClientDisconnect: _gone,
    HTTPException: _no_route,
    Exception: _unexpected,
}
"""Every error of a route becomes an OpenAI error body."""
