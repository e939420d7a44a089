"""The two applications of one service."""

from functools import partial

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from prometheus_client import generate_latest
from sluice_frontend.http.clients import networks_of
from sluice_frontend.http.guards import ERROR_HANDLERS, PROBE_PATHS, EdgeMiddleware, Inflight
from sluice_frontend.process import app as frontend
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from .operations import GENERATING_PATHS
from .routes import own_routes
from .service import Service

# FastAPI traces every chunk of a stream by default; here the evidence measures.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
}


def api_app(service: Service, inflight: Inflight) -> ASGIApp:
    """The application that clients speak to."""
    edge = EdgeMiddleware(
        _application(service),
        bearer=frontend.api_bearer(service.config.server),
        open_paths=PROBE_PATHS,
        is_bounded=lambda method, path: method == "POST" and path in GENERATING_PATHS,
        check_room=service.admission.check_room,
        inflight=inflight,
        lifetime=service.runtime.lifetime,
        load=service.runtime.load,
        on_answer=service.runtime.stats.answer,
        trusted=networks_of(service.config.server.trusted_proxies),
    )
    # Outermost: a browser's preflight request bears no key.
    origins = service.config.server.allowed_origins
    return CORSMiddleware(edge, origins, allow_methods=["*"], allow_headers=["*"])


def _application(service: Service) -> FastAPI:
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
        exception_handlers=ERROR_HANDLERS,
    )
    probes = frontend.probe_routes(service.runtime, _metrics(service))
    for method, path, handler in (*own_routes(service), *probes):
        app.add_api_route(path, handler, methods=[method])
    return app


def admin_app(service: Service) -> ASGIApp:
    """The application that the operator and Prometheus speak to."""
    return frontend.admin_app(service.runtime, service.admission.check_room, _metrics(service))


def _metrics(service: Service) -> "partial[bytes]":
    return partial(generate_latest, service.runtime.registry)
