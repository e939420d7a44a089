"""The two ways in which a request is answered, as ASGI responses that watch their client.

The status line goes out with the first token. A request that is shed or fails before gets its own
status code and Retry-After, not an event in a 200. With --sse-keep-alive-interval the status line
goes out with the first comment, if that is earlier.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

from sluice_core.errors import SluiceError
from sluice_core.port import FinishReason
from sluice_frontend.api.operations import JSON
from sluice_frontend.api.sse import error_event
from sluice_frontend.http.bodies import SMALL_ANSWER, Answers
from sluice_frontend.http.guards import ReadReply
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .formats import Format
from .generation import Arrived, Generation, OpenChoice

Delivered = tuple[Arrived, FinishReason | None]
"""A delivered token, and its sequence's finish reason, if it is the last."""
KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Leaves(Protocol):
    """Work that a client may leave."""

    def leave(self) -> None: ...


@asynccontextmanager
async def watched(generation: Leaves, receive: Receive) -> AsyncIterator[None]:
    """Abort the sequences as soon as the client has left, or the block ends otherwise."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.leave()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        generation.leave()


class EventStream(Response):
    """An answer as server-sent events, one for each token, with comments while there is none."""

    def __init__(self, form: Format, answers: Answers, keep_alive_s: float) -> None:
        """`keep_alive_s`: seconds of silence after which a comment is sent; 0 for none."""
        super().__init__()
        self._form = form
        self._answers = answers
        self._generation = form.generation
        self._keep_alive_s = keep_alive_s
        self._is_started = False
        self._ready_s = self._sent_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until all sequences have ended, or the client has left."""
        async with watched(self._generation, receive):
            try:
                await self._send_tokens(send)
            except SluiceError as error:
                if not self._is_started:
                    raise
                await self._send(send, error_event(error), is_last=True)
                return
            if all(choice.finish_reason != "abort" for choice in self._generation.choices):
                await self._send(send, self._form.tail(), is_last=True)

    async def _send_tokens(self, send: Send) -> None:
        while items := await self._take(send):
            firsts = [item.choice for item in items if item.token.first]
            size = self._form.num_bytes(firsts, len(items))
            delivered: list[Delivered] = []
            async with self._answers.written(
                size, partial(self._events, items, delivered)
            ) as events:
                await self._hand_over(send, events, delivered)
                if size > SMALL_ANSWER:
                    await self._send(send, b"")  # which waits until the client has read
                    self._sent_s = time.monotonic()

    def _events(self, items: Sequence[Arrived], delivered: list[Delivered]) -> bytes:
        """The events of `items`, without those after a sequence's end; they join `delivered`."""
        events = bytearray()
        for item in items:
            if item.choice.finish_reason is None:
                events += self._form.event(item)
                delivered.append((item, item.choice.finish_reason))
        return bytes(events)

    async def _hand_over(self, send: Send, events: bytes, delivered: Sequence[Delivered]) -> None:
        ready_s = time.monotonic()
        if events:
            await self._send(send, events)
        for item, end in delivered:
            # By its client, which reads slowly: it came while the last ones were being written.
            is_held_up = self._ready_s <= item.at_s < self._sent_s
            self._generation.handed_over(item, end, item.at_s if is_held_up else ready_s)
        self._ready_s, self._sent_s = ready_s, time.monotonic()

    async def _take(self, send: Send) -> list[Arrived]:
        """The next tokens. The first comment brings the status line forward to itself."""
        if not self._keep_alive_s:
            return await self._generation.take()
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    return await self._generation.take()
            except TimeoutError:
                await self._send(send, KEEP_ALIVE)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class Whole(Protocol):
    """The form of an answer in one piece, as `Format` says."""

    @property
    def generation(self) -> Generation: ...

    def num_bytes(self, prompts: Iterable[OpenChoice], num_tokens: int) -> int: ...

    def body(self, texts: Sequence[str]) -> bytes: ...


class WholeReply(Response):
    """An answer in one piece; a token counts as handed over when it reached this process."""

    def __init__(self, form: Whole, answers: Answers) -> None:
        super().__init__()
        self._form = form
        self._answers = answers
        self._generation = form.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect all tokens, then answer; nothing is sent to a client that has left."""
        generation = self._generation
        async with watched(generation, receive):
            texts = await self._collect()
            if any(choice.finish_reason == "abort" for choice in generation.choices):
                return
            num_tokens = sum(len(choice.output_text.token_ids) for choice in generation.choices)

            def write() -> bytes:  # in its turn: by then its client may have left
                return b"" if generation.has_left else self._form.body(texts)

            size = self._form.num_bytes(generation.choices, num_tokens)
            async with self._answers.written(size, write) as body:
                await ReadReply(body, media_type=JSON)(scope, receive, send)

    async def _collect(self) -> list[str]:
        """The text of each choice."""
        texts: list[list[str]] = [[] for _ in self._generation.choices]
        while items := await self._generation.take():
            for item in items:
                picked = item.choice
                if picked.finish_reason is None:
                    texts[picked.index].append(picked.feed(item.token))
                    self._generation.handed_over(item, picked.finish_reason, item.at_s)
        return ["".join(pieces) for pieces in texts]
