"""Runs work whose time grows with a client's input in threads, so that streams do not wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_CHARS = 4096
"""Texts up to this are tokenised inline, which costs less than a thread."""
INLINE_BYTES = 1 << 16
"""Bodies up to this are parsed inline. The largest take up to 120 ms, in which no other Python code
runs."""
LARGE_CHARS = 1 << 16
"""Texts over this are tokenised one at a time: tokenising takes a hundred times their size."""
T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T], inline: int = INLINE_CHARS) -> T:
    """The result of `work`: at once if `size` is at most `inline`, else in a thread."""
    return work() if size <= inline else await asyncio.to_thread(work)


class FairQueue:
    """Work of one kind: large pieces take turns in one thread. The next piece reuses its memory;
    every thread of a pool would keep as much for itself (glibc's arenas)."""

    def __init__(self, kind: str, *, inline: int, large: int) -> None:
        self._thread = ThreadPoolExecutor(1, f"large-{kind}")
        self._inline, self._large = inline, large

    async def result(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`: at once if `size` is at most `inline`, in turn if it is over
        `large`."""
        if size <= self._large:
            return await off_loop(size, work, self._inline)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def texts() -> FairQueue:
    """Turns of texts that are tokenised; sizes are characters."""
    return FairQueue("texts", inline=INLINE_CHARS, large=LARGE_CHARS)


def bodies() -> FairQueue:
    """Turns of bodies that are parsed; sizes are bytes."""
    return FairQueue("bodies", inline=INLINE_BYTES, large=INLINE_BYTES)
