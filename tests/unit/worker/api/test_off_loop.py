"""What a client sends is worked on in a thread if it is large, and small things are not."""

import threading

import pytest
from sluice_worker.errors import RequestError
from sluice_worker.server.off_loop import INLINE_BYTES, parsed


@pytest.mark.parametrize(("size", "is_here"), [(10, True), (INLINE_BYTES + 1, False)])
async def test_only_large_bodies_are_parsed_in_a_thread(size: int, is_here: bool) -> None:
    thread, found = await parsed(b"x" * size, lambda body: (threading.get_ident(), len(body)))
    assert (thread == threading.get_ident()) == is_here
    assert found == size


@pytest.mark.parametrize("size", [10, INLINE_BYTES + 1])
async def test_a_refusal_comes_out_of_the_thread_as_it_is(size: int) -> None:
    def refuse(body: bytes) -> None:
        raise RequestError("no", param="prompt")

    with pytest.raises(RequestError, match="no"):
        await parsed(b"x" * size, refuse)
