"""*rim*: one server, asked again and again through its admin port: no cluster is needed."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from sluice_core.contract import TICK_SECONDS, Evidence, RuntimeConfig, Tick, decode
from sluice_core.words import in_url

from sluice.measure.endpoint import ADMIN_PORT, EndpointError, open_session, read_config
from sluice.page import Html

from . import views
from .charts import Mark
from .history import HOUR_S, History, of_ticks

LIMIT_S = 5.0
WINDOW = 30
"""Ticks over which a percentile is taken: a minute."""
EVERY = 3
"""Ticks from one point of a curve to the next."""


class Server:
    """A worker or a gate. Its ticks tell of the half hour before this program began, too."""

    def __init__(self, session: aiohttp.ClientSession, url: str, admin_url: str) -> None:
        self._session, self._api, self._url = session, url, admin_url
        self._config: RuntimeConfig | None = None
        self._evidence: Evidence | None = None
        self._ticks = deque[Tick](maxlen=round(HOUR_S / TICK_SECONDS))
        self._history = History()
        self._at_s, self._problem = 0.0, ""

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                await self.look()
            except EndpointError as e:
                self._problem = str(e)

    async def page(self, path: Sequence[str]) -> Html | None:
        """The server's page."""
        if path or self._config is None or self._evidence is None:
            return None
        seen = views.ServerSeen(
            self._api, self._config, self._evidence, self._history.points, self._marks(),
            self._at_s, self._problem,
        )  # fmt: skip
        return views.server(seen, time.time())

    async def look(self) -> None:
        """Ask once; raises EndpointError."""
        last = self._ticks[-1] if self._ticks else None
        try:
            config = await read_config(self._session, self._url)
            evidence = await self._read(last.seq if last else 0)
            if last and evidence.boot_id != last.boot_id:  # another process: it counts anew
                self._history.interrupt()
                evidence = await self._read(0)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as e:
            self._history.interrupt()
            told = str(e) or type(e).__name__
            raise EndpointError(f"no admin port answers at {self._url}: {told}") from e
        for tick in evidence.ticks:
            self._ticks.append(tick)
            if tick.seq % EVERY == 0:
                window = [t for t in list(self._ticks)[-WINDOW:] if t.boot_id == tick.boot_id]
                self._history.add(tick.t_s, of_ticks(window))
        self._config, self._evidence = config, evidence
        self._at_s, self._problem = time.time(), ""

    async def _read(self, after: int) -> Evidence:
        async with self._session.get(f"{self._url}/v1/evidence?after={after}") as response:
            response.raise_for_status()
            return decode(await response.read(), Evidence)

    def _marks(self) -> list[Mark]:
        """Changes of the cap, and starts."""
        ticks, marks = list(self._ticks), list[Mark]()
        for old, new in zip(ticks, ticks[1:], strict=False):
            text = f"epoch {new.epoch}: cap {old.cap} -> {new.cap}" if old.cap != new.cap else ""
            is_new = old.boot_id != new.boot_id
            if text or is_new:
                text = "the server has started again" if is_new else text
                marks.append(Mark(new.t_s, len(marks) + 1, text, is_new))
        return marks


@asynccontextmanager
async def opened(url: str, admin_url: str | None, token_file: Path | None) -> AsyncIterator[Server]:
    """The server behind the API at `url`, which has answered once. Raises EndpointError."""
    parts = urlsplit(url)
    at = admin_url or f"{parts.scheme}://{in_url(parts.hostname or '')}:{ADMIN_PORT}"
    async with open_session(token_file, LIMIT_S) as session:
        server = Server(session, url, at)
        await server.look()
        yield server
