"""Work whose time grows with what a client sends goes to a thread, so that streams do not wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_CHARS = 4096
"""Texts up to this are tokenised at once: less than what a thread costs."""
INLINE_BYTES = 1 << 16
"""Bodies up to this are parsed at once; one of the largest takes 50 to 1,000 ms."""
LARGE_CHARS = 1 << 16
"""Texts over this are tokenised one at a time: while it is, one takes a hundred times its size."""
T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T], inline: int = INLINE_CHARS) -> T:
    """The result of `work`: at once if `size` is at most `inline`, else in a thread."""
    return work() if size <= inline else await asyncio.to_thread(work)


async def parsed(body: bytes, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of a request's body; raises what it raises."""
    return await off_loop(len(body), lambda: parse(body), INLINE_BYTES)


class Texts:
    """What is tokenised, large texts in turn. In one thread: what each takes the next one takes
    again, while every thread of a pool would keep as much to itself (glibc's arenas)."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "large-texts")

    async def tokenized(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which tokenises `size` characters; raises what it raises."""
        if size <= LARGE_CHARS:
            return await off_loop(size, work)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
