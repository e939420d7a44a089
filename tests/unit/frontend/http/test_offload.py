"""What a client sends is worked on in a thread if it is large, and small things are not."""

import asyncio
import threading
import time

import pytest
from sluice_core.errors import RequestError
from sluice_frontend.http.offload import INLINE_BYTES, bodies


@pytest.mark.parametrize(("size", "is_here"), [(10, True), (INLINE_BYTES + 1, False)])
async def test_only_large_bodies_are_parsed_in_a_thread(size: int, is_here: bool) -> None:
    thread = await bodies().result(size, threading.get_ident)
    assert (thread == threading.get_ident()) == is_here


async def test_large_bodies_are_parsed_one_at_a_time() -> None:
    parsing, running, most = bodies(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    await asyncio.gather(*(parsing.result(INLINE_BYTES + 1, work) for _ in range(5)))
    assert most == 1


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1])
async def test_a_refusal_comes_out_of_the_thread_as_it_is(size: int) -> None:
    def refuse() -> None:
        raise RequestError("no", param="prompt")

    with pytest.raises(RequestError, match="no"):
        await bodies().result(size, refuse)
