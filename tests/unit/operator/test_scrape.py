"""Claims on scraping: a pod that misbehaves is named in time, and costs no memory or state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sluice_operator import scrape
from sluice_operator.metrics import Metrics
from sluice_operator.scrape import (
    MAX_CONNECTIONS,
    MAX_ENTRIES,
    MAX_GONE,
    Scrape,
    ScrapeError,
    Scraper,
    Target,
    create_client,
    last_seq,
    merge,
)
from sluice_operator.tuner.constants import BURST_MEMORY_S
from sluice_worker.contract import (
    TICK_RING,
    Evidence,
    FirstTokens,
    Lengths,
    MemoryReport,
    Requests,
    RuntimePatch,
    StepModel,
    TokenGaps,
    encode,
)
from unit.operator.observations import NOW, create_config, create_evidence, create_tick

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def _evidence(*seqs: int, boot_id: str = "boot-1") -> Evidence:
    return create_evidence(
        ticks=[create_tick(seq, boot_id=boot_id) for seq in seqs], boot_id=boot_id
    )


def _reply(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@asynccontextmanager
async def _admin_port(answer: Answer) -> AsyncIterator[Target]:
    """A TCP server that reads one request after another and lets `answer` do what it likes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(x[15:]) for x in head.decode().split("\r\n")
                     if x.lower().startswith("content-length:")), 0,
                )  # fmt: skip
                await reader.readexactly(length)
                await answer(head.decode(), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target("uid-demo-1", "127.0.0.1", port)


async def _scrape(target: Target, times: int = 1) -> Scrape:
    async with create_client() as client:
        scraper = Scraper(client, Metrics())
        for _ in range(times):
            held = await scraper.scrape((target,), "token", NOW)
    return held[target.uid]


async def _healthy(head: str, writer: asyncio.StreamWriter) -> None:
    after = int(head.partition("after=")[2].partition(" ")[0] or -1)
    fresh = [seq for seq in (0, 1, 2) if seq > after]
    body = encode(create_config()) if "runtime_config" in head else encode(_evidence(*fresh))
    writer.write(_reply(body))


async def test_only_new_ticks_are_asked_for_and_the_old_ones_stay() -> None:
    async with _admin_port(_healthy) as target:
        held = await _scrape(target, times=3)
    assert held.problem is None
    assert held.evidence is not None
    assert [tick.seq for tick in held.evidence.ticks] == [0, 1, 2]


@pytest.mark.parametrize("body", [b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'"\xff"'])
async def test_an_answer_that_cannot_be_decoded_names_the_pod_and_harms_nobody(
    body: bytes,
) -> None:
    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(_reply(body))

    async with _admin_port(answer) as target:
        held = await _scrape(target)
    assert held.problem is not None
    assert held.problem.startswith("not a valid")


@pytest.mark.parametrize(
    "changes",
    [
        {"ticks": [create_tick(0, ttft=FirstTokens(sketch={i: 1 for i in range(1100)}))]},
        {"ticks": [create_tick(0, itl=TokenGaps(sketch={40_000: 1}))]},
        {"ticks": [create_tick(seq) for seq in range(TICK_RING + 1)]},
        {"ticks": [create_tick(0, boot_id="x" * 65)]},
        {"lengths": Lengths(1e308, 0, 1)},
        {"ticks": [create_tick(0, busy_s=1e308)]},
        {"step_model": StepModel(1e308, 0.0, 0.0, 0.0, 1, 1.0)},
        {"memory": MemoryReport({str(i): 1 for i in range(65)}, {}, 1)},
        {"memory": MemoryReport({"x" * 65: 1}, {}, 1)},
    ],
)
async def test_evidence_that_would_take_the_operators_memory_or_numbers_is_refused(
    changes: dict[str, Any],
) -> None:
    """Any image may stand for the worker's: what it says is held, and computed with."""

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        said = create_config() if "runtime_config" in head else create_evidence(**changes)
        writer.write(_reply(encode(said)))

    async with _admin_port(answer) as target:
        held = await _scrape(target)
    assert held.evidence is None
    assert held.problem is not None
    assert held.problem.startswith("not a valid Evidence")


async def test_the_token_is_sent_and_compression_is_not_accepted() -> None:
    heads = []

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        await _healthy(head, writer)

    async with _admin_port(answer) as target:
        await _scrape(target)
    assert heads
    assert all("authorization: bearer token" in head for head in heads)
    assert all("accept-encoding: identity" in head for head in heads)


def test_a_restarted_pod_keeps_what_it_served_before() -> None:
    merged = merge(_evidence(5, 6), _evidence(boot_id="boot-2"))
    assert last_seq(merged) is None, "the new boot has closed no tick yet: all are asked for"
    merged = merge(merged, _evidence(0, 1, boot_id="boot-2"))
    assert [(tick.boot_id, tick.seq) for tick in merged.ticks] == [
        ("boot-1", 5), ("boot-1", 6), ("boot-2", 0), ("boot-2", 1),
    ]  # fmt: skip
    assert last_seq(merged) == 1


async def test_a_pod_that_is_gone_is_held_while_its_ticks_count() -> None:
    async with _admin_port(_healthy) as target, create_client() as client:
        scraper = Scraper(client, Metrics())
        await scraper.scrape((target,), "token", NOW + 5)
        soon = (await scraper.scrape((), "token", NOW + 60))[target.uid]
        assert soon.evidence is not None
        assert [tick.seq for tick in soon.evidence.ticks] == [0, 1, 2]
        part = (await scraper.scrape((), "token", NOW + BURST_MEMORY_S + 3))[target.uid]
        assert part.evidence is not None
        assert [tick.seq for tick in part.evidence.ticks] == [2]
        assert target.uid in await scraper.scrape((), "token", NOW + BURST_MEMORY_S + 4, 1200.0)
        assert not await scraper.scrape((), "token", NOW + BURST_MEMORY_S + 9)


async def test_a_pod_that_is_gone_is_held_for_as_long_whatever_its_clock_said() -> None:
    async with _admin_port(_healthy) as target, create_client() as client:
        scraper, later = Scraper(client, Metrics()), NOW + 700
        await scraper.scrape((target,), "token", later)
        gone = (await scraper.scrape((), "token", later + 1))[target.uid]
        assert gone.evidence is not None
        assert len(gone.evidence.ticks) == 3
        assert not await scraper.scrape((), "token", later + BURST_MEMORY_S + 9)


async def test_of_pods_that_come_and_go_only_some_are_held() -> None:
    async with _admin_port(_healthy) as target, create_client() as client:
        scraper = Scraper(client, Metrics())
        for number in range(MAX_GONE + 5):
            held = await scraper.scrape((replace(target, uid=str(number)),), "token", NOW)
    assert len(held) == MAX_GONE + 1
    assert str(MAX_GONE + 4) in held


def test_at_most_half_an_hour_is_held() -> None:
    held = _evidence(*range(TICK_RING))
    merged = merge(held, _evidence(TICK_RING, TICK_RING + 1))
    assert len(merged.ticks) == TICK_RING
    assert merged.ticks[-1].seq == TICK_RING + 1


def test_of_ticks_with_long_sketches_the_newest_are_held() -> None:
    sketch = {index: 1 for index in range(1024)}
    first, itl, e2e = FirstTokens(sketch=sketch), TokenGaps(sketch=sketch), Requests(sketch=sketch)
    full = [create_tick(seq, ttft=first, itl=itl, e2e=e2e) for seq in range(TICK_RING)]
    num_fitting = MAX_ENTRIES // (3 * 1024)
    at_once = merge(None, create_evidence(ticks=full))
    one_by_one = None
    for tick in full:
        one_by_one = merge(one_by_one, create_evidence(ticks=[tick]))
    assert at_once == one_by_one
    assert at_once.ticks == full[-num_fitting:]


def test_a_busy_pod_s_half_hour_is_held_whole() -> None:
    """300 requests/s, whose times are lognormal, fill 528 buckets a tick."""
    sketch = {index: 1 for index in range(528 // 3)}
    first, itl, e2e = FirstTokens(sketch=sketch), TokenGaps(sketch=sketch), Requests(sketch=sketch)
    full = [create_tick(seq, ttft=first, itl=itl, e2e=e2e) for seq in range(TICK_RING)]
    assert merge(None, create_evidence(ticks=full)).ticks == full


def test_ticks_that_are_sent_twice_are_held_once() -> None:
    merged = merge(_evidence(0, 1, 2), _evidence(1, 2, 3))
    assert [tick.seq for tick in merged.ticks] == [0, 1, 2, 3]


async def _hang(head: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def _drip(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(1_000_000):
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.01)  # each byte comes well within a read timeout


async def _huge(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
    while True:
        writer.write(b" " * 65536)
        await writer.drain()


async def _redirect(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_reply(b"", "302 Found", "Location: http://169.254.169.254/"))


async def _not_a_number(head: str, writer: asyncio.StreamWriter) -> None:
    body = encode(create_config()).replace(b'"running":0', b'"running":NaN')
    writer.write(_reply(body))


async def _negative(head: str, writer: asyncio.StreamWriter) -> None:
    body = encode(create_config()).replace(b'"running":0', b'"running":-1')
    writer.write(_reply(body))


async def _denied(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(_reply(b"{}", "401 Unauthorized"))


async def _nonsense(head: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_hang, "no answer within"),
        (_drip, "no answer within"),
        (_huge, "over 8 MiB"),
        (_redirect, "answered 302"),
        (_not_a_number, "not a valid RuntimeConfig"),
        (_negative, "not a valid RuntimeConfig"),
        (_denied, "answered 401"),
        (_nonsense, "RemoteProtocolError"),
    ],
)
async def test_a_pod_that_misbehaves_is_named_and_its_evidence_kept(
    answer: Answer, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "DEADLINE_S", 0.5 if says == "no answer within" else 10.0)
    async with _admin_port(answer) as target:
        held = await _scrape(target)
    assert held.problem is not None
    assert says in held.problem
    assert held.evidence is None


async def test_an_absent_pod_is_named() -> None:
    held = await _scrape(Target("uid-gone", "127.0.0.1", 1))
    assert held.problem is not None
    assert "ConnectError" in held.problem


async def test_one_bad_pod_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "DEADLINE_S", 3.0)
    async with _admin_port(_hang) as bad, _admin_port(_healthy) as good, create_client() as client:
        good = replace(good, uid="uid-good")
        held = await Scraper(client, Metrics()).scrape((bad, good), "token", NOW)
    assert held["uid-good"].problem is None
    assert held[bad.uid].problem is not None


async def test_pods_of_one_object_that_never_answer_do_not_hold_all_connections() -> None:
    async with _admin_port(_hang) as bad, _admin_port(_healthy) as good, create_client() as client:
        silent = tuple(replace(bad, uid=str(number)) for number in range(MAX_CONNECTIONS))
        one, other = (Scraper(client, Metrics()) for _ in range(2))
        waiting = asyncio.create_task(one.scrape(silent, "token", NOW))
        await asyncio.sleep(0.5)  # all that may be open is
        held = await other.scrape((good,), "token", NOW)
        assert not waiting.done()
        waiting.cancel()
    assert held[good.uid].problem is None


async def test_a_refused_patch_is_an_error_that_names_the_status() -> None:
    async def refuse(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(_reply(b"{}", "409 Conflict"))

    async with _admin_port(refuse) as target, create_client() as client:
        with pytest.raises(ScrapeError, match="409"):
            await Scraper(client, Metrics()).patch(target, "t", RuntimePatch(epoch=1))


async def test_an_accepted_patch_is_remembered_as_the_pods_configuration() -> None:
    async with _admin_port(_healthy) as target, create_client() as client:
        scraper = Scraper(client, Metrics())
        config = await scraper.patch(target, "t", RuntimePatch(epoch=1, max_num_seqs=4))
        assert config.max_num_seqs == 4
        assert scraper.knows(target.uid)
