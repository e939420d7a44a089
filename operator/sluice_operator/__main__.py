"""`sluice-operator`: reads the flags and runs kopf until a signal."""

import logging

import kopf

from .address import in_url
from .handlers import create_registry
from .settings import Settings, parse

_CHATTY = ("aiohttp.access", "httpx", "kopf.activities", "kopf.objects")
"""Loggers with a line for each probe, scrape and watch event."""


def main(argv: list[str] | None = None) -> None:
    """The console script."""
    run(parse(argv))


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT."""
    log_format = kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL
    kopf.configure(verbose=settings.verbose, log_format=log_format)
    if not settings.verbose:
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
    kopf.run(
        registry=create_registry(settings),
        standalone=True,  # peering would let two operators freeze each other
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        liveness_endpoint=f"http://{in_url(settings.address)}:{settings.liveness_port}/healthz",
    )


if __name__ == "__main__":
    main()
