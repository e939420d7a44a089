"""The two applications of one service."""

from collections.abc import Iterable, Sequence
from functools import partial

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from prometheus_client import generate_latest
from sluice_frontend.api import probes, response_types
from sluice_frontend.api.operations import JSON, BoundOperation
from sluice_frontend.api.sse import encode
from sluice_frontend.batches.item import served_routes
from sluice_frontend.config import VERSION
from sluice_frontend.http.clients import networks_of
from sluice_frontend.http.guards import (
    ERROR_HANDLERS,
    PROBE_PATHS,
    EdgeMiddleware,
    Inflight,
    answer,
)
from sluice_frontend.process import app as frontend
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from .openapi import document
from .service import Service

# FastAPI traces every chunk of a stream by default; here the evidence measures.
NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
}


def api_app(service: Service, tasks: Iterable[BoundOperation], inflight: Inflight) -> ASGIApp:
    """Make the application that clients speak to. `tasks`: the routes of all tasks."""
    tasks = list(tasks)
    served = served_routes().intersection(each.operation.path for each in tasks)
    routes = [*tasks, *own_routes(service), *service.batches.routes(served)]
    bounded = {each.operation.path for each in routes if each.operation.has_work}
    service.batches.app = inner = _application(service, routes)
    edge = EdgeMiddleware(
        inner,
        bearer=frontend.api_bearer(service.config.server),
        open_paths=PROBE_PATHS,
        is_bounded=lambda method, path: method == "POST" and path in bounded,
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


def _application(service: Service, routes: Sequence[BoundOperation]) -> FastAPI:
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        telemetry=NO_TELEMETRY,
        exception_handlers=ERROR_HANDLERS,
    )
    shown = [*(each.operation for each in routes), probes.DOCUMENT]
    has_keys = service.config.server.has_api_keys
    page = encode(document(shown, version=VERSION, has_keys=has_keys, open_paths=PROBE_PATHS))

    async def show(request: Request) -> Response:
        return Response(page, media_type=JSON)

    for path, methods, handler in frontend.by_path(
        (*routes, BoundOperation(probes.DOCUMENT, show))
    ):
        app.add_api_route(path, handler, methods=methods)
    return app


def own_routes(service: Service) -> list[BoundOperation]:
    """Bind what is no task: the model, the load, the probes."""

    def card() -> response_types.ModelCard:
        return response_types.ModelCard(
            id=service.config.model_name,
            created=int(service.runtime.created_s),
            root=service.config.root,
            max_model_len=facts.max_model_len if (facts := service.client.facts) else 0,
        )

    async def models(request: Request) -> Response:
        return answer(response_types.ModelList([card()]))

    async def model(request: Request) -> Response:
        if not (name := request.path_params["model"]):  # /v1/models/
            return await models(request)
        service.admission.check_model(name)
        return answer(card())

    async def load(request: Request) -> Response:
        return answer(response_types.Load(service.client.num_open))

    return [
        BoundOperation(probes.MODELS, models),
        BoundOperation(probes.MODEL, model),
        BoundOperation(probes.LOAD, load),
        *frontend.probe_routes(service.runtime, _metrics(service)),
    ]


def admin_app(service: Service) -> ASGIApp:
    """The application that the operator and Prometheus speak to."""
    return frontend.admin_app(service.runtime, service.admission.check_room, _metrics(service))


def _metrics(service: Service) -> "partial[bytes]":
    return partial(generate_latest, service.runtime.registry)
