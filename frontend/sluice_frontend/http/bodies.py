"""Bounds the memory of all requests' bodies, and of all answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Request
from sluice_core.errors import SluiceError, TooManyOpen

from ..config import ServerConfig
from .guards import read_body
from .offload import FairQueue

FREE_BYTES = 1 << 16
"""Bytes of each body that are not counted, so ordinary requests pass beside large ones."""
MAX_LARGEST = 16
"""Number of bodies of the largest size that may be held at once."""
LARGE_BYTES = 1 << 20
MAX_UNREAD_BYTES = 32 << 20
"""Bytes: while clients have more than this to read, no other answer of LARGE_BYTES is written."""
Refusal = Callable[[str], SluiceError]
"""sentence -> the error to raise."""


def too_many(sentence: str) -> TooManyOpen:
    """The refusal of a request that generates nothing, so it is not booked as an arrival."""
    return TooManyOpen(sentence, retry_after_s=1)


class Bodies:
    """Counts the bytes over FREE_BYTES of each request until it is parsed and tokenised."""

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request, refusal: Refusal = too_many) -> AsyncIterator[bytes]:
        """A body, counted from its first bytes until the caller is done with it.

        Raises as `read_body`, and the error of `refusal` if others hold too much.
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
    """Counts the bytes of answers until they are read. Answers over FREE_BYTES are written one at a
    time: writing takes as much memory again, and blocks all other Python code."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._large, self._was_read = asyncio.Lock(), asyncio.Event()
        self._turns = FairQueue()

    @asynccontextmanager
    async def written(self, size: int, write: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """The body that `write` makes, of about `size` bytes. A large one is made in its turn, and
        counted until the caller is done with it.

        Large ones wait for readers; `connection` cuts those who do not read.
        """
        if size <= FREE_BYTES:
            yield write()
            return
        if size >= LARGE_BYTES:
            await self._await_room()
        self._num_bytes += size
        try:
            yield await self._turns.result(size, write)
        finally:
            self._num_bytes -= size
            self._was_read.set()

    async def _await_room(self) -> None:
        """Others pass meanwhile: they take little."""
        async with self._large:
            while self._num_bytes > MAX_UNREAD_BYTES:
                self._was_read.clear()
                await self._was_read.wait()
