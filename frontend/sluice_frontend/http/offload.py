"""Runs work whose time grows with a client's input in threads, so that streams do not wait.

Only for work that lets other Python code run meanwhile; `beside` is for what does not.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sluice_core.heap import release_freed

INLINE = 4096
"""Characters or bytes up to which work is done at once, which costs less than a thread."""
LARGE = 1 << 16
"""Over this they take turns, one at a time."""
ARENAS = 2
LARGE_BLOCK = 1 << 18
T = TypeVar("T")


class FairQueue:
    """Work in two threads: small pieces pass beside large ones, and both take turns.

    So the next piece reuses the memory of the last. Every thread of a pool would keep as much for
    itself (glibc's arenas).
    """

    def __init__(self) -> None:
        self._small, self._large = ThreadPoolExecutor(1, "small"), ThreadPoolExecutor(1, "large")

    async def result(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`: at once if `size` is at most INLINE."""
        if size <= INLINE:
            return work()
        loop = asyncio.get_running_loop()
        if size <= LARGE:
            return await loop.run_in_executor(self._small, work)
        return await loop.run_in_executor(self._large, _releasing, work)


def _releasing(work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        release_freed()


def keep_little() -> None:
    """Let this process keep little of what it has freed, where the C library can (glibc).

    All threads share a few heaps. Each would keep what its largest piece of work took, and the
    tokenizer's library has a thread for each CPU. Large blocks are the system's again at once; else
    glibc takes them from heaps as soon as one was freed, and they come to lie between others.
    """
    set_option, arena_max, mmap_threshold = getattr(ctypes.CDLL(None), "mallopt", None), -8, -3
    if set_option is not None:
        set_option(arena_max, ARENAS)
        set_option(mmap_threshold, LARGE_BLOCK)
