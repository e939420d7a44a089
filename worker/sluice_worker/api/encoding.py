"""One HTTP request's texts, from submission to the vector of each."""

import asyncio
import time
from collections.abc import Callable

from sluice_core.errors import SluiceError
from sluice_frontend.evidence.ledger import Ledger
from sluice_frontend.evidence.requests import RequestGroup, RequestTimer


class Encoding:
    """All texts of one request. `abort` tells the engine that nobody waits for a text; one that has
    ended is ignored there."""

    def __init__(self, ledger: Ledger, abort: Callable[[str], None]) -> None:
        self._ledger, self._abort = ledger, abort
        self._group = RequestGroup()
        self._timers: list[RequestTimer] = []
        self._values: list[bytes | None] = []
        self._open = set[int]()
        self._error: SluiceError | None = None
        self._news = asyncio.Event()
        self.has_left = False

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(timer.num_prompt_tokens for timer in self._timers)

    def add(self, timer: RequestTimer) -> "TextSink":
        """Take in a text that is about to be submitted."""
        timer.group = self._group
        self._ledger.recorder.without_first(timer)
        self._open.add(len(self._timers))
        self._timers.append(timer)
        self._values.append(None)
        return TextSink(self, len(self._timers) - 1)

    async def vectors(self) -> list[bytes]:
        """Packed float32 of each text, in order; raises what failed the request."""
        while self._open and self._error is None and not self.has_left:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error
        return [values for values in self._values if values is not None]

    def came(self, number: int, values: bytes, now_s: float) -> None:
        """Take in a vector."""
        if number in self._open:
            self._open.remove(number)
            self._values[number] = values
            timer = self._timers[number]
            self._ledger.finish(timer, "stop", 0, computed_s=now_s, now_s=now_s)
        if not self._open:
            self._news.set()

    def failed(self, number: int, error: SluiceError) -> None:
        """Fail the request with one of its texts."""
        if self._error is None:
            self._error = error
        if number in self._open:
            self._open.remove(number)
            self._ledger.fail(self._timers[number], error, time.monotonic())
        self._news.set()

    def leave(self) -> None:
        """Give up the texts that are still open, as nobody reads any more. If one failed, the
        request has failed: the others do not count as aborted."""
        self.has_left = True
        now_s, left = time.monotonic(), sorted(self._open)
        self._open.clear()
        for number in left:
            timer = self._timers[number]
            if self._error is not None:
                self._ledger.fail(timer, self._error, now_s)
            else:
                self._ledger.leave(timer, now_s)
            self._abort(timer.request_id)
        self._news.set()


class TextSink:
    """The engine client's view of one text (`client.VectorSink`)."""

    def __init__(self, encoding: Encoding, number: int) -> None:
        self._encoding, self._number = encoding, number

    def vector(self, values: bytes, now_s: float) -> None:
        """Pass the vector on."""
        self._encoding.came(self._number, values, now_s)

    def ended(self, error: SluiceError) -> None:
        """Note that the text has no vector."""
        self._encoding.failed(self._number, error)
