"""*Rim*: an engine, its gates, and how fast it is here."""

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

from engines.clients import Clients, clients_of, ended
from engines.launchers import CAPACITY, WINDOW, Engine, running_gate
from integration.worker_process import Worker

TRIAL_TOKENS = 48
SHARED_FLAGS = ("--max-body-bytes", "65536", "--write-timeout", "1")


class Rig(contextlib.ExitStack):
    """An engine that is up, and gates before it: one that tests share, others with own flags."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        super().__init__()
        self.engine, self._directory = engine, directory
        self._numbers = itertools.count()
        self._shared: Worker | None = None
        self._tokens_per_s = 0.0

    @contextlib.asynccontextmanager
    async def gate(self, cap: int = CAPACITY) -> AsyncIterator[tuple[Worker, Clients]]:
        """The shared gate at `cap`, and clients of it."""
        await self._measure()
        if self._shared is None:
            self._shared = self.enter_context(self._running(*SHARED_FLAGS))
        async with clients_of(self._shared.url, self._shared.admin_url) as clients:
            await clients.set_cap(cap)
            yield self._shared, clients

    @contextlib.asynccontextmanager
    async def own_gate(self, *flags: str) -> AsyncIterator[tuple[Worker, Clients]]:
        """A gate with these flags, and clients of it."""
        await self._measure()
        with self._running(*flags) as gate:
            async with clients_of(gate.url, gate.admin_url) as clients:
                yield gate, clients

    def tokens(self, seconds: float) -> int:
        """An answer's length that takes about so long on its own."""
        return max(16, min(int(seconds * self._tokens_per_s), WINDOW - 64))

    def _running(self, *flags: str) -> contextlib.AbstractContextManager[Worker]:
        return running_gate(self.engine, self._directory / str(next(self._numbers)), *flags)

    async def _measure(self) -> None:
        """Once: two answers of the engine alone, one to warm up, another to be timed."""
        if self._tokens_per_s:
            return
        async with clients_of(self.engine.url, "") as clients:
            for _ in range(2):
                (trial,) = await ended([clients.stream(TRIAL_TOKENS)])
                assert trial.is_whole, trial.error
        self._tokens_per_s = TRIAL_TOKENS / (trial.ended_s - trial.sent_s)
