"""*Rim*: the engine's server: is it there, how loaded, and requests to it."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from sluice_core.errors import EngineDied, timestamp
from sluice_frontend.evidence.health import Liveness
from yarl import URL

from .config import EngineFlags
from .engines import EngineLoad, load_of

log = logging.getLogger(__name__)

POLL_S = 1.0
START_POLL_S = 0.1
SCRAPE_S = 5.0
"""Most seconds for an engine's metrics, model list, or a load."""
READ_BYTES = 1 << 15
"""Twice as much of an answer that its client does not read is kept, and what one read brings."""
SOCKET_BYTES = 1 << 16
"""Of the kernel's receive buffer, which bounds a read, and is this container's memory as well.
Linux doubles it, and would let it grow to 6 MiB."""
HEADER_BYTES = 1 << 16
"""Most bytes of one header of an engine's answer."""
HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "content-length", "host", "accept-encoding"),
        *("date", "server", "expect"),
    )
)
"""Headers of one connection (RFC 9110, 7.6.1), and those that each server writes itself."""


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _About(msgspec.Struct):
    total_slots: int | None = None
    max_running_requests: int | None = None


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine says of itself. `window`: tokens of a sequence, 0 if it does not say;
    `capacity`: the most sequences that it runs, None if it does not say."""

    model: str | None
    window: int
    capacity: int | None


class Upstream:
    """One engine's server. `on_ready` and `on_away` are called at each change, `on_load` with each
    look at its metrics, the text of which is `metrics`."""

    def __init__(self, flags: EngineFlags, model: str | None, liveness: Liveness) -> None:
        self._flags, self._model, self._liveness = flags, model, liveness
        self.url = flags.upstream.rstrip("/")
        self.is_up = False
        self.metrics = ""
        self.on_ready: Callable[[Served], None] = lambda served: None
        self.on_away: Callable[[], None] = lambda: None
        self.on_load: Callable[[EngineLoad], None] = lambda load: None
        self._session: aiohttp.ClientSession | None = None
        self._timeout = aiohttp.ClientTimeout(total=SCRAPE_S)

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
    async def request(
        self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request as its client sent it, and the answer, which ends with its connection."""
        kept = [(name, value) for name, value in headers if name not in HOP_BY_HOP]
        kept.append(("accept-encoding", "identity"))  # or tokens could not be counted
        url = URL(self.url + target, encoded=True)
        asked = self.session.request(
            method, url, headers=kept, data=body or None, allow_redirects=False
        )
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
        """Nobody is sent there until it answers again."""
        if self.is_up:
            log.error("engine away", extra={"reason": why})
        self.is_up = self._liveness.is_serving = False
        self.on_away()
        self._liveness.starting(f"waiting for the engine: {why}", 0, time.monotonic())

    # -- looks

    async def watch(self, has_work: Callable[[], bool], progress: Callable[[], int]) -> None:
        """Look at the engine until cancelled. `progress`: a number that moves with each chunk."""
        while True:
            await self._look(has_work, progress)
            await asyncio.sleep(POLL_S if self.is_up else START_POLL_S)

    async def _look(self, has_work: Callable[[], bool], progress: Callable[[], int]) -> None:
        try:
            if await self._is_well():
                await (self._load(has_work, progress) if self.is_up else self._start())
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError):
            self.away("it does not accept connections")
        except (aiohttp.ClientError, TimeoutError):
            return  # silence: `Liveness` counts how long it lasts

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
        served = await self._served()
        self.is_up = True
        self._liveness.serving(time.monotonic())
        log.info("engine answers", extra={"model": served.model, "capacity": served.capacity})
        self.on_ready(served)

    async def _load(self, has_work: Callable[[], bool], progress: Callable[[], int]) -> None:
        facts = self._flags.facts
        self.metrics = await self.text("/metrics") if facts.has_metrics else ""
        load = load_of(facts, self.metrics)
        self.on_load(load)
        self._liveness.beat(progress() + int(load.tokens or 0), has_work(), time.monotonic())

    async def text(self, path: str) -> str:
        """The body at `path`, empty if the engine has none. Raises aiohttp.ClientError,
        TimeoutError."""
        async with self.session.get(self.url + path, timeout=self._timeout) as reply:
            return await reply.text(errors="replace") if reply.status == 200 else ""

    async def _served(self) -> Served:
        models = await self._json("/v1/models", _Models)
        first = models.data[0] if models and models.data else _Model()
        return Served(self._model or first.id, first.max_model_len or 0, await self._capacity())

    async def _capacity(self) -> int | None:
        """As llama.cpp and SGLang tell it."""
        path = self._flags.facts.about
        told = await self._json(path, _About) if path else None
        return None if told is None else told.total_slots or told.max_running_requests

    async def _json(self, path: str, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(await self.text(path), type=kind)
        except (msgspec.MsgspecError, aiohttp.ClientError, TimeoutError):
            return None

    async def _is_loaded(self) -> bool:
        """Ollama: True once the model is in memory, where it is told to stay."""
        if self._model is None:
            return True
        body = {"model": self._model, "keep_alive": -1}
        asked = self.session.post(self.url + "/api/generate", json=body)
        async with asked as reply:
            return bool(reply.status == 200)


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


def target_of(path: str, raw_path: bytes | None, query: bytes) -> str:
    """Path and query as the client sent them."""
    shown = raw_path.decode("latin-1") if raw_path else quote(path)
    return shown + ("?" + query.decode("latin-1") if query else "")
