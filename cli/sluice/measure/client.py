"""One request as an ordinary client sends it, and its outcome.

Clients keep connections alive. Like the openai client they retry after 429, 503 or a connection
that closed before any byte of the answer. A request's clock starts with its first try.
"""

import argparse
import asyncio
import json
import math
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from sluice_core.bounded import MAX_TOKENS, number
from sluice_core.bounded import count as counted
from sluice_core.words import clean

from sluice.numbers import FIRST_TOKEN_ID, count

MAX_RETRIES = 2  # openai-python's default
MAX_DETAIL = 200
"""Characters that are told of an error."""
REQUEST_TIMEOUT_SECONDS = 300.0
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
ROUTES = (COMPLETIONS, "/generate", EMBEDDINGS)
WORDS = ("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school")
_USAGE = re.compile(rb'"usage": ?\{')
_WHOLE_TEXT = re.compile(rb'"generated_text": ?"')


def add_length_arguments(
    parser: argparse.ArgumentParser,
    *,
    prompt: tuple[int, int],
    output: tuple[int, int],
    output_type: Callable[[str], int] = count,
) -> None:
    """Add the flags of a Shape's lengths, with their defaults."""
    for flag, default, of, read in (
        ("--prompt-tokens", prompt, "a prompt", count),
        ("--max-tokens", output, "an output", output_type),
    ):
        parser.add_argument(
            flag, type=read, nargs=2, default=list(default), metavar=("A", "B"),
            help=f"least and most of {of}",
        )  # fmt: skip
    parser.add_argument(
        "--words", action="store_true", help="prompts of words: Ollama takes no token ids"
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, drawn uniformly; prompts are random token ids below `vocab_size`.

    `words`: random words instead, of about a token each, for servers that take no ids. `route`:
    EMBEDDINGS has no outputs.
    """

    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]
    vocab_size: int
    model: str
    stream: bool = True
    words: bool = False
    route: str = COMPLETIONS

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output of one request."""
        return rng.randint(*self.prompt_tokens), rng.randint(*self.max_tokens)

    def body(self, rng: random.Random, lengths: tuple[int, int] | None = None) -> dict[str, object]:
        """One request's JSON body, of `lengths` if they are given."""
        num_prompt, num_output = lengths or self.lengths(rng)
        ids = rng.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=num_prompt)
        prompt = " ".join(WORDS[i % len(WORDS)] for i in ids) if self.words else ids
        if self.route == EMBEDDINGS:
            return {"model": self.model, "input": prompt, "encoding_format": "base64"}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": self.stream,
            **({"stream_options": {"include_usage": True}} if self.stream else {}),
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of one request. `result`: ok, failed (typed error) or cut (no end was received).

    `detail`: why it was not answered in full, or had to be sent again.
    `gaps_s`: between arrivals of tokens. Tokens that come at once, as accepted drafts do, have no
    gap; zeros would hide the gaps between steps.
    """

    result: str
    pod: str
    ttft_s: float
    total_s: float
    num_tokens: int
    gaps_s: tuple[float, ...]
    retries: int
    detail: str = ""

    @property
    def is_ok(self) -> bool:
        return self.result == "ok"

    @property
    def mean_gap_s(self) -> float:
        """Seconds for each token after the first; 0 without any."""
        return sum(self.gaps_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile (nearest rank), or None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)] if ordered else None


def exact_quantile_ms(seconds: Sequence[float], q: float) -> float | None:
    """The q-quantile in ms; None without values, or at a request that was never answered."""
    value = quantile(seconds, q)
    return None if value is None or math.isinf(value) else 1000 * value


class Retry(Exception):
    """The server asked for a retry, or closed the connection before it answered."""

    def __init__(self, after_s: float, why: str) -> None:
        super().__init__(why)
        self.after_s = after_s


async def read_stream(response: aiohttp.ClientResponse, start: float) -> Outcome:
    """Read one SSE answer to its end; with an error event it failed, without an end it is cut.

    The number of tokens is the usage's, if it is told: an event may hold several.
    """
    times: list[float] = []
    events = _Events()
    async for lines in _arrivals(response):
        if sum(map(events.read, lines)):
            times.append(time.monotonic())
    gaps = tuple(b - a for a, b in zip(times, times[1:], strict=False))
    result = "failed" if events.error else ("ok" if events.is_done and times else "cut")
    ttft = times[0] - start if times else 0.0
    pod = _pod(response)
    num_tokens = events.told if events.told is not None and times else events.num_texts
    total_s = time.monotonic() - start
    return Outcome(result, pod, ttft, total_s, num_tokens, gaps, 0, events.error)


async def read_whole(response: aiohttp.ClientResponse, start: float) -> Outcome:
    """Read one answer in one piece: its first token comes with its last. One without outputs has
    the tokens of its input."""
    answer = _object(await response.read())
    num_tokens = _told(answer) or (_told(answer, "prompt_tokens") if "data" in answer else 0) or 0
    total_s = time.monotonic() - start
    pod = _pod(response)
    return Outcome("ok" if num_tokens else "cut", pod, total_s, total_s, num_tokens, (), 0)


async def _arrivals(response: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """The lines that each read completes; the last line may lack its newline."""
    begun = b""
    async for read in response.content.iter_any():
        *lines, begun = (begun + read).split(b"\n")
        yield lines
    yield [begun]


@dataclass(slots=True)
class _Events:
    """Facts from an answer's events. It ends with `[DONE]`, or on /generate with the whole text."""

    num_texts: int = 0
    is_done: bool = False
    error: str = ""
    told: int | None = None

    def read(self, line: bytes) -> bool:
        """True if the line is an event that brings tokens."""
        if not line.startswith(b"data:"):
            return False
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            self.is_done = True
            return False
        if b'"error"' in data and "error" in _object(data):
            self.error = clean(line.decode(errors="replace"), MAX_DETAIL)
        self.is_done = self.is_done or _WHOLE_TEXT.search(data) is not None
        event = _object(data) if _USAGE.search(data) else {}
        told = _told(event)
        self.told = self.told if told is None else told
        brings_tokens = event.get("choices") != []
        self.num_texts += brings_tokens
        return brings_tokens


def _object(data: bytes) -> dict[str, Any]:
    """The JSON object of an event; anything else is an error of the server's."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"error": "no JSON object"}


def _told(event: dict[str, Any], name: str = "completion_tokens") -> int | None:
    """Tokens by the server's own count; None if it gives none that can be."""
    usage = event.get("usage")
    return counted(usage.get(name), MAX_TOKENS) if isinstance(usage, dict) else None


def _pod(response: aiohttp.ClientResponse) -> str:
    return clean(response.headers.get("x-sluice-pod", "unknown"), MAX_DETAIL)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks to wait, at most ten; one if it gives a date or nothing."""
    asked_s = number(response.headers.get("Retry-After"))
    return 1.0 if asked_s is None else min(asked_s, 10.0)


async def attempt(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], start: float
) -> Outcome:
    """One try. Raises `Retry` if the server asks for it, or closes the connection before any
    answer; ordinary clients retry then."""
    has_begun = False
    try:
        async with session.post(url, json=body) as response:
            has_begun = True
            if response.status in (429, 503):
                raise Retry(_retry_after_s(response), f"HTTP {response.status}")
            if response.status != 200:
                said = (await response.content.read(MAX_DETAIL)).decode(errors="replace")
                detail = clean(f"HTTP {response.status}: {said}", MAX_DETAIL)
                return Outcome("failed", "", 0.0, time.monotonic() - start, 0, (), 0, detail)
            is_whole = "input" in body or body.get("stream") is False
            read = read_whole if is_whole else read_stream
            return await read(response, start)
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as e:
        is_closed = isinstance(e, aiohttp.ClientConnectionError | ConnectionError)
        if is_closed and not has_begun and not isinstance(e, TimeoutError):
            raise Retry(0.5, clean(f"{type(e).__name__}: {e}", MAX_DETAIL)) from e
        detail = clean(f"{type(e).__name__}: {e}", MAX_DETAIL)
        return Outcome("cut", "", 0.0, time.monotonic() - start, 0, (), 0, detail)


async def request(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, object],
    *,
    max_retries: int = MAX_RETRIES,
    slot: AbstractAsyncContextManager[Any] | None = None,
    due_s: float | None = None,
) -> Outcome:
    """One request to the route at `url` with its retries, as one outcome.

    It waits for `slot` before it is sent. Its clock runs meanwhile, and starts at the monotonic
    `due_s` if given: so a late client hides nothing.
    """
    start = time.monotonic() if due_s is None else due_s
    why = ""
    async with slot or nullcontext():
        for retries in range(max_retries + 1):
            try:
                told = await attempt(session, url, body, start)
                return replace(told, retries=retries, detail=told.detail or why)
            except Retry as again:
                why = str(again)
                if retries == max_retries:
                    return Outcome("failed", "", 0.0, 0.0, 0, (), retries, why)
                await asyncio.sleep(again.after_s)
    raise AssertionError("unreachable: the last try returns")
