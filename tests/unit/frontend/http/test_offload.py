"""What takes long is done in a thread: large pieces in turn, and small ones beside them."""

import asyncio
import threading
import time

import pytest
from sluice_core.errors import RequestError
from sluice_frontend.http.offload import INLINE, LARGE, FairQueue


@pytest.mark.parametrize(("size", "is_here"), [(10, True), (INLINE + 1, False), (LARGE + 1, False)])
async def test_only_small_work_is_done_here(size: int, is_here: bool) -> None:
    thread = await FairQueue().result(size, threading.get_ident)
    assert (thread == threading.get_ident()) == is_here


@pytest.mark.parametrize("size", [INLINE + 1, LARGE + 1])
async def test_pieces_of_a_kind_take_turns_in_one_thread(size: int) -> None:
    queue, running, most, threads = FairQueue(), 0, 0, set[int]()

    def work() -> None:
        nonlocal running, most
        threads.add(threading.get_ident())  # each that had one would keep its memory
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    await asyncio.gather(*(queue.result(size, work) for _ in range(5)))
    assert (most, len(threads)) == (1, 1)


@pytest.mark.parametrize("size", [10, INLINE + 1, LARGE + 1])
async def test_a_refusal_comes_out_of_the_thread_as_it_is(size: int) -> None:
    def refuse() -> None:
        raise RequestError("no", param="prompt")

    with pytest.raises(RequestError, match="no"):
        await FairQueue().result(size, refuse)
