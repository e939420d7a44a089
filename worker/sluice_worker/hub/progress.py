"""The progress of a download, for people: a bar on a terminal, else occasional log lines."""

import logging
import sys
import time
from typing import TextIO

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
BAR_WIDTH = 30
_GIB = 2**30


class DownloadProgress:
    """Reports a download: a bar on a terminal, else log lines. `percent` may be read from any
    thread."""

    def __init__(self, model: str, output: TextIO = sys.stderr) -> None:
        self.percent = 0
        self._model, self._output = model, output
        self._shows_bar = output.isatty()
        self._started: tuple[float, int] | None = None
        self._said_s = 0.0
        self._is_over = False

    def __call__(self, done: int, total: int) -> None:
        """Report that `done` of `total` bytes are there. The first call sets the start of the rate.

        A complete download at the first call is not reported.
        """
        now_s = time.monotonic()
        is_first, is_whole = self._started is None, done >= total
        self.percent = 100 * done // max(total, 1)
        if self._is_over or (is_first and is_whole):
            return
        self._is_over = is_whole
        if self._started is None:
            self._started = (now_s, done)
        since_s, before = self._started
        rate = (done - before) / max(now_s - since_s, 1e-3)
        if self._shows_bar:
            self._output.write("\r" + bar(self._model, done, total, rate) + "\n" * is_whole)
            self._output.flush()
        elif is_first or is_whole or now_s - self._said_s >= LOG_EVERY_S:
            self._said_s = now_s
            fields = {"model": self._model, "percent": self.percent, "bytes": done}
            more = {"total_bytes": total, "mib_per_s": round(rate / 2**20, 1)}
            log.info("downloading", extra={**fields, **more})


def bar(model: str, done: int, total: int, rate: float) -> str:
    filled = BAR_WIDTH * done // max(total, 1)
    drawn = "█" * filled + "░" * (BAR_WIDTH - filled)
    amounts = f"{done / _GIB:.2f} of {total / _GIB:.2f} GiB, {rate / 2**20:.0f} MiB/s"
    return f"{model} {drawn} {100 * done // max(total, 1):3d} % {amounts}   "
