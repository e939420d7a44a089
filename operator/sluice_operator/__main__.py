"""`sluice-operator`: reads the flags and runs kopf until a signal."""

import asyncio
import logging
import signal
import socket
import sys
import time

import kopf
from kopf._cogs.clients.errors import APIError
from kopf._cogs.clients.watching import WatchingError

from .cluster.address import in_url
from .cluster.client import Cluster, ClusterError
from .loop.handlers import Operator, create_registry
from .loop.namespaces import Namespaces, look
from .metrics import Metrics
from .settings import Settings, parse

_CHATTY = ("aiohttp.access", "httpx", "kopf.activities", "kopf.objects")
"""Loggers with a line for each probe, scrape and watch event."""

_FATAL = ("kopf._core.reactor.running", "kopf._core.reactor.orchestration")
"""Loggers that tell why kopf ends."""

_AGAIN_S = 5.0
"""Before kopf is run again; what the API server answers with an error it asks for 54 s itself."""
_GONE, _TOO_MANY_REQUESTS = 410, 429


def main(argv: list[str] | None = None) -> None:
    """The console script."""
    run(parse(argv))


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    _try_port(settings.address, "--metrics-port", settings.metrics_port)
    _try_port(settings.address, "--liveness-port", settings.liveness_port)
    log_format = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL
    kopf.configure(verbose=settings.verbose, log_format=log_format)
    if not settings.verbose:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        for name in _FATAL:
            logging.getLogger(name).addFilter(_without_traceback)
    namespaces: Namespaces | None = _first_look(settings)
    while namespaces is not None:
        namespaces = _serve(settings, namespaces)


def _try_port(address: str, flag: str, port: int) -> None:
    """Exit with a sentence where nobody can listen on it; kopf does with a hundred lines."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as e:
        sys.exit(f"sluice-operator: {flag} {port} cannot be used: {e.strerror}")


def _first_look(settings: Settings) -> Namespaces:
    """Which namespaces can be watched; all of them where the API server does not answer yet."""
    wanted = Namespaces(settings.namespaces)
    if not settings.namespaces:
        return wanted
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # a container's first process has none
    try:
        cluster = Cluster.connect(Metrics())
    except ClusterError:
        return wanted  # kopf waits for it, and says so
    return asyncio.run(look(cluster, settings.namespaces, wanted))


def _serve(settings: Settings, namespaces: Namespaces) -> Namespaces | None:
    """Serve until a signal: None; or until kopf has to be run anew: what to watch then."""
    operator = Operator(settings, namespaces)
    try:
        kopf.run(
            registry=create_registry(operator),
            standalone=True,  # peering would let two operators freeze each other
            clusterwide=not settings.namespaces,
            namespaces=namespaces.patterns if settings.namespaces else (),
            liveness_endpoint=f"http://{in_url(settings.address)}:{settings.liveness_port}/healthz",
            stop_flag=operator.moved,
        )
    except Exception as e:
        if _passes(e):
            _wait(e)
            return namespaces
        if settings.verbose:
            raise
        sys.exit(f"sluice-operator: it cannot go on: {type(e).__name__}: {e}")
    return operator.namespaces if operator.namespaces != namespaces else None


def _passes(error: Exception) -> bool:
    """Whether it is the API server that fails (5xx, an etcd without a leader), not we; 410 is of a
    list that took longer than its pages are kept."""
    if isinstance(error, APIError):
        return error.status >= 500 or error.status in (_GONE, _TOO_MANY_REQUESTS)
    return isinstance(error, WatchingError)


def _wait(error: Exception) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # kopf has taken its own away
    told = "%s: %s; watching anew in %d s"
    logging.getLogger("sluice.operator").warning(told, type(error).__name__, error, _AGAIN_S)
    time.sleep(_AGAIN_S)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Of a task of kopf that has failed, which ends it: what it says of the error is enough."""
    record.exc_info = None
    return True


if __name__ == "__main__":
    main()
