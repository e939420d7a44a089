"""The two applications of one gate."""

import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from sluice_frontend.api.batches import PREFIXES
from sluice_frontend.batches.item import served_routes
from sluice_frontend.config import ServerConfig
from sluice_frontend.evidence.metrics import OwnCollector
from sluice_frontend.http.clients import networks_of
from sluice_frontend.http.guards import PROBE_PATHS, EdgeMiddleware, Inflight
from sluice_frontend.process.app import api_bearer, application, probe_routes
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from .gate import Gate
from .request.operations import COUNTED, takes_place

OPEN_PATHS = frozenset(PROBE_PATHS) - {"/version"}
"""They answer without a key. The version is the engine's."""
OWN_PATHS = OPEN_PATHS | {"/metrics"}
ENGINE_LINE = re.compile(
    r"^(?:# HELP (?!sluice_)[A-Za-z_:][\w:]* .*"
    r"|# TYPE (?!sluice_)[A-Za-z_:][\w:]* (?:counter|gauge|histogram|summary|untyped)"
    r'|(?!sluice_)[A-Za-z_:][\w:]*(?:\{(?:\w+="(?:[^"\\\n]|\\.)*",?)*\})? [-+\w.]+(?: -?\d+)?)$',
    re.ASCII | re.MULTILINE,
)
"""Lines of an engine's page that are shown. One that Prometheus cannot read would cost it ours as
well. Families `sluice_*` are the gate's own, also before a worker of ours."""


class ApiApp:
    """Probes, metrics, files and batches are answered here; all else is the engine's."""

    def __init__(self, gate: Gate) -> None:
        probes = probe_routes(gate.runtime, metrics_of(gate))
        self._own = application([*probes, *gate.batches.routes(served_routes())])
        self._proxy = gate.proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._own if _is_own(scope["path"]) else self._proxy
        await app(scope, receive, send)


def _is_own(path: str) -> bool:
    """True if the gate itself answers at `path`."""
    kept = any(path == each or path.startswith(f"{each}/") for each in PREFIXES)
    return kept or path in OWN_PATHS


def _is_bounded(method: str, path: str) -> bool:
    return takes_place(method, path) and not _is_own(path)


def metrics_of(gate: Gate) -> Callable[[], bytes]:
    """The engine's metrics as of the last look, and ours behind them."""
    runtime, registry = gate.runtime, CollectorRegistry()
    registry.register(OwnCollector(runtime.model_name, runtime.stats, runtime.view))

    def scrape() -> bytes:
        lines = [f"{line[0]}\n" for line in ENGINE_LINE.finditer(gate.upstream.metrics)]
        return "".join(lines).encode() + generate_latest(registry)

    return scrape


def api_app(gate: Gate, config: ServerConfig, inflight: Inflight) -> ASGIApp:
    """The application that clients speak to."""
    stats = gate.runtime.stats

    def on_answer(path: str, method: str, status: int) -> None:
        stats.answer(path if path in COUNTED or path in OWN_PATHS else "none", method, status)

    edge = EdgeMiddleware(
        ApiApp(gate),
        bearer=api_bearer(config),
        open_paths=OPEN_PATHS,
        is_bounded=_is_bounded,
        check_room=gate.admission.check_room,
        inflight=inflight,
        lifetime=gate.runtime.lifetime,
        load=gate.runtime.load,
        on_answer=on_answer,
        trusted=networks_of(config.trusted_proxies),
    )
    if not config.allowed_origins:
        return edge  # the engine answers browsers
    return CORSMiddleware(edge, config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
