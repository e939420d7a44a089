"""What the bodies of all requests may take together while they come, are parsed and tokenised."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request

from ..config import ServerConfig
from ..errors import TooManyOpen
from .guards import read_body

FREE_BYTES = 1 << 16
"""Of each body, that count for nothing: ordinary requests come in whoever sends large ones."""
MAX_LARGEST = 16
"""Bodies of the largest size that may be held at once."""


class Bodies:
    """The bytes that are held, over FREE_BYTES of each body."""

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._num_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """A body, counted as it comes until the caller is done with it.

        Raises what `read_body` raises, and TooManyOpen where others hold too much.
        """
        limits, counted = self._limits, 0

        def count(num_bytes: int) -> None:
            nonlocal counted
            more = max(0, num_bytes - FREE_BYTES) - counted
            if more and self._num_bytes + more > MAX_LARGEST * limits.max_body_bytes:
                raise TooManyOpen(
                    f"{self._num_bytes} bytes of large bodies are being read already",
                    retry_after_s=1,
                )
            counted += more
            self._num_bytes += more

        try:
            yield await read_body(request, limits.max_body_bytes, limits.receive_timeout, count)
        finally:
            self._num_bytes -= counted
