"""The two ways in which a completion is answered, as ASGI responses that watch their client.

The status line goes out with the first token, so that a request that is shed or fails before it is
answered with its own status code and Retry-After instead of an event in a 200.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import SluiceError
from ..protocol import Completion
from .generation import Arrived, Choice, Generation
from .logprobs import Scored, TextOf, as_token_id, of_completion, of_prompt, unpack_prompt
from .replies import DONE, Chunks, Usage, choice, completion, error_event, generated

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@asynccontextmanager
async def watched(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Abort the sequences as soon as the client has left, and whatever else ends the block."""

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
    """A completion as server-sent events, one for each token."""

    def __init__(self, generation: Generation, model: str, text_of: TextOf) -> None:
        super().__init__()
        self._generation = generation
        self._told = Told(generation.request, text_of)
        self._chunks = Chunks(generation.reply_id, generation.created, model)
        self._is_started = False

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
                await self._send(send, self._tail(), is_last=True)

    async def _send_tokens(self, send: Send) -> None:
        generation = self._generation
        while items := await generation.take():
            events, sent = bytearray(), []
            for item in items:
                if item.choice.finish_reason is None:
                    events += self._event(item)
                    sent.append((item, item.choice.finish_reason))
            if events:
                await self._send(send, bytes(events))
            now_s = time.monotonic()
            for item, end in sent:
                generation.handed_over(item, end, now_s)

    def _event(self, item: Arrived) -> bytes:
        request, picked = self._generation.request, item.choice
        is_first, known = item.token.first is not None, len(picked.transcript.token_ids)
        text = picked.feed(item.token)
        has_ids = request.return_token_ids
        return self._chunks.token(
            picked.index,
            text,
            picked.finish_reason,
            picked.transcript.stop_reason,
            picked.transcript.token_ids[known:] if has_ids else None,
            picked.prompt_token_ids if has_ids and is_first else None,
            self._generation.counts() if request.continuous_usage else None,
            self._told.logprobs(picked, known, with_prompt=is_first),
        )

    def _tail(self) -> bytes:
        if not self._generation.request.include_usage:
            return DONE
        return self._chunks.usage(self._generation.counts()) + DONE

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})


class Told:
    """The log-probabilities that one request asked for, as its replies tell them."""

    def __init__(self, request: Completion, text_of: TextOf) -> None:
        self._request = request
        self._plain = text_of
        self._text_of = as_token_id if request.sampling.tokens_as_ids else text_of

    def logprobs(self, picked: Choice, known: int, *, with_prompt: bool) -> dict[str, Any] | None:
        """Those of the output's tokens from the `known`-th on, behind an echoed prompt's."""
        num = self._request.sampling.logprobs
        if num is None:
            return None
        prompt = self._prompt(picked) if with_prompt and self._request.echo else []
        return of_completion([*prompt, *picked.scored[known:]], num, self._text_of)

    def prompt_logprobs(self, picked: Choice) -> list[Any] | None:
        """The field of that name."""
        num = self._request.prompt_logprobs
        return None if num is None else of_prompt(self._prompt(picked), num, self._plain)

    def _prompt(self, picked: Choice) -> list[Scored]:
        return unpack_prompt(picked.prompt_scores, picked.prompt_token_ids, self._plain)


Body = Callable[[list[dict[str, Any]], Usage], bytes]


class WholeReply(Response):
    """A completion in one piece; a token counts as handed over when it reached this process."""

    def __init__(self, generation: Generation, body_of: Body, text_of: TextOf) -> None:
        super().__init__()
        self._generation = generation
        self._told = Told(generation.request, text_of)
        self._body_of = body_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect all tokens, then answer; nothing is sent to a client that has left."""
        generation = self._generation
        async with watched(generation, receive):
            texts = await self._collect()
            if any(choice.finish_reason == "abort" for choice in generation.choices):
                return
            if generation.request.sampling.prompt_logprobs is None:
                body = self._body(texts)
            else:  # of a long prompt, these take a while to write down
                body = await asyncio.to_thread(self._body, texts)
        reply = Response(body, media_type="application/json")
        await reply(scope, receive, send)

    async def _collect(self) -> dict[int, str]:
        texts: dict[int, list[str]] = {picked.index: [] for picked in self._generation.choices}
        while items := await self._generation.take():
            for item in items:
                picked = item.choice
                if picked.finish_reason is None:
                    texts[picked.index].append(picked.feed(item.token))
                    self._generation.handed_over(item, picked.finish_reason, item.at_s)
        return {index: "".join(pieces) for index, pieces in texts.items()}

    def _body(self, texts: Mapping[int, str]) -> bytes:
        generation = self._generation
        choices = [self._choice(picked, texts[picked.index]) for picked in generation.choices]
        return self._body_of(choices, generation.counts())

    def _choice(self, picked: Choice, text: str) -> dict[str, Any]:
        has_ids = self._generation.request.return_token_ids
        return choice(
            picked.index,
            text,
            picked.finish_reason,
            picked.transcript.stop_reason,
            picked.transcript.token_ids if has_ids else None,
            picked.prompt_token_ids if has_ids else None,
            self._told.logprobs(picked, 0, with_prompt=True),
            self._told.prompt_logprobs(picked),
        )


def completion_body(generation: Generation, model: str) -> Body:
    """How POST /v1/completions is answered in one piece."""
    return lambda choices, counts: completion(
        generation.reply_id, generation.created, model, choices, counts
    )


def generated_body(generation: Generation, model: str) -> Body:
    """How POST /generate is answered."""
    return lambda choices, counts: generated(generation.reply_id, model, choices[0], counts)
