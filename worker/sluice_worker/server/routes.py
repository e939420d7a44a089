"""The API port: OpenAI's completions, a plain /generate, models, health and load."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from fastapi import FastAPI, Request
from starlette.responses import Response

from ..metrics import CONTENT_TYPE
from ..protocol import Completion, parse_completion, parse_generate
from .generation import Generation
from .guards import JSON, read_body
from .replies import encode, models
from .service import Service
from .stream import EventStream, WholeReply, completion_body, generated_body

OPEN_PATHS = ("/health", "/healthz", "/readyz", "/version")
"""What answers without a bearer on the API port."""


def add_routes(app: FastAPI, service: Service) -> None:
    """All routes of the API port."""
    model = service.config.model_name

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        generation = await _open(request, service, parse_completion)
        if generation.request.stream:
            return EventStream(generation, model)
        return WholeReply(generation, completion_body(generation, model))

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        generation = await _open(request, service, parse_generate)
        return WholeReply(generation, generated_body(generation, model))

    @app.get("/v1/models")
    async def list_models() -> Response:
        window = service.engine.max_model_len if service.engine else 0
        created, root = int(service.created_s), service.config.engine.model
        return Response(models(model, created, root, window), media_type=JSON)

    @app.get("/load")
    async def load() -> Response:
        return Response(encode({"server_load": service.client.num_open}), media_type=JSON)

    add_probes(app, service)


async def _open(
    request: Request, service: Service, parse: Callable[[bytes], Completion]
) -> Generation:
    """Read, parse and submit. A request's clock starts with the last byte of its body."""
    limits = service.config.server
    body = await read_body(request, limits.max_body_bytes, limits.receive_timeout)
    arrival_s = time.monotonic()
    parsed = parse(body)
    deadlines = parsed.deadlines.with_headers(request.headers)
    return await service.open(replace(parsed, deadlines=deadlines), arrival_s)


def add_probes(app: FastAPI, service: Service) -> None:
    """Health, version and metrics: on both ports."""

    @app.get("/healthz")
    @app.get("/health")
    async def healthz() -> Response:
        verdict = service.liveness()
        body = {"status": "ok" if verdict.ok else "failed", "reason": verdict.reason}
        return Response(encode(body), 200 if verdict.ok else 503, media_type=JSON)

    @app.get("/readyz")
    async def readyz() -> Response:
        verdict = service.readiness()
        body = {
            "status": "ready" if verdict.ok else "not ready",
            "reason": verdict.reason,
            "phase": verdict.phase,
            "percent": verdict.percent,
        }
        return Response(encode(body), 200 if verdict.ok else 503, media_type=JSON)

    @app.get("/version")
    async def show_version() -> Response:
        return Response(encode({"version": version("sluice")}), media_type=JSON)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.exposition.text(), media_type=CONTENT_TYPE)
