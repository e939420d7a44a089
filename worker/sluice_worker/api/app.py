"""The two applications of one service."""

from functools import partial

from prometheus_client import generate_latest
from sluice_frontend.http.clients import networks_of
from sluice_frontend.http.guards import PROBE_PATHS, EdgeMiddleware, Inflight
from sluice_frontend.process import app as frontend
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from . import routes
from .operations import GENERATING_PATHS
from .service import Service


def api_app(service: Service, inflight: Inflight) -> ASGIApp:
    """The application that clients speak to."""
    app = frontend.bare()
    routes.add_routes(app, service)
    frontend.add_probes(app, service.runtime, _metrics(service))
    edge = EdgeMiddleware(
        app,
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


def admin_app(service: Service) -> ASGIApp:
    """The application that the operator and Prometheus speak to."""
    return frontend.admin_app(service.runtime, service.admission.check_room, _metrics(service))


def _metrics(service: Service) -> "partial[bytes]":
    return partial(generate_latest, service.runtime.registry)
