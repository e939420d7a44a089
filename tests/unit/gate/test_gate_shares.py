"""A real gate in front of a made-up engine: one client's crowd leaves another its part."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from integration.worker_process import Worker
from unit.gate.recording import gate

SERVICE_S = 0.05
LASTS_S = 3.0
LONG_S = 10.0
"""For requests of which a few are a whole part."""
LEAST_PART = 0.35


@dataclass(slots=True)
class Engine:
    """It runs all that it gets at once. `most`: the most sequences that it had at once."""

    url: str = ""
    running: int = 0
    most: int = 0
    alone: list[bool] = field(default_factory=list)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        asked = await request.json()
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
        started = gate(directory, engine.url, *flags)
        running = await asyncio.to_thread(started.__enter__)
        stack.push_async_callback(asyncio.to_thread, started.__exit__, None, None, None)
        yield engine, running


def keyed(directory: Path) -> tuple[str, str]:
    """Flags for two keys, a and b."""
    (directory / "keys").write_text("a\nb\n")
    return "--api-key-file", str(directory / "keys")


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait for it, half a minute at most."""
    async with asyncio.timeout(30):
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


CROWDS = {"by arrival": {}, "with priority": {"priority": -1000}, "of 100 each": {"n": 100}}


async def part_of_second(
    first: Client, second: Client, num: int, cost: int, **fields: Any
) -> float:
    """The second's part of all that was served while the first has a crowd of forty."""
    lasts_s = LASTS_S if cost == 1 else LONG_S
    crowd = asyncio.create_task(first.crowd(40, lasts_s + 0.4, **fields))
    await asyncio.sleep(0.2)
    before = first.statuses[200]
    await second.crowd(num, lasts_s)
    others, own = first.statuses[200] - before, second.statuses[200]
    await crowd
    assert set(second.statuses) == {200}
    assert others > 0
    return own / (own + cost * others)


@pytest.mark.parametrize("name", CROWDS)
async def test_a_second_key_has_about_half_of_what_is_served(tmp_path: Path, name: str) -> None:
    flags = ("--max-num-seqs", "4", "--scheduling-policy", "priority", *keyed(tmp_path))
    async with (
        both(tmp_path, *flags) as (_, running),
        Client(running.url, key="a") as first,
        Client(running.url, key="b") as second,
    ):
        cost: Any = CROWDS[name].get("n", 1)
        part = await part_of_second(first, second, 8, cost, **CROWDS[name])
    assert part > LEAST_PART, part


@pytest.mark.parametrize("name", CROWDS)
async def test_a_second_key_with_one_request_at_a_time_has_each_second_turn(
    tmp_path: Path, name: str
) -> None:
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "priority", *keyed(tmp_path))
    async with (
        both(tmp_path, *flags) as (_, running),
        Client(running.url, key="a") as first,
        Client(running.url, key="b") as second,
    ):
        part = await part_of_second(first, second, 1, 1, **CROWDS[name])
    assert part > LEAST_PART, part


async def test_without_keys_each_address_has_its_part(tmp_path: Path) -> None:
    async with (
        both(tmp_path, "--max-num-seqs", "4") as (_, running),
        Client(running.url, address="127.0.0.1") as first,
        Client(running.url, address="127.0.0.2") as second,
    ):
        part = await part_of_second(first, second, 8, 1)
    assert part > LEAST_PART, part


async def test_behind_a_trusted_proxy_each_address_that_it_names_has_its_part(
    tmp_path: Path,
) -> None:
    flags = ("--max-num-seqs", "4", "--trusted-proxies", '["127.0.0.0/8"]')
    async with (
        both(tmp_path, *flags) as (_, running),
        Client(running.url) as first,
        Client(running.url) as second,
    ):
        first.session.headers["x-forwarded-for"] = "198.51.100.7, 192.0.2.1"
        second.session.headers["x-forwarded-for"] = "198.51.100.7, 192.0.2.2"
        part = await part_of_second(first, second, 8, 1)
    assert part > LEAST_PART, part


async def test_a_queue_that_one_key_has_filled_has_room_for_another(tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "8", *keyed(tmp_path))
    async with (
        both(tmp_path, *flags) as (engine, running),
        Client(running.url, key="a") as first,
        Client(running.url, key="b") as second,
    ):
        many = [asyncio.create_task(first.ask(prompt="held")) for _ in range(20)]
        await until(lambda: first.statuses[429] == 11)  # one runs, eight wait
        others = [asyncio.create_task(second.ask()) for _ in range(6)]
        await until(lambda: second.statuses[429] == 2 and first.statuses[429] == 15)
        engine.may_end.set()
        told = await asyncio.gather(*many, *others)
    assert first.statuses == {200: 5, 429: 15}
    assert second.statuses == {200: 4, 429: 2}
    assert sum("other clients need their part" in text for _, text in told) == 4


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["a"] * 2048}),
        ("/rerank", {"query": "a", "documents": ["a"] * 1500}),
        ("/v1/completions", {"n": 2000}),
    ],
)
async def test_more_than_may_wait_goes_alone_if_its_client_has_nothing_else_waiting(
    tmp_path: Path, path: str, fields: dict[str, Any]
) -> None:
    async with (
        both(tmp_path, "--max-num-seqs", "256", *keyed(tmp_path)) as (engine, running),
        Client(running.url, key="a") as first,
        Client(running.url, key="b") as second,
    ):
        small = [asyncio.create_task(second.ask(prompt="held")) for _ in range(2)]
        await until(lambda: engine.running == 2)
        large = asyncio.create_task(first.ask(path, **fields))
        await until(lambda: asyncio.to_thread(has_waiting, running))
        status, _ = await first.ask(path, **fields)
        assert status == 429
        small += [asyncio.create_task(second.ask()) for _ in range(4)]
        await asyncio.sleep(0.1)
        engine.may_end.set()
        assert (await large)[0] == 200
        assert {status for status, _ in await asyncio.gather(*small)} == {200}
    assert engine.alone == [True]


def has_waiting(running: Worker) -> bool:
    told = httpx.get(running.admin_url + "/v1/runtime_config", timeout=30).json()
    return any(told["waiting"].values())


async def test_a_deadline_is_not_missed_for_another_keys_crowd(tmp_path: Path) -> None:
    """The first request of a key waits for one turn, and not for the crowd."""
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "deadline", *keyed(tmp_path))
    async with (
        both(tmp_path, *flags) as (_, running),
        Client(running.url, key="a") as first,
        Client(running.url, key="b") as second,
    ):
        crowd = asyncio.create_task(first.crowd(40, LASTS_S))
        await asyncio.sleep(1.0)  # so that it is known how long each takes
        for _ in range(5):
            status, text = await second.ask(slo_ttft_ms=1000)
            assert status == 200, text
        await crowd
