"""Work whose time grows with what a client sends goes to a thread, so that streams do not wait."""

import asyncio
from collections.abc import Callable
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
    """What is tokenised, large texts in turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def tokenized(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which tokenises `size` characters; raises what it raises."""
        if size <= LARGE_CHARS:
            return await off_loop(size, work)
        async with self._turn:
            return await asyncio.to_thread(work)
