"""*Rim*: an engine's answer on its way to the client, counted as it passes.

Each piece is passed on as it comes, whatever its type and its size. A gate holds of one answer what
the engine's connection had ready (`upstream.READ_BYTES` and one read), once to be sent and once in
the client's connection: less than 1 MiB, also if nobody reads. When that is full, the engine waits.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import msgspec
from sluice_core.bounded import Numbers
from sluice_core.errors import RequestError, RequestFailed, SluiceError
from sluice_frontend.api.sse import event
from sluice_frontend.evidence.ledger import failure_of
from sluice_frontend.http.guards import error_reply
from starlette.types import Receive, Scope, Send

from .count.chunks import FRAMINGS, Chunks, Framing, UsageScan
from .engine.upstream import Upstream
from .queue.backend import GateBackend
from .queue.flight import Flight
from .request.estimate import TokenSize
from .request.headers import from_engine

SLOW_READER_S = 0.05
"""If a client lets a chunk wait for longer, it does not read, and the next time is its own."""
SLICE_BYTES = 1 << 14
"""Read at once: the worst bytes that we know take 1 ms."""
_NO_TEXT = re.compile(rb"[\x00\n\v\f\r]")
"""aiohttp takes them in the value of a header, and h11 refuses to send them."""


class Relay:
    """Passes answers on, and tells the backend what they bring."""

    def __init__(self, backend: GateBackend, size: TokenSize, numbers: Numbers) -> None:
        """`numbers` reads the engine's usage."""
        self._backend, self._size, self._numbers = backend, size, numbers

    async def passed(self, answer: "Answer", reply: aiohttp.ClientResponse) -> None:
        """Pass on an answer that nobody counts."""
        await answer.start(reply)
        while data := await reply.content.readany():
            await answer.send(data)
        await answer.end()

    async def answered(
        self, flight: Flight, answer: "Answer", reply: aiohttp.ClientResponse
    ) -> None:
        """Pass on the answer to a request that has a place. Its place is free once the engine has
        said all, however slow the reader is."""
        flight.has_head = True
        await answer.start(reply)
        counts: Chunks | UsageScan = UsageScan(self._numbers)
        if answer.framing is not None:
            counts = Chunks(answer.framing, self._numbers)
        is_over = is_held_up = False
        while data := await reply.content.readany():
            now_s = time.monotonic()
            self._backend.progress.heard(flight, data, now_s)
            is_large = len(data) > SLICE_BYTES
            for part in _slices(data) if is_large else (data,):
                if tokens := counts.feed(part):
                    self._book(flight, tokens, now_s, is_held_up)
                if is_large:
                    await asyncio.sleep(0)  # others' turn
            if reply.content.at_eof():
                is_over = self._over(flight, reply, counts)
            sent_s = time.monotonic()
            await answer.send(data)
            flight.is_held_up = False
            is_held_up = time.monotonic() - sent_s > SLOW_READER_S
        if not is_over and not self._over(flight, reply, counts):
            raise aiohttp.ClientPayloadError("the stream has no end")
        flight.is_held_up = True
        await answer.end()

    def _book(
        self, flight: Flight, tokens: Mapping[int, int], now_s: float, is_held_up: bool
    ) -> None:
        """Tokens that came together, or while their client did not read, have no gaps."""
        for choice, num in tokens.items():
            index = choice if choice < len(flight.timers) else 0  # an engine may invent answers
            self._backend.token(flight, index, now_s, num, is_drafted=is_held_up)

    def _over(
        self, flight: Flight, reply: aiohttp.ClientResponse, counts: Chunks | UsageScan
    ) -> bool:
        """Book the end of an answer; False if its connection has ended and the answer has not."""
        if reply.status >= 400:
            self._refused(flight, reply.status)
        elif isinstance(counts, UsageScan):
            self._done(flight, counts.usage)
        else:
            return self._streamed(flight, reply, counts)
        return True

    def _streamed(self, flight: Flight, reply: aiohttp.ClientResponse, chunks: Chunks) -> bool:
        """The stream is over; that does not mean that the answer is whole."""
        chunks.close()
        if chunks.error is not None:
            self._refused(flight, chunks.error)
        elif not chunks.is_cut:
            self._backend.books.streamed(flight, chunks.usage)
            self._done(flight, chunks.usage)
        elif _is_delimited(reply):
            self._backend.failed(flight, "cut")
        else:
            return False
        return True

    def _refused(self, flight: Flight, status: int) -> None:
        """Note that the engine gave no answer but an error of this status."""
        kind = failure_of(status)
        if kind is None:
            self._backend.leave(flight, RequestError(f"the engine answered {status}"))
        else:
            self._backend.failed(flight, kind)

    def _done(self, flight: Flight, usage: tuple[int, int] | None) -> None:
        if usage is not None and usage[0] and flight.num_sequences == 1:
            self._size.learn(sum(flight.asked.prompts), usage[0])
        self._backend.finish(flight, usage and usage[1], time.monotonic())


def _slices(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), SLICE_BYTES):
        yield data[at : at + SLICE_BYTES]


def _is_delimited(reply: aiohttp.ClientResponse) -> bool:
    """True if the end of its body is told by more than the connection's."""
    return "transfer-encoding" in reply.headers or "content-length" in reply.headers


async def while_read(
    stop: asyncio.Future[None] | None, receive: Receive, serve: Coroutine[None, None, None]
) -> None:
    """Serve until it is done, its client has left, or `stop` has an error for it."""
    serving, leaving = asyncio.create_task(serve), asyncio.create_task(_until_left(receive))
    ends: set[asyncio.Future[None]] = {serving, leaving} | ({stop} if stop else set())
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        elif stop is not None and stop.done():
            stop.result()
    finally:
        serving.cancel()
        leaving.cancel()
        await asyncio.gather(serving, leaving, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Answer:
    """The way of one answer from the engine to the client. `framing`: of a stream whose events can
    be read, and to which an event can be added; known once it has started. `keeps_body`: the
    request may be sent again."""

    def __init__(self, upstream: Upstream, scope: Scope, send: Send) -> None:
        self._upstream, self.scope, self._send = upstream, scope, send
        self.body, self._memory, self.keeps_body = b"", AsyncExitStack(), False
        self.framing: Framing | None = None
        self._is_started = self._has_length = False
        self._last = b""

    def hold(self, body: bytes, memory: AsyncExitStack) -> None:
        """Take the request's body, which takes `memory` until the engine has it."""
        self.body, self._memory = body, memory

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[aiohttp.ClientResponse]:
        """The engine's response to the client's request, whose body is let go."""
        async with self._upstream.request(self.scope, self.body) as reply:
            if not self.keeps_body:
                self.body = b""
                await self._memory.aclose()
            yield reply

    async def start(self, reply: aiohttp.ClientResponse) -> None:
        """Pass on status and headers. Raises RequestFailed for those that HTTP does not have."""
        if not 200 <= reply.status < 600:
            raise RequestFailed(f"the engine answered with the status {reply.status}")
        if any(_NO_TEXT.search(value) for _, value in reply.raw_headers):
            raise RequestFailed("the engine answered with a header that is no text")
        is_plain = "content-encoding" not in reply.headers
        if reply.status == 200 and is_plain and self.scope["method"] != "HEAD":
            self.framing = FRAMINGS.get(reply.content_type)
        headers = from_engine(reply.raw_headers)
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        self._is_started = True
        self._has_length = "content-length" in reply.headers
        await self._send(start)

    async def send(self, data: bytes) -> None:
        """Pass on a piece; returns when the client's connection has room."""
        self._last = data[-2:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Say that the answer is whole."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: SluiceError, receive: Receive) -> None:
        """Answer with the error, in the form of the route. In a stream it is the last event, unless
        one is half sent. All else is cut, as its end would look whole."""
        if not self._is_started:
            reply = error_reply(error)
            reply.body = self._error(error, bytes(reply.body))
            reply.headers["content-length"] = str(len(reply.body))
            await reply(self.scope, receive, self._send)
        elif self._takes_event:
            body = self._error(error, bytes(error_reply(error).body))
            await self.end(self._event(body))

    @property
    def _takes_event(self) -> bool:
        is_between = not self._last or self._last.endswith(b"\n")
        return self.framing is not None and is_between and not self._has_length

    def _event(self, body: bytes) -> bytes:
        if self.framing == "ndjson":
            return body + b"\n"
        name = b"event: error\n" if self._is_anthropic else b""
        ends_event = b"" if self._last in (b"", b"\n\n") else b"\n"
        return ends_event + name + event(body)

    def _error(self, error: SluiceError, body: bytes) -> bytes:
        """`body`: OpenAI's form of it."""
        if self.scope["path"].startswith("/api/"):
            return msgspec.json.encode({"error": error.message})
        if self._is_anthropic:
            told = {"type": "api_error", "message": error.message}
            return msgspec.json.encode({"type": "error", "error": told})
        return body

    @property
    def _is_anthropic(self) -> bool:
        path: str = self.scope["path"]
        return path.startswith("/v1/messages")
