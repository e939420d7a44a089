"""A real gate in front of a made-up engine: one client's crowd leaves another its part."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker
from unit.gate.crowds import Client, both, keyed, until

LASTS_S = 3.0
LONG_S = 10.0
"""For requests of which a few are a whole part."""
LEAST_PART = 0.35


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
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "fcfs", *keyed(tmp_path))
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
