"""*Rim*: an engine, its gates, and how fast it is here."""

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

from engines.clients import Clients, clients_of, ended
from engines.launchers import WINDOW, Engine, running_gate
from integration.worker_process import Worker

TRIAL_TOKENS = 48


class Rig:
    """An engine that is up, and gates before it."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.engine, self._directory = engine, directory
        self._numbers = itertools.count()
        self._tokens_per_s = 0.0

    @contextlib.asynccontextmanager
    async def gate(self, *flags: str) -> AsyncIterator[tuple[Worker, Clients]]:
        """A gate of its own and clients of it."""
        directory = self._directory / str(next(self._numbers))
        with running_gate(self.engine, directory, *flags) as gate:
            async with clients_of(gate.url, gate.admin_url) as clients:
                if not self._tokens_per_s:
                    await self._try(clients)
                yield gate, clients

    def tokens(self, seconds: float) -> int:
        """An answer's length that takes about so long on its own."""
        return max(16, min(int(seconds * self._tokens_per_s), WINDOW - 64))

    async def _try(self, clients: Clients) -> None:
        """One answer to warm up, another to be timed."""
        for _ in range(2):
            (trial,) = await ended([clients.stream(TRIAL_TOKENS)])
            assert trial.is_whole, trial.error
        self._tokens_per_s = TRIAL_TOKENS / (trial.ended_s - trial.sent_s)
