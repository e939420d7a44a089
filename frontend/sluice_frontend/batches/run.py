"""*rim*: keeps as many requests of a batch under way as its endpoint takes."""

import asyncio
from collections.abc import Awaitable, Callable

from .index import Index
from .item import Item, Result, unanswered
from .lines import Bodies
from .results import Results

Send = Callable[[str, str, bytes], Awaitable[Result]]
"""Sends the body of an id to a route."""


class Run:
    """One run over the pending items. `ok` and `failed` count those of earlier runs, too."""

    def __init__(self, index: Index, source: Bodies, results: Results) -> None:
        self._index, self._source, self._results = index, source, results
        self.pending, self.ok, self.failed = index.counts()
        self._open: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._is_leaving, self._error = False, list[BaseException]()

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return len(self._open)

    async def send_all(self, most: Callable[[], int], send: Send) -> None:
        """Send all, at most `most()` at once, until told to stop; raises what ended it before."""
        try:
            for item in self._index.pending():
                while len(self._open) >= most() and not self._is_ending():
                    await self._change()
                if self._is_ending():
                    break
                task = asyncio.create_task(self._one(item, send))
                self._open.add(task)
                task.add_done_callback(self._ended)
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
            body = self._source.body(item)
        except (OSError, UnicodeError) as e:
            result = unanswered(item.custom_id, "unreadable_input", e)
        else:
            result = await send(item.custom_id, item.route, body)
        self._results.append(result)
        self.ended(result)
