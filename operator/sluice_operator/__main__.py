"""`sluice-operator`: reads the flags and runs kopf until a signal."""

import logging
import socket
import sys

import kopf
from kopf._cogs.clients.errors import APIError
from sluice_core.words import clean, in_url

from .loop.handlers import Operator, create_registry
from .settings import Settings, parse

_CHATTY = ("aiohttp.access", "httpx", "kopf.activities", "kopf.objects")
"""Loggers that write a line for each probe, scrape and watch event."""

_FATAL = ("kopf._core.reactor.running", "kopf._core.reactor.orchestration")
"""Loggers that tell why kopf ends."""


def main(argv: list[str] | None = None) -> None:
    """Run the console script."""
    run(parse(argv))


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Exit with 1 and a sentence if a watch fails for good, such as
    one of a namespace without rights. kopf asks for 54 s, and the kubelet starts us again."""
    _try_port(settings.address, "--metrics-port", settings.metrics_port)
    _try_port(settings.address, "--liveness-port", settings.liveness_port)
    log_format = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL
    kopf.configure(verbose=settings.verbose, log_format=log_format)
    if not settings.verbose:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        for name in _FATAL:
            logging.getLogger(name).addFilter(_without_traceback)
    try:
        kopf.run(
            registry=create_registry(Operator(settings)),
            standalone=True,  # peering would let two operators freeze each other
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            liveness_endpoint=f"http://{in_url(settings.address)}:{settings.liveness_port}/healthz",
        )
    except Exception as e:
        if settings.verbose:
            raise
        told = e.message if isinstance(e, APIError) else None
        why = clean(told or f"{type(e).__name__}: {e}")
        sys.exit(f"sluice-operator: it cannot go on: {why}")


def _try_port(address: str, flag: str, port: int) -> None:
    """Exit with a sentence if the port cannot be used; kopf would print a hundred lines."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as e:
        sys.exit(f"sluice-operator: {flag} {port} cannot be used: {e.strerror}")


def _without_traceback(record: logging.LogRecord) -> bool:
    """The error message of a failed kopf task is enough; the process ends anyway."""
    record.exc_info = None
    return True


if __name__ == "__main__":
    main()
