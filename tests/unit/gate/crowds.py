"""*Rim*: a made-up engine that takes its time, a real gate in front, and clients in crowds."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from integration.worker_process import Worker, gate_of

SERVICE_S = 0.05


@dataclass(slots=True)
class Engine:
    """It runs all that it gets at once. `most`: the most sequences that it had at once.

    `num_floods_ended`: floods whose reader is gone.
    """

    url: str = ""
    running: int = 0
    most: int = 0
    num_floods_ended: int = 0
    alone: list[bool] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked.get("prompt") == "flood":
            return await self.flood(request)
        inputs = asked.get("input", asked.get("documents", [""]))
        num = asked.get("n", len(inputs))
        self.running += num
        self.most = max(self.most, self.running)
        if num > 1:
            self.alone.append(self.running == num)
        try:
            if asked.get("prompt") == "held":
                await self.may_end.wait()
            await asyncio.sleep(SERVICE_S * random.uniform(0.8, 1.2))
        finally:
            self.running -= num
        return web.json_response({"choices": [{"index": 0, "text": "a"}] * num})

    async def flood(self, request: web.Request) -> web.StreamResponse:
        """A stream that does not end while somebody reads it."""
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        self.running += 1
        try:
            while True:
                await reply.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % (b"a" * 65536))
        finally:
            self.running -= 1
            self.num_floods_ended += 1

    async def nothing(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})


@asynccontextmanager
async def made_engine() -> AsyncIterator[Engine]:
    engine, app = Engine(), web.Application(client_max_size=1 << 24)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_get("/{path:.*}", engine.nothing)
    app.router.add_post("/{path:.*}", engine.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
    assert site._server is not None
    engine.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield engine
    finally:
        engine.may_end.set()
        await runner.cleanup()


@asynccontextmanager
async def both(directory: Path, *flags: str) -> AsyncIterator[tuple[Engine, Worker]]:
    """A made-up engine in this process, and a gate in one of its own."""
    async with made_engine() as engine, AsyncExitStack() as stack:
        started = gate_of(engine.url, directory, *flags)
        running = await asyncio.to_thread(started.__enter__)
        stack.push_async_callback(asyncio.to_thread, started.__exit__, None, None, None)
        yield engine, running


def keyed(directory: Path) -> tuple[str, str]:
    """Flags for two keys, a and b."""
    (directory / "keys").write_text("a\nb\n")
    return "--api-key-file", str(directory / "keys")


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for it, a minute at most."""
    async with asyncio.timeout(60):
        while True:
            if told if isinstance(told := holds(), bool) else await told:
                return
            await asyncio.sleep(0.01)


class Client:
    """One of two clients: by its key, or by the address from which it comes."""

    def __init__(self, url: str, *, key: str = "", address: str = "127.0.0.1") -> None:
        connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.session = aiohttp.ClientSession(url, connector=connector, headers=headers)
        self.statuses: Counter[int] = Counter()

    async def __aenter__(self) -> "Client":
        await self.session.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.session.__aexit__(*error)

    async def ask(self, path: str = "/v1/completions", **fields: object) -> tuple[int, str]:
        body = {"model": "m", "prompt": "a", **fields}
        async with self.session.post(path, json=body) as reply:
            text = await reply.text()
        self.statuses[reply.status] += 1
        return reply.status, text

    async def ask_again(self, **fields: Any) -> None:
        """One request after another; who is refused waits a moment."""
        while True:
            status, _ = await self.ask(**fields)
            if status != 200:
                await asyncio.sleep(0.05)

    async def crowd(self, num: int, lasts_s: float, **fields: Any) -> None:
        """So many that ask again and again, for so long."""
        tasks = [asyncio.create_task(self.ask_again(**fields)) for _ in range(num)]
        _, pending = await asyncio.wait(tasks, timeout=lasts_s)
        assert len(pending) == num, [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
