"""The two applications of one gate."""

import aiohttp
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from sluice_frontend.config import ServerConfig
from sluice_frontend.evidence.metrics import CONTENT_TYPE, OwnCollector
from sluice_frontend.http.guards import PROBE_PATHS, EdgeMiddleware, Inflight
from sluice_frontend.process.app import add_health, api_bearer, bare
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .asked import GENERATING
from .gate import Gate

OWN_PATHS = frozenset((*PROBE_PATHS, "/metrics"))


class ApiApp:
    """Probes and metrics are answered here; all else is the engine's."""

    def __init__(self, gate: Gate) -> None:
        self._own, self._proxy = bare(), gate.proxy
        add_probes(self._own, gate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._own if scope["path"] in OWN_PATHS else self._proxy
        await app(scope, receive, send)


def add_probes(app: FastAPI, gate: Gate) -> None:
    """Health, and the engine's metrics with ours behind them."""
    runtime, registry = gate.runtime, CollectorRegistry()
    registry.register(OwnCollector(runtime.model_name, runtime.stats, runtime.view))
    add_health(app, runtime.liveness, runtime.health, runtime.readiness)

    @app.get("/metrics")
    async def metrics() -> Response:
        try:
            theirs = await gate.upstream.text("/metrics") if gate.upstream.is_up else ""
        except (aiohttp.ClientError, TimeoutError):
            theirs = ""  # absent, not zero
        own = generate_latest(registry).decode()
        return Response(theirs + ("\n" if theirs else "") + own, media_type=CONTENT_TYPE)


def api_app(gate: Gate, config: ServerConfig, inflight: Inflight) -> ASGIApp:
    """The application that clients speak to."""
    edge = EdgeMiddleware(
        ApiApp(gate),
        bearer=api_bearer(config),
        open_paths=PROBE_PATHS,
        bounded_paths=tuple(GENERATING),
        check_room=gate.admission.check_room,
        inflight=inflight,
        lifetime=gate.runtime.lifetime,
        load=gate.runtime.load,
        on_answer=gate.runtime.stats.answer,
    )
    return CORSMiddleware(edge, config.allowed_origins, allow_methods=["*"], allow_headers=["*"])

