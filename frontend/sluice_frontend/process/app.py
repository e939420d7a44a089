"""The applications of a server's ports, but for its own routes."""

from collections.abc import Callable
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.telemetry import TelemetryConfig
from starlette.responses import Response
from starlette.types import ASGIApp

from ..config import ServerConfig
from ..evidence.health import Verdict
from ..evidence.metrics import CONTENT_TYPE
from ..http.guards import Bearer, EdgeMiddleware, Inflight, answer, install_errors
from ..openai import response_types
from ..serving.admin import OPEN_PATHS, add_admin_routes
from ..serving.backend import Backend
from ..serving.runtime import Runtime

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


def api_bearer(config: ServerConfig) -> Bearer | None:
    """The check of the API port; None if it is open."""
    key = config.api_key
    return Bearer([key.text]) if key else Bearer.of(config.api_key_file)


def add_health(
    app: FastAPI,
    liveness: Callable[[], Verdict],
    health: Callable[[], Verdict],
    readiness: Callable[[], Verdict],
) -> None:
    """The probes and the version, which need no engine. `health`: as in vLLM, whose charts use it
    for readiness."""

    def told(verdict: Verdict) -> Response:
        body = response_types.Health("ok" if verdict.ok else "failed", verdict.reason)
        return answer(body, 200 if verdict.ok else 503)

    @app.get("/healthz")
    async def healthz() -> Response:
        return told(liveness())

    @app.get("/health")
    async def up() -> Response:
        return told(health())

    @app.get("/readyz")
    async def readyz() -> Response:
        verdict = readiness()
        body = response_types.Readiness(
            "ready" if verdict.ok else "not ready", verdict.reason, verdict.phase, verdict.percent
        )
        return answer(body, 200 if verdict.ok else 503)

    @app.get("/version")
    async def show_version() -> Response:
        return answer(response_types.Version(version("sluice")))


def add_probes(app: FastAPI, runtime: Runtime[Backend], metrics: Callable[[], bytes]) -> None:
    """Health, version and metrics: on both ports. `metrics`: the text of a scrape."""
    add_health(app, runtime.liveness, runtime.health, runtime.readiness)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE)


def admin_app(
    runtime: Runtime[Backend], check_room: Callable[[int, int], None], metrics: Callable[[], bytes]
) -> ASGIApp:
    """The application that the operator and Prometheus speak to."""
    app = bare()
    add_probes(app, runtime, metrics)
    add_admin_routes(app, runtime)
    return EdgeMiddleware(
        app,
        bearer=Bearer.of(runtime.config.admin_token_file),
        open_paths=OPEN_PATHS,
        is_bounded=lambda method, path: False,
        check_room=check_room,
        inflight=Inflight(),
        lifetime=lambda: 1.0,
        load=runtime.load,
        on_answer=runtime.stats.answer,
    )
