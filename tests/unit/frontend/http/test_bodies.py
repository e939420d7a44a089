"""Bodies and answers that come at once are bounded together; small ones come beside large ones."""

import asyncio
import random
import threading
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.errors import BodyTooLarge, TooManyOpen
from sluice_frontend.config import ServerConfig
from sluice_frontend.http import bodies as module
from sluice_frontend.http.bodies import (
    FREE_BYTES,
    LARGE_BYTES,
    MAX_WAITING,
    SMALL_ANSWER,
    Answers,
    Bodies,
    Room,
    too_many,
)
from starlette.requests import Request
from starlette.types import Message

MEMORY_BYTES = 16 * LARGE_BYTES
MAX_BYTES = 2 * LARGE_BYTES
NUM_LARGEST = MEMORY_BYTES // 2 // MAX_BYTES
LARGEST = bytes(MAX_BYTES)


def request(*chunks: bytes, has_length: bool = True) -> Request:
    """A request whose body comes in `chunks`."""

    async def messages() -> AsyncIterator[Message]:
        for chunk in chunks:
            yield {"type": "http.request", "body": chunk, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    length = (b"content-length", str(sum(map(len, chunks))).encode())
    return Request({"type": "http", "headers": [length] * has_length}, messages().__anext__)


@pytest.fixture
def bodies() -> Bodies:
    return Bodies(ServerConfig(max_body_bytes=MAX_BYTES, memory_bytes=MEMORY_BYTES))


def num_held(bodies: Bodies) -> int:
    return bodies._large.num_bytes + bodies._small.num_bytes


@pytest.mark.parametrize("has_length", [True, False])
async def test_what_all_hold_is_bounded_and_given_back(bodies: Bodies, has_length: bool) -> None:
    may_end, num_read = asyncio.Event(), 0

    async def hold() -> None:
        nonlocal num_read
        async with bodies.read(request(LARGEST, has_length=has_length)) as body:
            assert body == LARGEST
            num_read += 1
            await may_end.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(3 * NUM_LARGEST)]
    for _ in range(100):
        await asyncio.sleep(0)
    assert num_read == NUM_LARGEST
    for small in (request(bytes(FREE_BYTES)), request(bytes(LARGE_BYTES))):
        async with asyncio.timeout(5), bodies.read(small) as body:
            assert body
    may_end.set()
    await asyncio.gather(*tasks)
    assert (num_read, num_held(bodies)) == (3 * NUM_LARGEST, 0)


async def test_those_that_wait_too_long_or_are_too_many_are_refused(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def refuse(sentence: str) -> TooManyOpen:
        said.append(sentence)
        return too_many(sentence)

    async def ask() -> None:
        async with bodies.read(request(LARGEST), refuse):
            raise AssertionError("it was read")

    async with AsyncExitStack() as others:
        for _ in range(NUM_LARGEST):
            await others.enter_async_context(bodies.read(request(LARGEST)))
        waiting = [asyncio.create_task(ask()) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyOpen, match="wait for memory already") as refused:
            await ask()
        assert refused.value.retry_after_s == 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        monkeypatch.setattr(module, "WAIT_S", 0.05)
        with pytest.raises(TooManyOpen, match=f"{MEMORY_BYTES // 2} is the limit"):
            await ask()
        assert len(said) == 2
    assert num_held(bodies) == 0


@pytest.mark.parametrize("has_length", [True, False])
async def test_a_body_that_is_refused_holds_nothing(bodies: Bodies, has_length: bool) -> None:
    with pytest.raises(BodyTooLarge):
        async with bodies.read(request(LARGEST, b"x", has_length=has_length)):
            pass
    assert num_held(bodies) == 0


async def test_a_body_that_could_never_be_held_is_refused_at_once() -> None:
    bodies = Bodies(ServerConfig(max_body_bytes=MAX_BYTES, memory_bytes=MAX_BYTES))
    with pytest.raises(BodyTooLarge, match=str(MAX_BYTES // 2)):
        async with bodies.read(request(LARGEST)):
            pass


async def test_a_body_is_held_once(bodies: Bodies) -> None:
    """Not as a copy of what was collected, too."""
    chunks = [bytes(LARGE_BYTES // 4) for _ in range(8)]
    tracemalloc.start()
    async with bodies.read(request(*chunks)) as body:
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(body) <= peak < 1.5 * len(body)


Step = tuple[int, bool, int]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_room_is_never_overdrawn_and_all_is_given_back(steps: list[Step]) -> None:
    """Steps: how much is asked for, whether its caller leaves, and for how many turns it holds."""
    most = 20

    async def run() -> None:
        room, seen = Room(most), list[int]()

        async def borrow(num: int, turns: int) -> None:
            async with room.lent(num):
                seen.append(room.num_bytes)
                for _ in range(turns):
                    await asyncio.sleep(0)

        tasks = []
        for num, leaves, turns in steps:
            tasks.append(asyncio.create_task(borrow(num, turns)))
            await asyncio.sleep(0)
            if leaves:
                random.Random(num).choice(tasks).cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in done} <= {type(None), asyncio.CancelledError}
        assert all(num <= most for num in seen)
        assert (room.num_bytes, room.num_waiting) == (0, 0)

    asyncio.run(run())


LARGE = LARGE_BYTES + 2


async def test_large_answers_are_written_one_at_a_time_and_not_before_others_were_read() -> None:
    answers, may_be_read = Answers(4 * (3 * LARGE - 1)), asyncio.Event()
    threads, running, most, written = set[int](), 0, 0, asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()

    def write() -> bytes:
        nonlocal running, most
        threads.add(threading.get_ident())
        running += 1
        most = max(most, running)
        running -= 1
        loop.call_soon_threadsafe(written.release)
        return bytes(LARGE)

    async def answer() -> None:
        async with answers.written(LARGE, write):
            await may_be_read.wait()

    tasks = [asyncio.create_task(answer()) for _ in range(5)]
    await written.acquire()
    await written.acquire()
    async with answers.written(LARGE_BYTES, lambda: b"larger") as larger:
        assert larger == b"larger"  # which waits for no reader of large ones
    async with answers.written(SMALL_ANSWER, lambda: b"small") as small:
        assert small == b"small"  # beside them, and at once
    assert written.locked()
    may_be_read.set()
    await asyncio.gather(*tasks)
    assert (answers._large.num_bytes, most, len(threads)) == (0, 1, 1)
    assert threading.get_ident() not in threads


async def test_an_answer_of_more_than_there_is_is_written_alone() -> None:
    answers = Answers(MEMORY_BYTES)
    async with answers.written(MEMORY_BYTES, lambda: b"all") as body:
        assert body == b"all"
        other = asyncio.create_task(answers.written(LARGE, lambda: b"").__aenter__())
        await asyncio.sleep(0)
        assert answers._large.num_waiting == 1
        other.cancel()
    assert answers._large.num_bytes == 0


@pytest.mark.parametrize("fails", ["writing", "reading"])
async def test_an_answer_that_fails_holds_nothing(fails: str) -> None:
    answers = Answers(MEMORY_BYTES)

    def write() -> bytes:
        if fails == "writing":
            raise ValueError
        return bytes(LARGE)

    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011 - it is that of `write`, or the block's
            async with answers.written(LARGE, write):
                raise ValueError
    assert answers._large.num_bytes == 0
