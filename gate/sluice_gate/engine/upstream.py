"""*Rim*: the engine's server: is it there, how loaded, and requests to it."""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, TypeVar

import aiohttp
import msgspec
from sluice_core.bounded import Numbers
from sluice_core.errors import EngineDied, timestamp
from sluice_frontend.config import ServerConfig
from sluice_frontend.evidence.health import Liveness
from sluice_frontend.http.guards import ASKED_ID
from starlette.datastructures import Headers
from starlette.types import Scope
from yarl import URL

from ..request.headers import for_engine
from .flags import EngineFlags
from .load import ServerLoad, load_of
from .patience import Owed

log = logging.getLogger(__name__)

POLL_S = 1.0
START_POLL_S = 0.1
SCRAPE_S = 5.0
"""Most seconds for an engine's metrics, model list, or a load."""
SHOW_S = 5.0
"""Seconds between two looks for Ollama's model: it reads the model's header each time."""
READ_BYTES = 1 << 15
"""Twice as much of an answer that its client does not read is kept, and what one read brings."""
SOCKET_BYTES = 1 << 16
"""Of the kernel's receive buffer, which bounds a read, and is this container's memory as well.
Linux doubles it, and would let it grow to 6 MiB."""
HEADER_BYTES = 1 << 16
"""Most bytes of one header of an engine's answer."""
MAX_PAGE_BYTES = 2 << 20
"""Most bytes of an engine's metrics, or of what it says of itself."""


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _About(msgspec.Struct):
    total_slots: Any = None
    max_running_requests: Any = None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineSays:
    """What the engine says of itself. `window`: tokens of a sequence, 0 if it does not say;
    `capacity`: the most sequences that it runs, None if it does not say."""

    model: str | None
    window: int
    capacity: int | None


class Upstream:
    """One engine's server. `on_ready` and `on_away` are called at each change, `on_load` with each
    look at its metrics, the text of which is `metrics`. `unreadable` counts the numbers that were
    left out, by source."""

    def __init__(
        self,
        flags: EngineFlags,
        server: ServerConfig,
        liveness: Liveness,
        unreadable: Counter[str],
    ) -> None:
        self._flags, self._model = flags, server.served_model_name
        self._has_keys, self._liveness = server.has_api_keys, liveness
        self._about, self._scraped = Numbers("about", unreadable), Numbers("metrics", unreadable)
        self.url = self._flags.upstream.rstrip("/")
        self._base = URL(self.url)
        self.is_up = False
        self.metrics = ""
        self.on_ready: Callable[[EngineSays], None] = lambda served: None
        self.on_away: Callable[[], None] = lambda: None
        self.on_load: Callable[[ServerLoad], None] = lambda load: None
        self._session: aiohttp.ClientSession | None = None
        self._timeout = aiohttp.ClientTimeout(total=SCRAPE_S)
        self._num_tokens = 0
        self._shown_s = 0.0

    async def __aenter__(self) -> "Upstream":
        self._session = aiohttp.ClientSession(
            # A connection for each: llama.cpp ends one after a stream without saying so.
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "content-type", "user-agent"),
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    # -- requests

    @asynccontextmanager
    async def request(self, scope: Scope, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """A client's request, at the engine's address, whatever host the client named, and the
        answer, which ends with its connection."""
        base = self._base
        url = URL.build(
            scheme=base.scheme,
            authority=base.authority,
            path=base.raw_path.rstrip("/") + scope["raw_path"].decode("ascii"),
            query_string=scope["query_string"].decode("ascii"),
            encoded=True,
        )
        asked = self.session.request(
            scope["method"],
            url,
            headers=for_engine(Headers(scope=scope), scope["state"][ASKED_ID], self._has_keys),
            # A large one goes in parts: written whole, it would hold the loop.
            data=BytesIO(body) if len(body) > READ_BYTES else body or None,
            allow_redirects=False,
        )
        del body  # the answer may take long
        async with asked as reply:
            _end_with_connection(reply)
            yield reply

    def died(self, error: Exception) -> EngineDied:
        """The sentence for a request whose connection to the engine broke."""
        if isinstance(error, aiohttp.ClientConnectorError):
            self.away("it does not accept connections")
        moment = timestamp(time.time())
        return EngineDied(f"the engine closed the connection at {moment}", retry_after_s=1)

    def away(self, why: str) -> None:
        """Send nobody there until it answers again."""
        if self.is_up:
            log.error("engine away", extra={"reason": why})
        self.is_up = False
        self.on_away()
        self._liveness.starting(f"waiting for the engine: {why}", 0, time.monotonic())

    # -- looks

    async def watch(self, owed: Callable[[], Owed]) -> None:
        """Look at the engine until cancelled."""
        while True:
            is_heard = await self._look()
            self.judge(owed(), is_heard=is_heard)
            await asyncio.sleep(POLL_S if self.is_up else START_POLL_S)

    def judge(self, owed: Owed, *, is_heard: bool = False) -> None:
        """Tell `Liveness` how far the engine is. `is_heard`: it has answered a look."""
        if self.is_up:
            self._liveness.beat(
                owed.num_pieces + self._num_tokens,
                owed.is_due,
                time.monotonic(),
                allowance_s=owed.allowance_s,
                is_heard=is_heard,
            )

    async def _look(self) -> bool:
        """False if it was silent. An engine that loads refuses connections or says that it is not
        well; one that takes a connection and says nothing may hang: `Liveness` decides."""
        try:
            if await self._is_well():
                await (self._load() if self.is_up else self._start())
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError):
            self.away("it does not accept connections")
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def _is_well(self) -> bool:
        path = self._flags.health
        async with self.session.get(self.url + path, timeout=self._timeout) as reply:
            if reply.status != 200:
                self.away(f"{path} answers {reply.status}")
            return reply.status == 200

    async def _start(self) -> None:
        if self._flags.engine == "ollama" and not await self._is_loaded():
            self.away(f"the model {self._model} cannot be loaded")
            return
        self._shown_s = time.monotonic()
        served = await self._served()
        self.is_up = True
        self._liveness.serving(time.monotonic())
        log.info("engine answers", extra={"model": served.model, "capacity": served.capacity})
        self.on_ready(served)

    async def _load(self) -> None:
        facts = self._flags.facts
        self.metrics = await self.text("/metrics") if facts.has_metrics else ""
        load = load_of(facts, self.metrics, self._scraped)
        self._num_tokens = int(load.tokens or 0)
        self.on_load(load)
        if self._flags.engine == "ollama" and time.monotonic() > self._shown_s + SHOW_S:
            await self._show()

    async def text(self, path: str) -> str:
        """The body at `path`, empty if the engine has none. Raises aiohttp.ClientError,
        TimeoutError. It is read as UTF-8: an engine could name a charset that is no text's."""
        async with self.session.get(self.url + path, timeout=self._timeout) as reply:
            page = bytearray()
            if reply.status == 200:
                async for part in reply.content.iter_any():
                    page += part
                    if len(page) > MAX_PAGE_BYTES:
                        self._scraped.leave_out()
                        return ""
            return page.decode(errors="replace")

    async def _served(self) -> EngineSays:
        models = await self._json("/v1/models", _Models)
        first = models.data[0] if models and models.data else _Model()
        window = self._about.count(first.max_model_len) or 0
        return EngineSays(self._model or first.id, window, await self._capacity())

    async def _capacity(self) -> int | None:
        """As llama.cpp and SGLang tell it."""
        path = self._flags.facts.about
        told = await self._json(path, _About) if path else None
        if told is None:
            return None
        return self._about.count(told.total_slots) or self._about.count(told.max_running_requests)

    async def _json(self, path: str, kind: type[T]) -> T | None:
        try:
            text = await self.text(path)
        except (aiohttp.ClientError, TimeoutError):
            return None
        try:
            return msgspec.json.decode(text, type=kind) if text else None
        except (msgspec.MsgspecError, RecursionError):
            self._about.leave_out()
            return None

    async def _is_loaded(self) -> bool:
        """Ollama: True once the model is in memory, where it is told to stay."""
        if self._model is None:
            return True
        body = {"model": self._model, "keep_alive": -1}
        asked = self.session.post(self.url + "/api/generate", json=body)
        async with asked as reply:
            return bool(reply.status == 200)

    async def _show(self) -> None:
        """Ollama: away if its model is gone, as it answers 404 then and looks well. `/api/ps` still
        lists a deleted one."""
        self._shown_s = time.monotonic()
        if self._model is not None:
            body = {"model": self._model}
            asked = self.session.post(self.url + "/api/show", json=body, timeout=self._timeout)
            async with asked as reply:
                if reply.status == 404:
                    self.away(f"its model {self._model} is gone")


def _end_with_connection(reply: aiohttp.ClientResponse) -> None:
    """Let nobody wait for an answer whose connection is gone. aiohttp (3.14.5) forgets the reader
    of one whose chunks are broken: it would wait for ever, and keep its place."""
    if reply.connection is None or reply.connection.protocol is None:
        return  # it has all of it

    def ended(closed: asyncio.Future[None]) -> None:
        content, error = reply.content, None if closed.cancelled() else closed.exception()
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError(f"the connection broke: {error}"))

    if closed := reply.connection.protocol.closed:
        closed.add_done_callback(ended)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, proto, _, _ = address
    made = socket.socket(family, kind, proto)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    return made
