"""*rim*: keeps as many requests of a batch under way as its endpoint takes."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from .index import Index
from .item import Item, Result, unanswered
from .lines import Bodies

Send = Callable[[str, str, bytes], Awaitable[Result | None]]
"""Sends the body of an id to a route; None leaves it pending."""
IN_FLIGHT = 2
"""Requests under way for each place of the engine: the next ones wait in it, not behind a trip."""
MAX_WAIT_S = 600.0
"""Most seconds that a server's Retry-After is honoured for."""


def delay_s(asked_s: float | None, retries: int, backoff_s: float) -> float:
    """Seconds before a retry: never fewer than the server asks for; spread, so that not all come
    at once."""
    drawn = random.random()  # noqa: S311 - no secret
    if asked_s is not None:
        return min(asked_s, MAX_WAIT_S) * (1 + drawn / 4)
    return float(backoff_s * 2**retries * (0.5 + drawn))


class Appended(Protocol):
    """Where results are written."""

    def append(self, result: Result) -> None:
        """Append one; raises `WriteError`."""


class Run:
    """One run over the pending items. `ok` and `failed` count those of earlier runs, too."""

    def __init__(self, index: Index, source: Bodies, results: Appended) -> None:
        self._index, self._source, self._results = index, source, results
        self.pending, self.ok, self.failed = index.counts()
        self._open: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._num_bytes = 0
        self._is_leaving, self._error = False, list[BaseException]()

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._open)

    async def send_all(
        self, most: Callable[[], int], send: Send, max_bytes: float = math.inf
    ) -> None:
        """Send all until told to stop; raises what ended it before.

        At most `most()` are under way at once, and lines of `max_bytes`, or one.
        """
        try:
            for item in await asyncio.to_thread(self._index.pending):
                while not self._has_room(item, most(), max_bytes) and not self._is_ending():
                    await self._change()
                if self._is_ending():
                    break
                self._num_bytes += item.size
                task = asyncio.create_task(self._one(item, send))
                self._open.add(task)
                task.add_done_callback(self._ended)
                await asyncio.sleep(0)  # others' turn
            while self._open and not self._error:
                await self._change()
        finally:
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
        if self._error:
            raise self._error[0]

    def stop(self) -> None:
        """Send nothing more; requests under way go on."""
        self._is_leaving = True
        self.look_again()

    def fail(self, error: BaseException) -> None:
        """End at once with `error`."""
        self._error.append(error)
        self.look_again()

    def look_again(self) -> None:
        """More may be sent than before."""
        self._changed.set()

    def ended(self, result: Result) -> None:
        """Take in a result that has been written."""
        self.pending -= 1
        self.ok += result.is_ok
        self.failed += not result.is_ok

    def _has_room(self, item: Item, most: int, max_bytes: float) -> bool:
        num_bytes = self._num_bytes + item.size
        return len(self._open) < most and (not self._open or num_bytes <= max_bytes)

    def _is_ending(self) -> bool:
        return self._is_leaving or bool(self._error)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    async def _one(self, item: Item, send: Send) -> None:
        try:
            body = await asyncio.to_thread(self._source.body, item)
        except (OSError, UnicodeError) as e:
            result: Result | None = unanswered(item.custom_id, "unreadable_input", e)
        else:
            result = await send(item.custom_id, item.route, body)
        self._num_bytes -= item.size
        if result is not None:
            self._results.append(result)
            self.ended(result)
