"""The applications of a server's ports, but for its own routes."""

from collections.abc import Callable, Iterable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..api import probes, response_types
from ..api.operations import BoundOperation, Handler
from ..config import VERSION, ServerConfig
from ..evidence.health import Verdict
from ..evidence.metrics import CONTENT_TYPE
from ..http.guards import ERROR_HANDLERS, Bearer, EdgeMiddleware, Inflight, answer
from ..serving.admin import OPEN_PATHS, AdminPort
from ..serving.runtime import Runtime


def by_path(routes: Iterable[BoundOperation]) -> list[tuple[str, list[str], Handler]]:
    """Paths with all their methods, which a refusal of another one names, and what answers."""
    found: dict[str, dict[str, Handler]] = {}
    for operation, handler in routes:
        found.setdefault(operation.path, {})[operation.method] = handler

    def one(handlers: dict[str, Handler]) -> Handler:
        async def handle(request: Request) -> Response:
            return await handlers[request.method](request)

        return handle

    return [(path, list(handlers), one(handlers)) for path, handlers in found.items()]


def application(routes: Iterable[BoundOperation]) -> Starlette:
    """Make an application of `routes`, whose errors have OpenAI's shape."""
    made = []
    for path, methods, handler in by_path(routes):
        made.append(Route(path, handler, methods=methods))
        made[-1].methods = set(methods)  # without the HEAD that Starlette adds to a GET
    return Starlette(routes=made, exception_handlers=ERROR_HANDLERS)


def api_bearer(config: ServerConfig) -> Bearer | None:
    """The check of the API port; None if it is open."""
    key = config.api_key
    return Bearer([key.text]) if key else Bearer.of(config.api_key_file)


def health_routes(
    liveness: Callable[[], Verdict],
    health: Callable[[], Verdict],
    readiness: Callable[[], Verdict],
) -> list[BoundOperation]:
    """The probes and the version, which need no engine. `health`: as in vLLM, whose charts use it
    for readiness."""

    def report(verdict: Verdict) -> Response:
        body = response_types.Health("ok" if verdict.ok else "failed", verdict.reason)
        return answer(body, 200 if verdict.ok else 503)

    async def healthz(request: Request) -> Response:
        return report(liveness())

    async def up(request: Request) -> Response:
        return report(health())

    async def readyz(request: Request) -> Response:
        verdict = readiness()
        body = response_types.Readiness(
            "ready" if verdict.ok else "not ready", verdict.reason, verdict.phase, verdict.percent
        )
        return answer(body, 200 if verdict.ok else 503)

    async def show_version(request: Request) -> Response:
        return answer(response_types.Version(VERSION))

    return [
        BoundOperation(probes.HEALTHZ, healthz),
        BoundOperation(probes.HEALTH, up),
        BoundOperation(probes.READYZ, readyz),
        BoundOperation(probes.VERSION, show_version),
    ]


def probe_routes(runtime: Runtime, metrics: Callable[[], bytes]) -> list[BoundOperation]:
    """Health, version and metrics: on both ports. `metrics`: the text of a scrape."""

    async def scrape(request: Request) -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE)

    health = health_routes(runtime.liveness, runtime.health, runtime.readiness)
    return [*health, BoundOperation(probes.METRICS, scrape)]


def admin_app(
    runtime: Runtime, check_room: Callable[[int, int, bool], None], metrics: Callable[[], bytes]
) -> ASGIApp:
    """The application that the operator and Prometheus speak to."""
    port = AdminPort(runtime)
    own = (
        BoundOperation(probes.RUNTIME_CONFIG, port.runtime_config),
        BoundOperation(probes.PATCH, port.patch),
        BoundOperation(probes.EVIDENCE, port.evidence),
        BoundOperation(probes.INTEGRITY, port.integrity),
    )
    return EdgeMiddleware(
        application((*probe_routes(runtime, metrics), *own)),
        bearer=Bearer.of(runtime.config.admin_token_file),
        open_paths=OPEN_PATHS,
        is_bounded=lambda method, path: False,
        check_room=check_room,
        inflight=Inflight(),
        lifetime=lambda: 1.0,
        load=runtime.load,
        on_answer=runtime.stats.answer,
    )
