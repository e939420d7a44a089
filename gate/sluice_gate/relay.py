"""*Rim*: an engine's answer on its way to the client, counted as it passes.

A streamed answer is passed on as it comes. An answer in one piece is passed on once it is whole, so
that an engine that dies meanwhile is a 503 and not half a body.
"""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
import msgspec
from sluice_core.bounded import Numbers
from sluice_core.errors import RequestError, SluiceError
from sluice_frontend.evidence.ledger import failure_of
from sluice_frontend.http.guards import error_reply
from sluice_frontend.openai.sse import error_event
from starlette.types import Receive, Scope, Send

from .backend import GateBackend
from .chunks import Chunks, Framing, usage_of
from .estimate import TokenSize
from .flight import Flight
from .headers import HOP_BY_HOP
from .upstream import Upstream

FRAMINGS: Mapping[str, Framing] = {"text/event-stream": "sse", "application/x-ndjson": "ndjson"}
"""How events are told apart in answers of these types."""
SLOW_READER_S = 0.05
"""If a client lets a chunk wait for longer, it does not read, and the next time is its own."""


class Relay:
    """Passes answers on, and tells the backend what they bring."""

    def __init__(self, backend: GateBackend, size: TokenSize) -> None:
        self._backend, self._size = backend, size
        self._numbers = Numbers("usage", backend.unreadable)

    async def answered(
        self, flight: Flight, answer: "Answer", reply: aiohttp.ClientResponse
    ) -> None:
        flight.has_head = True
        if reply.status == 200 and reply.content_type in FRAMINGS:
            answer.framing = FRAMINGS[reply.content_type]
            chunks = Chunks(answer.framing, self._numbers)
            await self.relay(answer, reply, chunks, flight)
            self._streamed(flight, chunks)
            return
        body = await reply.read()
        if reply.status < 400:
            self._done(flight, usage_of(body, self._numbers))
        else:
            self._refused(flight, reply.status)
        await answer.start(reply, len(body))
        await answer.end(body)

    async def relay(
        self,
        answer: "Answer",
        reply: aiohttp.ClientResponse,
        chunks: Chunks,
        flight: Flight | None = None,
    ) -> None:
        await answer.start(reply)
        is_held_up = False
        async for data in reply.content.iter_any():
            now_s = time.monotonic()
            if flight is not None:
                self._backend.heard(flight, data, now_s)
                if chunks.feed(data):
                    self._book(flight, chunks.last_indexes, now_s, is_held_up)
            await answer.send(data)
            if flight is not None:
                flight.is_held_up = False
            is_held_up = time.monotonic() - now_s > SLOW_READER_S
        if flight is not None:
            flight.is_held_up = True
        await answer.end()

    def _book(self, flight: Flight, indexes: list[int], now_s: float, is_held_up: bool) -> None:
        """Tokens that came together, or while their client did not read, have no gaps."""
        seen: set[int] = set()
        for index in indexes:
            is_drafted = is_held_up or index in seen
            self._backend.token(flight, index, now_s, is_drafted=is_drafted)
            seen.add(index)

    def _streamed(self, flight: Flight, chunks: Chunks) -> None:
        """The stream is over; that does not mean that the answer is whole."""
        chunks.close()
        self._backend.books.streamed(flight, chunks.usage)
        if chunks.error is not None:
            self._refused(flight, chunks.error)
        elif chunks.is_cut:
            self._backend.failed(flight, "cut")
        else:
            self._done(flight, chunks.usage)

    def _refused(self, flight: Flight, status: int) -> None:
        """The engine gave no answer but an error of this status."""
        kind = failure_of(status)
        if kind is None:
            self._backend.leave(flight, RequestError(f"the engine answered {status}"))
        else:
            self._backend.failed(flight, kind)

    def _done(self, flight: Flight, usage: tuple[int, int] | None) -> None:
        if usage is not None and usage[0] and flight.num_sequences == 1:
            self._size.learn(sum(flight.asked.prompts), usage[0])
        self._backend.finish(flight, usage and usage[1], time.monotonic())


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
    """The way of one answer from the engine to the client."""

    def __init__(self, upstream: Upstream, scope: Scope, send: Send) -> None:
        self._upstream, self.scope, self._send = upstream, scope, send
        self.framing: Framing = "none"
        self._is_started = False
        self._last = b"\n"

    def asked(self, body: bytes) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The engine's response to the client's request."""
        return self._upstream.request(self.scope, body)

    async def start(self, reply: aiohttp.ClientResponse, length: int | None = None) -> None:
        """Status and headers; `length`: bytes of a body in one piece."""
        self._is_started = True
        raw = [(name.lower(), value) for name, value in reply.raw_headers]
        headers = [(name, value) for name, value in raw if name.decode("latin-1") not in HOP_BY_HOP]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        await self._send(start)

    async def send(self, data: bytes) -> None:
        self._last = data[-1:]
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: SluiceError, receive: Receive) -> None:
        """Answer with the error, in the form of the route; in a stream it is the last event. An
        answer in no known form is cut, as its end would look whole."""
        reply = error_reply(error)
        if self.scope["path"].startswith("/api/"):
            reply.body = msgspec.json.encode({"error": error.message})
            reply.headers["content-length"] = str(len(reply.body))
        if not self._is_started:
            await reply(self.scope, receive, self._send)
        elif self.framing == "ndjson":
            await self.end((b"" if self._last == b"\n" else b"\n") + reply.body + b"\n")
        elif self.framing == "sse":
            await self.end((b"" if self._last == b"\n" else b"\n\n") + error_event(error))
