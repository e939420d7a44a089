"""The operator's own metrics, in their own registry. No label grows with traffic or epochs."""

import socket
import threading
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app

MAX_SCRAPES = 16
"""At once, each in a thread of its own."""
SCRAPE_S = 10.0
"""Most seconds for a part of a request."""


class Handler(WSGIRequestHandler):
    """One scrape, of which nothing is logged."""

    timeout = SCRAPE_S

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """The metrics port. One scrape more than MAX_SCRAPES ends the one that has been there longest,
    so that whoever sends half a request holds up nobody."""

    daemon_threads = True

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__((address, port), Handler)
        self.set_app(make_wsgi_app(registry))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread."""
        with self._lock:
            if len(self._open) >= MAX_SCRAPES:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has just left
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def start(self) -> None:
        """Serve in the background, as long as the process lives."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()


class Metrics:
    """Every series that the operator exposes on its metrics port; two operators share nothing."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.passes = Counter(
            "sluice_operator_passes", "Passes over objects.", ["result"], registry=registry
        )
        self.pass_seconds = Histogram(
            "sluice_operator_pass_seconds", "Duration of one pass.", registry=registry
        )
        self.api_requests = Counter(
            "sluice_operator_api_requests",
            "Requests to the API server, watches aside.",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.decisions = Counter(
            "sluice_operator_decisions",
            "Changes of a cap, its epoch or replicas, by reason.",
            ["reason"],
            registry=registry,
        )
        self.scrape_failures = Counter(
            "sluice_operator_scrape_failures",
            "Pods whose admin port did not answer as the contract says.",
            ["reason"],
            registry=registry,
        )
        self.objects = Gauge(
            "sluice_operator_objects", "Objects that are looked after.", registry=registry
        )
