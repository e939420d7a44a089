"""*Rim*: clients of one server: streams that are watched, clients that ask again and again."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from bench.peers.variants import MODEL_NAME
from sluice_core.contract import Evidence, RuntimeConfig, decode

LIMIT_S = 120.0
SEEDS = itertools.count(1)


def body(tokens: int, **more: object) -> dict[str, Any]:
    """A streamed completion of so many tokens, which every engine here takes.

    It is sampled, since Ollama ends an answer that repeats a token 30 times.
    """
    seed = next(SEEDS)
    return {
        "model": MODEL_NAME,
        "prompt": f"number {seed} of many",
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


def whole_body(tokens: int) -> dict[str, Any]:
    """The same, not streamed."""
    asked = {**body(tokens), "stream": False}
    asked.pop("stream_options")
    return asked


@dataclass
class Stream:
    """A request as its client sees it. Times: monotonic seconds; 0 while it has not happened."""

    tokens: int
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    sent_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    got_tokens: int = 0
    is_done: bool = False
    error: str = ""
    task: "asyncio.Task[None] | None" = None

    @property
    def is_whole(self) -> bool:
        """Answered to the last token."""
        return self.is_done and not self.error and self.got_tokens == self.tokens

    async def read(self, session: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> None:
        """Send it and read to the end; what goes wrong is in `error`."""
        self.sent_s = time.monotonic()
        try:
            async with session.post(url, json=asked) as response:
                self.status, self.headers = response.status, dict(response.headers)
                if response.status != 200:
                    self.error = (await response.text())[:300]
                async for line in response.content:
                    self._line(line)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self.error = self.error or f"{type(error).__name__}: {error}"
        self.ended_s = time.monotonic()
        if not self.error and not self.is_whole:
            self.error = f"{self.got_tokens} of {self.tokens} tokens, [DONE]: {self.is_done}"

    def _line(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.startswith(b"data: [DONE]"):
            self.is_done = True
            return
        event = json.loads(line[6:]) or {}  # llama.cpp sends a null
        if "error" in event:
            self.error = f"an event: {json.dumps(event['error'])[:300]}"
        self.first_s = self.first_s or time.monotonic()
        if usage := event.get("usage"):
            self.got_tokens = usage["completion_tokens"]


class Clients:
    """Requests to one server, and its admin port."""

    def __init__(self, session: aiohttp.ClientSession, url: str, admin_url: str) -> None:
        self._session, self._url, self._admin_url = session, url, admin_url
        self.streams: list[Stream] = []

    def stream(self, tokens: int, **more: object) -> Stream:
        """Begin one; `task` is done when it has ended."""
        made = Stream(tokens)
        url = f"{self._url}/v1/completions"
        made.task = asyncio.create_task(made.read(self._session, url, body(tokens, **more)))
        self.streams.append(made)
        return made

    async def ask(self, path: str = "/v1/completions", **asked: Any) -> tuple[int, str]:
        """Status and text of a request that is not streamed."""
        async with self._session.post(self._url + path, json=asked) as response:
            return response.status, await response.text()

    async def status(self, path: str) -> int:
        """The status of GET `path` on the API port."""
        async with self._session.get(self._url + path) as response:
            return response.status

    @contextlib.asynccontextmanager
    async def load(self, num_clients: int, tokens: int) -> AsyncIterator[list[Stream]]:
        """Clients that ask without a pause; on leaving, all that was asked has ended."""
        streams: list[Stream] = []
        is_over = False

        async def client() -> None:
            while not is_over:
                streams.append(self.stream(tokens))
                task = streams[-1].task
                assert task is not None
                await task

        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(client())
            yield streams
            is_over = True

    async def config(self) -> RuntimeConfig:
        """What is in force, and how much runs."""
        async with self._session.get(f"{self._admin_url}/v1/runtime_config") as response:
            return decode(await response.read(), RuntimeConfig)

    async def evidence(self) -> Evidence:
        """All closed ticks."""
        async with self._session.get(f"{self._admin_url}/v1/evidence") as response:
            return decode(await response.read(), Evidence)

    async def set_cap(self, cap: int) -> float:
        """A new cap, acknowledged; the moment at which it was sent."""
        asked = {"epoch": (await self.config()).epoch + 1, "cap": cap}
        sent_s = time.monotonic()
        url = f"{self._admin_url}/v1/runtime_config"
        async with self._session.patch(url, json=asked) as response:
            assert response.status == 200, await response.text()
            return sent_s

    async def until(
        self, holds: Callable[[RuntimeConfig], bool], limit_s: float = LIMIT_S
    ) -> RuntimeConfig:
        """The first configuration for which it holds."""
        end_s = time.monotonic() + limit_s
        while not holds(seen := await self.config()):
            assert time.monotonic() < end_s, f"not within {limit_s} s: {seen}"
            await asyncio.sleep(0.01)
        return seen


async def until(holds: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Return once it holds."""
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {limit_s} s"
        await asyncio.sleep(0.01)


async def ended(streams: list[Stream]) -> list[Stream]:
    """The streams, each to its end."""
    tasks: list[Awaitable[None]] = [each.task for each in streams if each.task is not None]
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
    return streams


@contextlib.asynccontextmanager
async def clients_of(url: str, admin_url: str) -> AsyncIterator[Clients]:
    """Clients with a connection for each request, cut on leaving."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = Clients(session, url, admin_url)
        try:
            yield clients
        finally:
            for each in clients.streams:
                if each.task is not None:
                    each.task.cancel()
