"""*Rim*: both ports of a server: bound, served, drained. The only place with signals."""

import asyncio
import contextlib
import gc
import logging
import math
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from sluice_core.errors import ConfigError, EngineDied
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import ServerConfig
from ..http.clients import RESERVE, room_for
from ..http.connection import Connection, OnCut, connection_class
from ..http.guards import Inflight
from ..http.turns import Turns
from ..serving.admission import MAX_ON_THEIR_WAY, max_open
from ..serving.runtime import Runtime

log = logging.getLogger(__name__)

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


class Server(uvicorn.Server):
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
class SwappableApp:
    """The application of a port, which may be set late, and changed.

    The connections stay, so that no request at that moment is cut off.
    """

    turns: Turns = field(default_factory=Turns)
    app: ASGIApp | None = None
    on_cut: OnCut = lambda reason: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        assert self.app is not None  # before its server accepts anybody
        await self.turns.take()
        await self.app(scope, receive, send)


def max_connections(config: ServerConfig, ceiling: int) -> int:
    """Connections of a lone address to the API port: for all open requests, those that take no
    place too, and MAX_IDLE."""
    return max_open(config, ceiling) + MAX_ON_THEIR_WAY + MAX_IDLE


def _with_files(most: int, more: int) -> int:
    """`most` of a lone address, or as many as this process may have files for: beyond, none could
    even be accepted, and a probe of the kubelet neither. Its soft limit is raised as far as it may
    be. `more`: files that the program has for open requests."""
    wanted, beside = room_for(most), room_for(MAX_ADMIN) + OTHER_FILES + more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    if soft not in (infinite, hard) and soft < wanted + beside:
        soft = wanted + beside if hard == infinite else min(wanted + beside, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == infinite or wanted + beside <= soft:
        return most
    return max(soft - beside, soft // 2) * RESERVE // (RESERVE + 1)


def _server(swappable: SwappableApp, limits: ServerConfig, most: int) -> Server:
    return Server(
        uvicorn.Config(
            swappable,
            http=connection_class(limits, lambda reason: swappable.on_cut(reason), most),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # else any client on loopback could name another as itself
            timeout_keep_alive=math.ceil(limits.keep_alive_timeout),
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
    )


@dataclass(frozen=True, slots=True)
class Ports:
    """Both ports of a server, and what answers there."""

    api: Server
    swappable_api: SwappableApp
    swappable_admin: SwappableApp

    def answer(self, api: ASGIApp, admin: ASGIApp, on_cut: OnCut) -> None:
        """Serve these applications from now on; `on_cut`: called for connections that are cut."""
        self.swappable_api.app, self.swappable_admin.app = api, admin
        self.swappable_api.on_cut = self.swappable_admin.on_cut = on_cut


@asynccontextmanager
async def listening(
    limits: ServerConfig, model_name: str, most: int, num_files: int = 0
) -> AsyncIterator[Ports]:
    """Both ports, bound and served; the API's for `most` connections of a lone address. The block
    must give them applications before it awaits. `num_files`: that it needs for open requests.

    Raises ConfigError.
    """
    admin_host = limits.host if limits.admin_token_file else "127.0.0.1"
    with (
        bind("port", limits.host, limits.port) as api_socket,
        bind("admin-port", admin_host, limits.admin_port) as admin_socket,
    ):
        numbers = {"port": api_socket.getsockname()[1], "admin_port": admin_socket.getsockname()[1]}
        log.info("listening", extra={**numbers, "model": model_name})
        swappable_api, swappable_admin = SwappableApp(), SwappableApp()
        api = _server(swappable_api, limits, _with_files(most, num_files))
        admin = _server(swappable_admin, limits, MAX_ADMIN)
        tasks = [
            asyncio.create_task(api.serve([api_socket])),
            asyncio.create_task(admin.serve([admin_socket])),
        ]
        try:
            yield Ports(api, swappable_api, swappable_admin)
        finally:
            api.should_exit = admin.should_exit = True
            await asyncio.gather(*tasks, return_exceptions=True)


def quieten_collections() -> None:
    """Freeze living objects and collect seldom: each garbage collection stops all streams.

    So a body of 700,000 small lists is parsed in 130 ms instead of 400.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def on_signals(act: Callable[[], None]) -> None:
    """Do it at SIGTERM and Ctrl-C."""
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, act)


async def drain(runtime: Runtime, api: Server, inflight: Inflight) -> None:
    """Turn readiness off. New requests are answered, each as the last of its connection, until none
    come. Requests still open at the limit get an error; so do all at once if the engine hangs, as
    their answers cannot come."""
    flags, now_s = runtime.config, asyncio.get_running_loop().time()
    from_s = now_s + flags.shutdown_delay
    idle_s = POOL_S if flags.shutdown_delay else QUIET_S
    limit_s = flags.shutdown_timeout
    log.info("draining", extra={"open_requests": runtime.backend.num_open, "limit_s": limit_s})
    runtime.drain()
    if await _until_quiet(runtime, api, inflight, idle_s, from_s, from_s + limit_s):
        api.close_idle()  # before the loop turns again, so that no request is lost in between
    elif _is_hung(runtime):
        log.error("cut as the engine hangs", extra={"open_requests": runtime.backend.num_open})
        runtime.backend.fail_all(EngineDied(runtime.liveness().reason, retry_after_s=1))
    elif inflight.num_open:
        log.warning("cut at the limit", extra={"open_requests": runtime.backend.num_open})
    runtime.close()
    await inflight.until_empty(ANSWER_S)


def _is_hung(runtime: Runtime) -> bool:
    return runtime.liveness().phase == "hung"


async def _until_quiet(
    runtime: Runtime,
    api: Server,
    inflight: Inflight,
    idle_s: float,
    from_s: float,
    until_s: float,
) -> bool:
    """Wait until no request is under way and all connections have been idle for `idle_s`.

    Returns at `from_s` at the earliest; False at `until_s`, or once the engine hangs. Both are loop
    time.
    """
    loop = asyncio.get_running_loop()
    while not _is_hung(runtime):
        left_s = until_s - loop.time()
        if await inflight.until_empty(min(left_s, QUIET_S)):
            await asyncio.sleep(0)  # the loop reads what has come by now
            now_s, quiet_s = loop.time(), max(from_s, api.heard_s() + idle_s)
            if now_s >= quiet_s:
                return True
            # Clients may go, too.
            await asyncio.sleep(min(quiet_s - now_s, until_s - now_s, QUIET_S))
        elif left_s <= QUIET_S:
            return False
    return False
