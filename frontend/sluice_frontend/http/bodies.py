"""What the bodies of all requests, and of all answers, may take together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import Request
from sluice_core.errors import SluiceError, TooManyOpen

from ..config import ServerConfig
from .guards import read_body

FREE_BYTES = 1 << 16
"""Of each body, that count for nothing: ordinary requests come in whoever sends large ones."""
MAX_LARGEST = 16
"""Bodies of the largest size that may be held at once."""
LARGE_BYTES = 1 << 20
MAX_UNREAD_BYTES = 32 << 20
"""Of answers: no other one of LARGE_BYTES is written while clients have more than this to read."""
Refusal = Callable[[str], SluiceError]
"""What is raised for a sentence."""


def too_many(sentence: str) -> TooManyOpen:
    """What a request is told that was no arrival of anything to generate."""
    return TooManyOpen(sentence, retry_after_s=1)


class Bodies:
    """The bytes of requests that are held while they come, are parsed and tokenised: those over
    FREE_BYTES of each."""

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request, refusal: Refusal = too_many) -> AsyncIterator[bytes]:
        """A body, counted as it comes until the caller is done with it.

        Raises what `read_body` raises, and what `refusal` gives where others hold too much.
        """
        limits, counted = self._limits, 0

        def count(num_bytes: int) -> None:
            nonlocal counted
            more = max(0, num_bytes - FREE_BYTES) - counted
            if more and self._num_bytes + more > MAX_LARGEST * limits.max_body_bytes:
                raise refusal(f"{self._num_bytes} bytes of large bodies are being read already")
            counted += more
            self._num_bytes += more

        try:
            yield await read_body(request, limits.max_body_bytes, limits.receive_timeout, count)
        finally:
            self._num_bytes -= counted


class Answers:
    """The bytes of answers until they are read. Those over FREE_BYTES are written one at a time: it
    takes as much again meanwhile, and nothing else in Python runs."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._large, self._turn = asyncio.Lock(), asyncio.Lock()
        self._was_read = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "large-answers")

    @asynccontextmanager
    async def written(self, size: int, write: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """What `write` makes, of about `size` bytes; if it is large, in its turn, and counted until
        the caller is done with it.

        Large ones wait for those who read, which has an end: who does not is cut (`connection`).
        """
        if size <= FREE_BYTES:
            yield write()
            return
        if size >= LARGE_BYTES:
            await self._await_room()
        self._num_bytes += size
        try:
            async with self._turn:
                body = await asyncio.get_running_loop().run_in_executor(self._thread, write)
            yield body
        finally:
            self._num_bytes -= size
            self._was_read.set()

    async def _await_room(self) -> None:
        """Others pass meanwhile: they take little."""
        async with self._large:
            while self._num_bytes > MAX_UNREAD_BYTES:
                self._was_read.clear()
                await self._was_read.wait()
