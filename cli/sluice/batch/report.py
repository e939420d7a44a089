"""What a run tells the operator: on a port on the way, and as the pod's last word."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from msgspec import structs
from sluice_core.contract import BatchReport, encode
from sluice_core.words import clean

from .run import ToldRun

LAST_WORD = "SLUICE_TERMINATION_LOG"
MAX_MESSAGE = 900
"""Characters: Kubernetes keeps 4096 bytes of a last word."""


class Reporter:
    """Tells how far a run is. `total`: requests of the whole input; `run`: None until it begins."""

    def __init__(self) -> None:
        self.total = 0
        self.run: ToldRun | None = None

    def report(self) -> BatchReport:
        """How far it is now."""
        if (run := self.run) is None:
            return BatchReport(self.total)
        return BatchReport(self.total, run.pending, run.ok, run.failed, run.rate)

    @asynccontextmanager
    async def served(self, port: int | None) -> AsyncIterator[None]:
        """Tell it on `port`, if any, to whoever asks. Raises OSError."""
        if port is None:
            yield
            return

        async def answer(request: web.Request) -> web.Response:
            return web.Response(body=encode(self.report()), content_type="application/json")

        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, port=port).start()
            yield
        finally:
            await runner.cleanup()

    def leave(self, message: str) -> None:
        """Tell it for the last time, in the file that Kubernetes names."""
        if path := os.environ.get(LAST_WORD):
            last = structs.replace(self.report(), rate=0.0, message=clean(message, MAX_MESSAGE))
            Path(path).write_bytes(encode(last))
