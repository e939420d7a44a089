"""*Rim*: the client: a trace over `/v1/completions`, streamed, as all servers take it."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from bench.peers.results import Result
from bench.peers.traces import Request
from bench.peers.variants import MODEL_NAME
from sluice.measure.client import Outcome

LIMIT_S = 1800.0


class RunFailed(Exception):
    """A peer did not answer as asked; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Answer:
    """When each text of a stream came, and how many tokens the server counted."""

    arrived_s: tuple[float, ...]
    tokens: int

    def since(self, sent_s: float) -> Outcome:
        """What the client saw of a request that it sent then."""
        pairs = zip(self.arrived_s, self.arrived_s[1:], strict=False)
        first_s, whole_s = self.arrived_s[0] - sent_s, self.arrived_s[-1] - sent_s
        gaps_s = tuple(later - earlier for earlier, later in pairs)
        return Outcome("ok", "", first_s, whole_s, self.tokens, gaps_s, 0)


def body(request: Request) -> dict[str, object]:
    """JSON that vLLM, llama.cpp's server and Sluice read alike."""
    return {
        "model": MODEL_NAME,
        "prompt": list(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _answer(session: aiohttp.ClientSession, url: str, request: Request) -> Answer:
    arrived, tokens = [], 0
    async with session.post(f"{url}/v1/completions", json=body(request)) as response:
        if response.status != 200:
            raise RunFailed(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RunFailed(f"an error in the stream: {str(event['error'])[:200]}")
            if any(choice["text"] for choice in event["choices"]):
                arrived.append(time.monotonic())
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    if tokens != request.output_tokens or not arrived:
        raise RunFailed(f"{tokens} tokens in {len(arrived)} events, not {request.output_tokens}")
    return Answer(tuple(arrived), tokens)


async def _all(url: str, requests: Sequence[Request], at_once: int | None) -> Result:
    room = asyncio.Semaphore(at_once or len(requests))
    # A connection for each: llama.cpp's server ends one after a stream without saying so.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.monotonic()

        async def one(request: Request) -> Outcome:
            await asyncio.sleep(max(0.0, start + request.at_s - time.monotonic()))
            async with room:
                sent = time.monotonic()
                return (await _answer(session, url, request)).since(sent)

        outcomes = await asyncio.gather(*(one(request) for request in requests))
        wall_s = time.monotonic() - start
        return Result(wall_s, sum(one.num_tokens for one in outcomes), tuple(outcomes))


def run(url: str, requests: Sequence[Request], at_once: int | None) -> Result:
    """Send all, each at its time, at most `at_once` open. Raises RunFailed."""
    try:
        return asyncio.run(_all(url, requests, at_once))
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        raise RunFailed(f"{type(error).__name__}: {error}"[:200]) from error
