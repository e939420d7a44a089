"""One budget of memory for all requests' bodies and all answers of a process.

Its parts do not wait for each other, so none can starve or lock another:

- half is for bodies over LARGE_BYTES. Each takes its whole size in front of its first byte; the
  others wait for that unread, as their clients' connections take no more.
- an eighth is for bodies up to that. Those up to FREE_BYTES are not counted.
- a quarter is for answers over LARGE_BYTES that are written and not read yet, an eighth for the
  others. Those up to SMALL_ANSWER are not counted.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from sluice_core.errors import SluiceError, TooManyOpen
from starlette.requests import Request

from ..config import ServerConfig
from .guards import read_body
from .offload import FairQueue

FREE_BYTES = 1 << 14
"""Bytes of each body that are not counted: as much as its connection may hold unread."""
LARGE_BYTES = 1 << 20
WAIT_S = 10.0
"""Seconds in which a request waits for memory."""
MAX_WAITING = 64
"""Requests that wait for it: the connection of each holds the beginning of its body."""
SMALL_ANSWER = 1 << 16
"""Bytes of answers that are not counted, and are written beside the large ones."""
Refusal = Callable[[str], SluiceError]
"""sentence -> the error to raise."""


def too_many(sentence: str) -> TooManyOpen:
    """The refusal of a request that generates nothing, so it is not booked as an arrival."""
    return TooManyOpen(sentence, retry_after_s=1)


class Room:
    """Bytes that are lent, to those who came first. Never more than `most` are."""

    def __init__(self, most: int) -> None:
        self.most, self.num_bytes = most, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def lent(self, num_bytes: int) -> AsyncIterator[None]:
        """Have `num_bytes` for the block, at most all that there are; waits for them."""
        num_bytes = min(num_bytes, self.most)
        await self._take(num_bytes)
        try:
            yield
        finally:
            self.num_bytes -= num_bytes
            self._serve()

    async def _take(self, num_bytes: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting = deque(each for each in self._waiting if each[1] is not turn)
            else:  # it had its turn in that moment
                self.num_bytes -= num_bytes
            self._serve()
            raise

    def _serve(self) -> None:
        while self._waiting and self.num_bytes + self._waiting[0][0] <= self.most:
            num_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_bytes += num_bytes
                turn.set_result(None)


class Bodies:
    """The memory of each request's body until it is parsed and tokenised."""

    def __init__(self, limits: ServerConfig, *, takes_encoded: bool = False) -> None:
        """`takes_encoded`: bodies with a Content-Encoding are read as they are, not refused."""
        self._large, self._small = Room(limits.memory_bytes // 2), Room(limits.memory_bytes // 8)
        self._timeout_s, self._takes_encoded = limits.receive_timeout, takes_encoded
        self._most = min(limits.max_body_bytes, self._large.most)

    @asynccontextmanager
    async def read(self, request: Request, refusal: Refusal = too_many) -> AsyncIterator[bytes]:
        """A body, counted from its first bytes until the caller is done with it.

        Raises as `read_body`, and the error of `refusal` if others hold too much for WAIT_S.
        """
        length = request.headers.get("content-length")
        async with AsyncExitStack() as held:
            num_lent = FREE_BYTES

            async def lend(num_bytes: int) -> None:
                """Have memory for `num_bytes`: for all of a body, if its end is not known."""
                nonlocal num_lent
                if num_bytes <= num_lent:
                    return
                room, most = self._large, self._most
                if num_bytes <= min(LARGE_BYTES, self._small.most):
                    room, most = self._small, min(LARGE_BYTES, self._small.most)
                num_lent = most if length is None else num_bytes
                await held.enter_async_context(self._lent(room, num_lent, refusal))

            if length is not None and int(length) <= self._most:
                await lend(int(length))
            yield await read_body(
                request, self._most, self._timeout_s, lend, takes_encoded=self._takes_encoded
            )

    @asynccontextmanager
    async def _lent(self, room: Room, num_bytes: int, refusal: Refusal) -> AsyncIterator[None]:
        if room.num_waiting >= MAX_WAITING:
            raise refusal(f"{room.num_waiting} bodies wait for memory already")
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(WAIT_S):
                    await held.enter_async_context(room.lent(num_bytes))
            except TimeoutError as error:
                sentence = f"{room.num_bytes} bytes of bodies are being read already"
                raise refusal(f"{sentence}, and {room.most} is the limit") from error
            yield


class Answers:
    """The memory of answers until they are read. Those over SMALL_ANSWER are written one at a time:
    writing takes as much memory again, and blocks all other Python code."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes`: the process's, as for `Bodies`."""
        self._large, self._small = Room(memory_bytes // 4), Room(memory_bytes // 8)
        self._turns = FairQueue()

    @asynccontextmanager
    async def written(self, size: int, write: Callable[[], bytes]) -> AsyncIterator[bytes]:
        """The body that `write` makes, of about `size` bytes. A large one is made in its turn, and
        counted until the caller is done with it; one of more than there is, alone.

        Large ones wait for readers; `connection` cuts those who do not read.
        """
        if size <= SMALL_ANSWER:
            yield write()
            return
        is_large = size > min(LARGE_BYTES, self._small.most)
        async with (self._large if is_large else self._small).lent(size):
            yield await self._turns.result(size, write)
