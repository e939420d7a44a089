"""One request as an ordinary client sends it, and what became of it.

Clients keep connections alive and come again after 429, 503 or a connection that closed before any
byte of the answer, as the openai client does. A request's clock starts with its first try.
"""

import argparse
import asyncio
import json
import math
import random
import re
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from sluice.numbers import FIRST_TOKEN_ID, count

MAX_RETRIES = 2  # openai-python's default
REQUEST_TIMEOUT_SECONDS = 300.0
COMPLETIONS = "/v1/completions"
ROUTES = (COMPLETIONS, "/generate")
_USAGE = re.compile(rb'"usage": ?\{')


def add_length_arguments(
    parser: argparse.ArgumentParser, *, prompt: tuple[int, int], output: tuple[int, int]
) -> None:
    """The flags of a Shape's lengths, with their defaults."""
    for flag, default, of in (
        ("--prompt-tokens", prompt, "a prompt"),
        ("--max-tokens", output, "an output"),
    ):
        parser.add_argument(
            flag, type=count, nargs=2, default=list(default), metavar=("A", "B"),
            help=f"least and most of {of}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, drawn uniformly; prompts are random token ids below `vocab_size`."""

    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]
    vocab_size: int
    model: str

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        """Of one request: prompt and output."""
        return rng.randint(*self.prompt_tokens), rng.randint(*self.max_tokens)

    def body(self, rng: random.Random, lengths: tuple[int, int] | None = None) -> dict[str, object]:
        """One request's JSON body, of `lengths` if they are given."""
        num_prompt, num_output = lengths or self.lengths(rng)
        return {
            "model": self.model,
            "prompt": rng.choices(range(FIRST_TOKEN_ID, self.vocab_size), k=num_prompt),
            "max_tokens": num_output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. `result`: ok, failed (typed error) or cut (no end was told)."""

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
        """Whether it was answered in full."""
        return self.result == "ok"


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile (nearest rank), or None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered) - 1e-9) - 1)] if ordered else None


class Retry(Exception):
    """The server asked to come again, or closed before it answered."""

    def __init__(self, after_s: float, why: str) -> None:
        super().__init__(why)
        self.after_s = after_s


async def read_stream(response: aiohttp.ClientResponse, start: float) -> Outcome:
    """Read one SSE answer to its end; with an error event it failed.

    Its end is `[DONE]`, or on /generate the event that holds the whole text; without it it is cut.
    Tokens are those that the usage tells, where it does: an event may hold several.
    """
    times: list[float] = []
    done, error, told = False, "", None
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data:"):
            if b'"error"' in line and "error" in _event(line):
                error = line.decode(errors="replace")[:200]
            done = done or (b'"generated_text":"' in line)
            event = _event(line) if _USAGE.search(line) else {}
            told = (event.get("usage") or {}).get("completion_tokens", told)
            if event.get("choices") != []:
                times.append(time.monotonic())
    gaps = tuple(b - a for a, b in zip(times, times[1:], strict=False))
    result = "failed" if error else ("ok" if done and times else "cut")
    ttft = times[0] - start if times else 0.0
    pod = response.headers.get("x-sluice-pod", "unknown")
    num_tokens = told if isinstance(told, int) and times else len(times)
    return Outcome(result, pod, ttft, time.monotonic() - start, num_tokens, gaps, 0, error)


def _event(line: bytes) -> dict[str, Any]:
    """The object of a `data:` line; one that is none is an error of the server's."""
    try:
        found = json.loads(line[5:])
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"error": "no JSON object"}


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks to wait, at most ten; one where it names a date or nothing."""
    try:
        return min(max(float(response.headers.get("Retry-After", "1")), 0.0), 10.0)
    except ValueError:
        return 1.0


async def attempt(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], start: float
) -> Outcome:
    """One try; raises `Retry` where an ordinary client would come again: told so, or not answered
    because the server closed the connection while the request was on its way."""
    has_begun = False
    try:
        async with session.post(url, json=body) as response:
            has_begun = True
            if response.status in (429, 503):
                raise Retry(_retry_after_s(response), f"HTTP {response.status}")
            if response.status != 200:
                detail = f"HTTP {response.status}: {(await response.text())[:200]}"
                return Outcome("failed", "", 0.0, time.monotonic() - start, 0, (), 0, detail)
            return await read_stream(response, start)
    except (TimeoutError, aiohttp.ClientError, ConnectionError) as e:
        is_closed = isinstance(e, aiohttp.ClientConnectionError | ConnectionError)
        if is_closed and not has_begun and not isinstance(e, TimeoutError):
            raise Retry(0.5, f"{type(e).__name__}: {e}"[:200]) from e
        detail = f"{type(e).__name__}: {e}"[:200]
        return Outcome("cut", "", 0.0, time.monotonic() - start, 0, (), 0, detail)


async def request(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, object],
    *,
    max_retries: int = MAX_RETRIES,
    slot: AbstractAsyncContextManager[Any] | None = None,
) -> Outcome:
    """One request to the route at `url` with its retries, as one outcome.

    It waits for `slot` before it is sent; its clock runs meanwhile.
    """
    start = time.monotonic()
    async with slot or nullcontext():
        for retries in range(max_retries + 1):
            try:
                return replace(await attempt(session, url, body, start), retries=retries)
            except Retry as again:
                if retries == max_retries:
                    return Outcome("failed", "", 0.0, 0.0, 0, (), retries, str(again))
                await asyncio.sleep(again.after_s)
    raise AssertionError("unreachable: the last try returns")
