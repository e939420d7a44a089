"""Binds the ports, starts the engine, and leaves in order. The only place with signals."""

import asyncio
import contextlib
import gc
import logging
import math
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from sluice_core.errors import ConfigError, EngineDied
from sluice_core.model.sizing import MAX_CEILING
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.connection import Connection, OnCut, connection_class
from sluice_frontend.http.guards import Inflight
from sluice_frontend.serving.admission import MAX_ON_THEIR_WAY
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.config import WorkerConfig
from ..engine.client import EngineProcess, spawn
from .app import admin_app, api_app
from .service import Service

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that the client closes first."""
BACKLOG = 2048
MAX_IDLE = 1024
"""Connections of the API port beyond those of open requests: clients and gateways keep some for
later requests. A connection whose headers never end takes up to MAX_HEADER_BYTES."""
MAX_ADMIN = 256
"""Connections of the admin port: an operator's, a scraper's, probes'."""
OTHER_FILES = 128
"""Files beside connections: own sockets, libraries, files that threads open for a moment."""
ANSWER_S = 2.0
"""Seconds in which open requests get their error, once the engine has died or a drain must end."""
QUIET_S = 1.0
"""Seconds of silence after which a drain closes a connection. A client that has just connected, or
was just answered, may be about to send a request."""
POOL_S = 20.0
"""The same for clients out of our control: longer than the pools of openai and httpx (5 s) and
aiohttp (15 s) keep one. A request sent as it closes would get no answer (RFC 9112, 9.5)."""
LAST_BYTES_S = 2
"""Seconds for slow readers of written answers before the server closes. A pod's grace period leaves
this margin beside --shutdown-timeout."""


class _Server(uvicorn.Server):
    """Leaves signals to `serve`, as there are two servers in one loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def heard_s(self) -> float:
        """The latest of its connections; -inf without any."""
        return max((one.heard_s for one in self._connections()), default=-math.inf)

    def close_idle(self) -> None:
        """Close connections that wait for a next request."""
        for connection in self._connections():
            connection.close_if_idle()

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]


def bind(flag: str, host: str, port: int) -> socket.socket:
    """A listening socket, without a `host` on all addresses; raises ConfigError in one sentence."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    address = (host, port)
    try:
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        on = f" on {host}" if host else ""
        raise ConfigError([f"--{flag} {port}{on} cannot be used: {reason}"]) from error


@dataclass(slots=True)
class _SwappableApp:
    """The application of a port, changed once: when the fetched model is complete.

    The connections stay, so that no request at that moment is cut off.
    """

    app: ASGIApp | None = None
    on_cut: OnCut = lambda reason: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert self.app is not None  # before its server accepts anybody
        await self.app(scope, receive, send)


def max_connections(config: WorkerConfig) -> int:
    """Connections of the API port: for requests that run, wait, come or tokenise, and MAX_IDLE."""
    ceiling = config.engine.max_num_seqs or MAX_CEILING
    return ceiling + config.server.max_num_queued_reqs + 2 * MAX_ON_THEIR_WAY + MAX_IDLE


def _with_files(most: int) -> int:
    """`most` connections, or as many as this process may have files for: beyond, none could even
    be accepted, and a probe of the kubelet neither. Its soft limit is raised as far as it may be.
    """
    beside = MAX_ADMIN + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    if soft not in (infinite, hard) and soft < most + beside:
        soft = most + beside if hard == infinite else min(most + beside, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return most if soft == infinite else min(most, max(soft - beside, soft // 2))


def _server(swappable: _SwappableApp, limits: ServerConfig, most: int) -> _Server:
    return _Server(
        uvicorn.Config(
            swappable,
            http=connection_class(limits, lambda reason: swappable.on_cut(reason), most),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
    )


async def serve(config: WorkerConfig, engine: EngineProcess | None) -> None:
    """Serve until a signal. `engine`: None if it must wait for its model.

    Raises StartupError if it cannot start, and EngineDied if the engine ended while serving. It is
    raised as well if the engine hangs at the signal and when the open requests' time is over.
    """
    limits = config.server
    admin_host = limits.host if limits.admin_token_file else "127.0.0.1"
    with (
        bind("port", limits.host, limits.port) as api_socket,
        bind("admin-port", admin_host, limits.admin_port) as admin_socket,
    ):
        log.info(
            "listening",
            extra={
                "port": api_socket.getsockname()[1],
                "admin_port": admin_socket.getsockname()[1],
                "model": config.model_name,
            },
        )
        swappable_api, swappable_admin = _SwappableApp(), _SwappableApp()
        api = _server(swappable_api, limits, _with_files(max_connections(config)))
        admin = _server(swappable_admin, limits, MAX_ADMIN)
        tasks = [
            asyncio.create_task(api.serve([api_socket])),
            asyncio.create_task(admin.serve([admin_socket])),
        ]
        try:
            there = await _fetched(config, (swappable_api, swappable_admin))
            if there is not None:
                await _serve(there, engine, api, swappable_api, swappable_admin)
        finally:
            api.should_exit = admin.should_exit = True
            await asyncio.gather(*tasks, return_exceptions=True)


async def _fetched(
    config: WorkerConfig, swappables: tuple[_SwappableApp, ...]
) -> WorkerConfig | None:
    """`config` with its checkpoint in a directory; `swappables` say how far a download is.

    None if told to leave; raises StartupError.
    """
    if config.hub is None:
        return config
    from .arrival import Arrival  # and with it an HTTP client, which a directory does not need

    arrival = Arrival(config, config.hub)
    _on_signals(arrival.stop)
    for swappable in swappables:
        swappable.app = arrival.app()
    directory = await arrival.fetch()
    return config.at(directory) if directory else None


async def _serve(
    config: WorkerConfig,
    engine: EngineProcess | None,
    api: _Server,
    swappable_api: _SwappableApp,
    swappable_admin: _SwappableApp,
) -> None:
    service, inflight = Service(config), Inflight()
    _quieten_collections()
    swappable_api.app, swappable_admin.app = api_app(service, inflight), admin_app(service)
    swappable_api.on_cut = swappable_admin.on_cut = service.runtime.stats.connection_cut
    beat = asyncio.create_task(service.runtime.beat())
    try:
        await _live(service, engine, api, inflight)
    finally:
        await service.client.stop()
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)


def _quieten_collections() -> None:
    """Freeze living objects and collect seldom: each garbage collection stops all streams.

    So a body of 700,000 small lists is parsed in 130 ms instead of 400.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _on_signals(act: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, act)


async def _live(
    service: Service, engine: EngineProcess | None, api: _Server, inflight: Inflight
) -> None:
    stop = asyncio.Event()
    _on_signals(stop.set)
    await service.client.attach(engine or await spawn(service.config.engine))
    ends = [asyncio.create_task(stop.wait()), asyncio.create_task(service.client.closed.wait())]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
    if stop.is_set():
        await _drain(service, api, inflight)
    else:
        service.client.raise_if_never_served()
        await inflight.until_empty(ANSWER_S)
    verdict = service.runtime.liveness()
    if not verdict.ok:
        raise EngineDied(verdict.reason)


async def _drain(service: Service, api: _Server, inflight: Inflight) -> None:
    """Turn readiness off. New requests are answered, each as the last of its connection, until none
    come. Requests still open at the limit get an error."""
    flags, now_s = service.config.server, asyncio.get_running_loop().time()
    from_s = now_s + flags.shutdown_delay
    idle_s = POOL_S if flags.shutdown_delay else QUIET_S
    limit_s = flags.shutdown_timeout
    log.info("draining", extra={"open_requests": service.client.num_open, "limit_s": limit_s})
    service.runtime.drain()
    if await _until_quiet(api, inflight, idle_s, from_s, from_s + limit_s):
        api.close_idle()  # before the loop turns again, so that no request is lost in between
    elif inflight.num_open:
        log.warning("cut at the limit", extra={"open_requests": service.client.num_open})
    service.runtime.close()
    await inflight.until_empty(ANSWER_S)


async def _until_quiet(
    api: _Server, inflight: Inflight, idle_s: float, from_s: float, until_s: float
) -> bool:
    """Wait until no request is under way and all connections have been idle for `idle_s`.

    Returns at `from_s` at the earliest; False at `until_s`. Both are loop time.
    """
    loop = asyncio.get_running_loop()
    while await inflight.until_empty(until_s - loop.time()):
        await asyncio.sleep(0)  # the loop reads what has come by now
        now_s, quiet_s = loop.time(), max(from_s, api.heard_s() + idle_s)
        if now_s >= quiet_s:
            return True
        await asyncio.sleep(min(quiet_s - now_s, until_s - now_s, QUIET_S))  # clients may go, too
    return False
