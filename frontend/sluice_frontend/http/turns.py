"""Requests that come together begin in turns of the loop, so that streams go on between them."""

import asyncio
from collections import deque

MOST = 32
"""Requests that begin in one turn: each takes about 0.2 ms until it waits for something."""


class Turns:
    """Lets MOST requests begin in each turn of the loop, those that came first."""

    def __init__(self) -> None:
        self._free = MOST
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a turn."""
        if self._free == MOST:
            asyncio.get_running_loop().call_soon(self._next)
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._free = MOST
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            if not turn.done():  # else its connection has ended
                turn.set_result(None)
                self._free -= 1
        if self._free < MOST:
            asyncio.get_running_loop().call_later(0, self._next)
