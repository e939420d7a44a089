"""Bodies that come at once are bounded together; small ones come in beside large ones."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fastapi import Request
from sluice_core.errors import BodyTooLarge, TooManyOpen
from sluice_frontend.config import ServerConfig
from sluice_frontend.http import bodies as module
from sluice_frontend.http.bodies import FREE_BYTES, MAX_LARGEST, Answers, Bodies, too_many
from starlette.types import Message

MAX_BYTES = FREE_BYTES * 4
LARGEST = bytes(MAX_BYTES)


def request(*chunks: bytes) -> Request:
    """A request whose body comes in `chunks`."""

    async def messages() -> AsyncIterator[Message]:
        for chunk in chunks:
            yield {"type": "http.request", "body": chunk, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    return Request({"type": "http", "headers": []}, messages().__anext__)


@pytest.fixture
def bodies() -> Bodies:
    return Bodies(ServerConfig(max_body_bytes=MAX_BYTES))


async def test_what_all_hold_is_bounded_and_given_back(bodies: Bodies) -> None:
    num_at_most = MAX_LARGEST * MAX_BYTES // (MAX_BYTES - FREE_BYTES)
    async with AsyncExitStack() as others:
        for _ in range(num_at_most):
            assert await others.enter_async_context(bodies.read(request(LARGEST))) == LARGEST
        with pytest.raises(TooManyOpen) as refused:
            await others.enter_async_context(bodies.read(request(LARGEST)))
        assert refused.value.retry_after_s == 1
        said: list[str] = []

        def refuse(sentence: str) -> TooManyOpen:
            said.append(sentence)
            return too_many(sentence)

        with pytest.raises(TooManyOpen):
            await others.enter_async_context(bodies.read(request(LARGEST), refuse))
        assert len(said) == 1
        async with bodies.read(request(bytes(FREE_BYTES - 1), b"x")) as body:
            assert len(body) == FREE_BYTES
    assert bodies._num_bytes == 0


LARGE = FREE_BYTES + 2


async def test_large_answers_are_written_one_at_a_time_and_not_before_others_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 2 * LARGE - 1)
    monkeypatch.setattr(module, "LARGE_BYTES", LARGE)
    answers, may_be_read = Answers(), asyncio.Event()
    threads, running, most = set[int](), 0, 0

    def write() -> bytes:
        nonlocal running, most
        threads.add(threading.get_ident())
        running += 1
        most = max(most, running)
        running -= 1
        return bytes(LARGE)

    async def answer() -> None:
        async with answers.written(LARGE, write):
            await may_be_read.wait()

    async def settle() -> int:
        await asyncio.sleep(0.1)
        return answers._num_bytes // LARGE

    tasks = [asyncio.create_task(answer()) for _ in range(5)]
    assert await settle() == 2
    async with answers.written(LARGE - 1, lambda: b"larger") as larger:
        assert larger == b"larger"  # which waits for no reader
    async with answers.written(FREE_BYTES, lambda: b"small") as small:
        assert small == b"small"  # beside them, and at once
    may_be_read.set()
    await asyncio.gather(*tasks)
    assert (answers._num_bytes, most, len(threads)) == (0, 1, 1)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("fails", ["writing", "reading"])
async def test_an_answer_that_fails_holds_nothing(fails: str) -> None:
    answers = Answers()

    def write() -> bytes:
        if fails == "writing":
            raise ValueError
        return bytes(LARGE)

    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011 - it is that of `write`, or the block's
            async with answers.written(LARGE, write):
                raise ValueError
    assert answers._num_bytes == 0


async def test_a_body_that_is_refused_holds_nothing(bodies: Bodies) -> None:
    with pytest.raises(BodyTooLarge):
        async with bodies.read(request(LARGEST, b"x")):
            pass
    assert bodies._num_bytes == 0
