"""*rim*: keeps as many requests of a batch under way as its endpoint takes, and tells how far."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec
from sluice_core.words import clean

from .index import Index
from .item import Item, Result
from .results import Results
from .send import MAX_DETAIL, unanswered
from .sources import Source
from .target import Target

SAY_EVERY_S = 5.0
GRACE_S = 30.0
"""Seconds that requests under way get after a signal."""
Send = Callable[[str, str, bytes], Awaitable[Result]]
"""Sends the body of an id to a route, as `Sender.send` does."""


class Interrupted(Exception):
    """A signal ended the run before all was done."""

    def __init__(self) -> None:
        super().__init__("It was interrupted")


class Run:
    """One run over the pending items. `ok` and `failed` count those of earlier runs, too."""

    def __init__(self, index: Index, source: Source, results: Results) -> None:
        self._index, self._source, self._results = index, source, results
        self.pending, self.ok, self.failed = index.counts()
        self._open: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None
        self._is_leaving, self._has_failed, self._error = False, False, list[BaseException]()

    async def run(self, target: Target, send: Send) -> None:
        """Send all; raises what ended it before."""
        self._opening = None
        telling = asyncio.create_task(self._tell(target))
        try:
            for item in self._index.pending():
                while len(self._open) >= target.limit and not self._is_ending():
                    await self._change()
                if self._is_ending():
                    break
                task = asyncio.create_task(self._one(item, send))
                self._open.add(task)
                task.add_done_callback(self._ended)
            while self._open and not self._error:
                await self._change()
        finally:
            for task in (telling, *self._open):
                task.cancel()
            await asyncio.gather(telling, *self._open, return_exceptions=True)
        if self._error:
            raise self._error[0]
        if self.pending:
            raise Interrupted

    @contextmanager
    def leaving_at_once(self) -> Iterator[None]:
        """Have `leave` cancel this task until `run` begins; raises `Interrupted` then."""
        self._opening = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            raise Interrupted from None

    def leave(self) -> None:
        """Send nothing more. Requests under way get `GRACE_S`, or end at once at a second call."""
        if self._opening is not None:
            self._opening.cancel()
        elif self._is_leaving:
            self._fail(Interrupted())
        else:
            self._is_leaving = True
            asyncio.get_running_loop().call_later(GRACE_S, self._fail, Interrupted())
            print(f"Leaving; {len(self._open)} requests get {GRACE_S:g} s.", file=sys.stderr)
        self._changed.set()

    def _is_ending(self) -> bool:
        return self._is_leaving or bool(self._error)

    def _fail(self, error: BaseException) -> None:
        self._error.append(error)
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    async def _one(self, item: Item, send: Send) -> None:
        try:
            body = self._source.body(item)
        except (OSError, UnicodeError) as e:
            result = unanswered(item.custom_id, "unreadable_input", e)
        else:
            result = await send(item.custom_id, item.route, body)
        self._results.append(result)
        self.pending -= 1
        self.ok += result.is_ok
        self.failed += not result.is_ok
        if not result.is_ok and not self._has_failed:  # all may fail alike
            self._has_failed = True
            shown = clean(msgspec.json.encode(result).decode(), MAX_DETAIL)
            print(f"The first that failed: {shown}", file=sys.stderr)

    async def _tell(self, target: Target) -> None:
        """Print progress every few seconds, for ever, and follow the engine's cap."""
        start_s, before = time.monotonic(), self.pending
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            print(self.progress(before - self.pending, time.monotonic() - start_s), file=sys.stderr)
            await target.read_cap()
            self._changed.set()

    def progress(self, num: int, seconds: float) -> str:
        """How far it is, after `num` items in `seconds`."""
        done = self.ok + self.failed
        rate = num / seconds
        left = f"{self.pending / rate:.0f} s left" if num else "time left unknown"
        return f"{done} of {done + self.pending} done, {self.failed} failed, {rate:.2f}/s, {left}"
