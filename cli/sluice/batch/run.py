"""*rim*: a run of `sluice batch`: what it tells on the way, and how a signal ends it."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from sluice_core.words import clean
from sluice_frontend.batches import run
from sluice_frontend.batches.index import Index
from sluice_frontend.batches.item import MAX_DETAIL, Result
from sluice_frontend.batches.lines import Bodies

from .target import Target

SAY_EVERY_S = 5.0
GRACE_S = 30.0
"""Seconds that requests under way get after a signal."""


class Interrupted(Exception):
    """A signal ended the run before all was done."""

    def __init__(self) -> None:
        super().__init__("It was interrupted")


class ToldRun(run.Run):
    """A run that tells how far it is."""

    def __init__(self, index: Index, source: Bodies, results: run.Appended) -> None:
        super().__init__(index, source, results)
        self._opening: asyncio.Task[None] | None = None
        self._has_failed = False
        self._start_s, self._before = time.monotonic(), self.pending

    @property
    def rate(self) -> float:
        """Requests a second since it began to send."""
        return (self._before - self.pending) / self._seconds

    @property
    def _seconds(self) -> float:
        return max(time.monotonic() - self._start_s, 1e-3)

    async def run(self, target: Target, send: run.Send) -> None:
        """Send all; raises what ended it before."""
        self._opening, self._start_s = None, time.monotonic()
        telling = asyncio.create_task(self._tell(target))
        try:
            await self.send_all(lambda: target.limit, send)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
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
            self.fail(Interrupted())
        else:
            asyncio.get_running_loop().call_later(GRACE_S, self.fail, Interrupted())
            print(f"Leaving; {self.num_open} requests get {GRACE_S:g} s.", file=sys.stderr)
            self.stop()

    def ended(self, result: Result) -> None:
        """Take in a result, and print the first that failed: all may fail alike."""
        super().ended(result)
        if not result.is_ok and not self._has_failed:
            self._has_failed = True
            shown = clean(msgspec.json.encode(result).decode(), MAX_DETAIL)
            print(f"The first that failed: {shown}", file=sys.stderr)

    async def _tell(self, target: Target) -> None:
        """Print progress every few seconds, for ever, and follow the engine's cap."""
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            print(self.progress(self._before - self.pending, self._seconds), file=sys.stderr)
            await target.read_cap()
            self.look_again()

    def progress(self, num: int, seconds: float) -> str:
        """How far it is, after `num` items in `seconds`."""
        done = self.ok + self.failed
        rate = num / seconds
        left = f"{self.pending / rate:.0f} s left" if num else "time left unknown"
        return f"{done} of {done + self.pending} done, {self.failed} failed, {rate:.2f}/s, {left}"
