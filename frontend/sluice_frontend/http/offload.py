"""Work whose time grows with what a client sends goes to a thread, so that streams do not wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_CHARS = 4096
"""Texts up to this are tokenised at once: less than what a thread costs."""
INLINE_BYTES = 1 << 16
"""Bodies up to this are parsed at once; one of the largest takes 10 to 120 ms, in which nothing
else in Python runs: several at once would let no stream go on."""
LARGE_CHARS = 1 << 16
"""Texts over this are tokenised one at a time: while it is, one takes a hundred times its size."""
T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T], inline: int = INLINE_CHARS) -> T:
    """The result of `work`: at once if `size` is at most `inline`, else in a thread."""
    return work() if size <= inline else await asyncio.to_thread(work)


class Turns:
    """Work of one kind, of which large pieces take turns. In one thread: what each takes the next
    one takes again, while every thread of a pool would keep as much to itself (glibc's arenas)."""

    def __init__(self, kind: str, *, inline: int, large: int) -> None:
        self._thread = ThreadPoolExecutor(1, f"large-{kind}")
        self._inline, self._large = inline, large

    async def result(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`: at once if `size` is at most `inline`, in turn if it is over
        `large`; raises what it raises."""
        if size <= self._large:
            return await off_loop(size, work, self._inline)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def texts() -> Turns:
    """Texts, by their characters, that are tokenised."""
    return Turns("texts", inline=INLINE_CHARS, large=LARGE_CHARS)


def bodies() -> Turns:
    """Bodies, by their bytes, that are parsed."""
    return Turns("bodies", inline=INLINE_BYTES, large=INLINE_BYTES)
