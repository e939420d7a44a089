"""Bodies that come at once are bounded together; small ones come in beside large ones."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from fastapi import Request
from sluice_worker.config import ServerConfig
from sluice_worker.errors import BodyTooLarge, TooManyOpen
from sluice_worker.server.bodies import FREE_BYTES, MAX_LARGEST, Bodies
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
        async with bodies.read(request(bytes(FREE_BYTES - 1), b"x")) as body:
            assert len(body) == FREE_BYTES
    assert bodies._num_bytes == 0


async def test_a_body_that_is_refused_holds_nothing(bodies: Bodies) -> None:
    with pytest.raises(BodyTooLarge):
        async with bodies.read(request(LARGEST, b"x")):
            pass
    assert bodies._num_bytes == 0
