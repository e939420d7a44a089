"""Claims on scraping: a pod that misbehaves is named in time, and costs no memory or state."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import httpx
import msgspec
import pytest
from sluice_core.contract import (
    TICK_RING,
    Evidence,
    FirstTokens,
    Lengths,
    MemoryReport,
    Requests,
    RuntimePatch,
    StepModel,
    Tick,
    TokenGaps,
    encode,
)
from sluice_operator.metrics import Metrics
from sluice_operator.pods import scrape
from sluice_operator.pods.scrape import (
    MAX_GONE,
    MAX_KEPT_BYTES,
    MAX_OPEN,
    MAX_OPEN_OF_OBJECT,
    Scrape,
    ScrapeError,
    Scraper,
    ScrapeTarget,
    bytes_of,
    create_client,
    last_seq,
    merge,
)
from sluice_operator.tuner.constants import BURST_MEMORY_S
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
async def _admin_port(answer: Answer) -> AsyncIterator[ScrapeTarget]:
    """A TCP server that reads one request after another and lets `answer` do what it likes."""

    serving = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast(asyncio.Task[None], asyncio.current_task())
        serving.add(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    (int(x[15:]) for x in head.decode().split("\r\n")
                     if x.lower().startswith("content-length:")), 0,
                )  # fmt: skip
                await reader.readexactly(length)
                await answer(head.decode(), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            serving.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield ScrapeTarget("uid-demo-1", "127.0.0.1", port)
        for task in (left := list(serving)):
            task.cancel()
        await asyncio.gather(*left)


def _scraper(client: httpx.AsyncClient, exchanges: asyncio.Semaphore | None = None) -> Scraper:
    """That of a new object."""
    return Scraper(client, Metrics(), exchanges or asyncio.Semaphore(MAX_OPEN))


async def _scrape(target: ScrapeTarget, times: int = 1) -> Scrape:
    async with create_client() as client:
        scraper = _scraper(client)
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


@pytest.mark.parametrize("body", [b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}", b'"\xff"'])
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
        scraper = _scraper(client)
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
        scraper, later = _scraper(client), NOW + 700
        await scraper.scrape((target,), "token", later)
        gone = (await scraper.scrape((), "token", later + 1))[target.uid]
        assert gone.evidence is not None
        assert len(gone.evidence.ticks) == 3
        assert not await scraper.scrape((), "token", later + BURST_MEMORY_S + 9)


async def test_of_pods_that_come_and_go_only_some_are_held() -> None:
    async with _admin_port(_healthy) as target, create_client() as client:
        scraper = _scraper(client)
        for number in range(MAX_GONE + 5):
            held = await scraper.scrape((replace(target, uid=str(number)),), "token", NOW)
    assert len(held) == MAX_GONE + 1
    assert str(MAX_GONE + 4) in held


def test_at_most_half_an_hour_is_held() -> None:
    held = _evidence(*range(TICK_RING))
    merged = merge(held, _evidence(TICK_RING, TICK_RING + 1))
    assert len(merged.ticks) == TICK_RING
    assert merged.ticks[-1].seq == TICK_RING + 1


def _sketched(num_entries: int, *seqs: int, **changes: Any) -> list[Tick]:
    """Ticks whose three sketches hold so many entries each, of the largest numbers."""
    sketch = {index - 2000: (1 << 53) - index for index in range(num_entries)}
    first, itl, e2e = FirstTokens(sketch=sketch), TokenGaps(sketch=sketch), Requests(sketch=sketch)
    return [create_tick(seq, ttft=first, itl=itl, e2e=e2e, **changes) for seq in seqs]


def _size(ticks: list[Tick]) -> int:
    return sum(map(bytes_of, ticks))


def test_of_ticks_with_long_sketches_the_newest_are_held() -> None:
    full = Scrape(create_evidence(ticks=_sketched(1024, *range(TICK_RING))))
    most = _size(full.ticks) // 3
    kept = full.within(most)
    assert most - bytes_of(full.ticks[0]) < _size(kept.ticks) <= most
    assert kept.ticks == full.ticks[-len(kept.ticks) :]
    assert kept.within(most) == kept
    assert kept.within(0).ticks == full.ticks[-1:], "what to ask for next"


def test_a_busy_pod_s_half_hour_is_held_whole() -> None:
    """300 requests/s, whose times are lognormal, fill 528 buckets a tick."""
    full = Scrape(create_evidence(ticks=_sketched(528 // 3, *range(TICK_RING))))
    assert full.within(MAX_KEPT_BYTES // 2) == full


@pytest.mark.parametrize("num_entries", [10, 100, 300, 1000])
def test_what_ticks_take_is_close_to_what_is_counted(num_entries: int) -> None:
    wire = encode(_sketched(num_entries, *range(200)))
    tracemalloc.start()
    ticks = msgspec.json.decode(wire, type=list[Tick])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 * taken < _size(ticks) < 1.5 * taken


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


async def _huge_evidence(head: str, writer: asyncio.StreamWriter) -> None:
    await (_healthy if "runtime_config" in head else _huge)(head, writer)


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


async def _begun_anew(head: str, writer: asyncio.StreamWriter) -> None:
    boot = {"boot_id": "boot-2"}
    is_config = "runtime_config" in head
    writer.write(_reply(encode(create_config(**boot) if is_config else _evidence(0, **boot))))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_hang, "no answer within"),
        (_drip, "no answer within"),
        (_huge, "over 64 KiB"),
        (_huge_evidence, "over 8192 KiB"),
        (_redirect, "answered 302"),
        (_not_a_number, "not a valid RuntimeConfig"),
        (_negative, "not a valid RuntimeConfig"),
        (_denied, "answered 401"),
        (_nonsense, "RemoteProtocolError"),
    ],
)
async def test_a_pod_that_misbehaves_is_named_and_what_it_said_before_is_kept(
    answer: Answer, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it answers again, or another of its name that knows nothing of those ticks."""
    now_is: Answer = _healthy
    heads = list[str]()

    async def pod(head: str, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        await now_is(head, writer)

    async with _admin_port(pod) as target, create_client() as client:
        scraper = _scraper(client)

        async def look(now: float, deadline_s: float = 10.0) -> Scrape:
            monkeypatch.setattr(scrape, "DEADLINE_S", deadline_s)
            return (await scraper.scrape((target,), "token", now))[target.uid]

        before = await look(NOW)
        assert (before.problem, [tick.seq for tick in before.ticks]) == (None, [0, 1, 2])
        now_is = answer
        held = await look(NOW + 2, 0.5 if says == "no answer within" else 10.0)
        assert held.problem is not None
        assert says in held.problem
        assert replace(held, problem=None) == before
        now_is = _begun_anew
        heads.clear()
        held = await look(NOW + 4)
    assert held.problem is None
    assert [(tick.boot_id, tick.seq) for tick in held.ticks[2:]] == [("boot-1", 2), ("boot-2", 0)]
    assert not any("after=" in head for head in heads)


async def test_an_absent_pod_is_named() -> None:
    held = await _scrape(ScrapeTarget("uid-gone", "127.0.0.1", 1))
    assert held.problem is not None
    assert "ConnectError" in held.problem


async def test_a_port_that_takes_no_connection_is_said_to_be_kept_from_the_operator() -> None:
    """As behind a default-deny policy, whose network drops what it refuses."""
    with socket.socket() as closed, socket.socket() as first, socket.socket() as second:
        closed.bind(("127.0.0.1", 0))
        closed.listen(0)
        for other in (first, second):  # the backlog is full; the kernel drops what comes
            other.setblocking(False)
            other.connect_ex(closed.getsockname())
        target = ScrapeTarget("uid-1", *closed.getsockname())
        held = await _scrape(target)
    said = "no connection to port {} within 1.5 s, as where no NetworkPolicy lets the operator in"
    assert held.problem == said.format(target.port)


async def test_one_bad_pod_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "DEADLINE_S", 3.0)
    async with _admin_port(_hang) as bad, _admin_port(_healthy) as good, create_client() as client:
        good = replace(good, uid="uid-good")
        held = await _scraper(client).scrape((bad, good), "token", NOW)
    assert held["uid-good"].problem is None
    assert held[bad.uid].problem is not None


async def _endless(head: str, writer: asyncio.StreamWriter) -> None:
    """A configuration, and evidence whose end never comes."""
    if "runtime_config" in head:
        return await _healthy(head, writer)
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.5)


@pytest.mark.parametrize("answer", [_hang, _endless])
async def test_pods_that_never_answer_or_never_end_cost_the_others_nothing_but_their_place(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of seven objects with 20 such pods each, an eighth one waits for none."""
    monkeypatch.setattr(scrape, "DEADLINE_S", 60.0)
    num_open, most_open, are_open = 0, 0, asyncio.Event()
    num_objects, is_taken = 7, 7 * MAX_OPEN_OF_OBJECT

    async def take(head: str, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open, most_open
        if answer is _endless and "runtime_config" in head:
            return await _healthy(head, writer)
        num_open += 1
        most_open = max(most_open, num_open)
        if num_open == is_taken:
            are_open.set()
        await answer(head, writer)

    async with _admin_port(take) as bad, _admin_port(_healthy) as good, create_client() as client:
        exchanges = asyncio.Semaphore(MAX_OPEN)
        silent = tuple(replace(bad, uid=str(number)) for number in range(20))
        pods = tuple(replace(good, uid=f"good-{number}") for number in range(50))
        hostile = [_scraper(client, exchanges) for _ in range(num_objects)]
        looks = [asyncio.create_task(one.scrape(silent, "token", NOW)) for one in hostile]
        async with asyncio.timeout(40.0):
            await are_open.wait()
            held = await _scraper(client, exchanges).scrape(pods, "token", NOW)
        assert {one.problem for one in held.values()} == {None}
        assert not any(look.done() for look in looks)
        assert most_open == is_taken, "each has its own places and no more"
        for look in looks:
            look.cancel()
        await asyncio.wait(looks)
    assert exchanges._value == MAX_OPEN, "all places are given back"


async def test_where_all_places_are_taken_turns_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silent pods of any number of objects delay others by their deadlines, and no more."""
    monkeypatch.setattr(scrape, "DEADLINE_S", 0.3)
    async with _admin_port(_hang) as bad, _admin_port(_healthy) as good, create_client() as client:
        exchanges = asyncio.Semaphore(2)
        silent = tuple(replace(bad, uid=str(number)) for number in range(40))
        look = asyncio.create_task(_scraper(client, exchanges).scrape(silent, "token", NOW))
        await asyncio.sleep(0)
        held = await _scraper(client, exchanges).scrape((good,), "token", NOW)
        assert held[good.uid].problem is None
        assert not look.done()
        look.cancel()
        await asyncio.wait([look])


def _saying(num_entries: int, num_ticks: int) -> Answer:
    """A pod whose first answer holds so many ticks."""
    evidence = encode(create_evidence(ticks=_sketched(num_entries, *range(num_ticks))))

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        if "after=" in head:
            writer.write(_reply(encode(create_evidence())))
        else:
            is_config = "runtime_config" in head
            writer.write(_reply(encode(create_config()) if is_config else evidence))

    return answer


async def test_what_is_kept_of_an_object_is_capped_and_the_oldest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while its pods answer, and of pods that are gone."""
    monkeypatch.setattr(scrape, "MAX_KEPT_BYTES", 8 << 20)
    async with _admin_port(_saying(200, 100)) as bad, create_client() as client:
        scraper = _scraper(client)
        for first in (0, 8, 16):
            pods = tuple(replace(bad, uid=str(number)) for number in range(first, first + 8))
            for _ in range(2):
                held = await scraper.scrape(pods, "token", NOW)
            assert len(held) == first + 8
            assert (4 << 20) < sum(_size(one.ticks) for one in held.values()) <= (8 << 20)
            assert {one.ticks[-1].seq for one in held.values()} == {99}


async def test_a_refused_patch_is_an_error_that_names_the_status() -> None:
    async def refuse(head: str, writer: asyncio.StreamWriter) -> None:
        writer.write(_reply(b"{}", "409 Conflict"))

    async with _admin_port(refuse) as target, create_client() as client:
        with pytest.raises(ScrapeError, match="409"):
            await _scraper(client).patch(target, "t", RuntimePatch(epoch=1))


async def test_an_accepted_patch_is_remembered_as_the_pods_configuration() -> None:
    async with _admin_port(_healthy) as target, create_client() as client:
        scraper = _scraper(client)
        config = await scraper.patch(target, "t", RuntimePatch(epoch=1, cap=4))
        assert config.cap == 4
        assert scraper.knows(target.uid)
