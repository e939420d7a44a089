"""The two applications of one service."""

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.guards import (
    PROBE_PATHS,
    Bearer,
    EdgeMiddleware,
    Inflight,
    install_errors,
)
from sluice_frontend.serving.admin import OPEN_PATHS, add_admin_routes
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from . import routes
from .operations import GENERATING_PATHS
from .service import Service

# FastAPI traces every chunk of a stream by default; here the evidence measures.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
}


def bare() -> FastAPI:
    """An application without routes, whose errors have OpenAI's shape."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, telemetry=NO_TELEMETRY)
    install_errors(app)
    return app


def _api_bearer(config: ServerConfig) -> Bearer | None:
    key = config.api_key
    return Bearer([key.text]) if key else Bearer.of(config.api_key_file)


def api_app(service: Service, inflight: Inflight) -> ASGIApp:
    """The application that clients speak to."""
    app = bare()
    routes.add_routes(app, service)
    edge = EdgeMiddleware(
        app,
        bearer=_api_bearer(service.config.server),
        open_paths=PROBE_PATHS,
        bounded_paths=GENERATING_PATHS,
        check_room=service.admission.check_room,
        inflight=inflight,
        lifetime=service.runtime.lifetime,
        load=service.runtime.load,
        on_answer=service.runtime.stats.answer,
    )
    # Outermost: a browser's preflight request bears no key.
    origins = service.config.server.allowed_origins
    return CORSMiddleware(edge, origins, allow_methods=["*"], allow_headers=["*"])


def admin_app(service: Service) -> ASGIApp:
    """The application that the operator and Prometheus speak to."""
    app = bare()
    routes.add_probes(app, service)
    add_admin_routes(app, service.runtime)
    return EdgeMiddleware(
        app,
        bearer=Bearer.of(service.config.server.admin_token_file),
        open_paths=OPEN_PATHS,
        bounded_paths=(),
        check_room=service.admission.check_room,
        inflight=Inflight(),
        lifetime=lambda: 1.0,
        load=service.runtime.load,
        on_answer=service.runtime.stats.answer,
    )
