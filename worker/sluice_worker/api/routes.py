"""The API port: OpenAI's routes, a plain /generate, tokens, models, health and load."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from fastapi import FastAPI, Request
from sluice_frontend.http.clients import CLIENT, SALT
from sluice_frontend.http.guards import ASKED_ID, JSON, PROBE_PATHS, answer
from sluice_frontend.openai import response_types
from sluice_frontend.openai.protocol import (
    Completion,
    parse_completion,
    parse_generate,
    parse_generate_stream,
)
from sluice_frontend.openai.sampling_params import Defaults
from sluice_frontend.openai.sse import encode
from starlette.responses import Response

from .formats import ChatFormat, CompletionFormat, Format, GenerateFormat
from .generation import Generation
from .openapi import document
from .operations import OPERATIONS
from .service import Service
from .stream import EventStream, WholeReply
from .tokens import add_token_routes


def add_routes(app: FastAPI, service: Service) -> None:
    """All routes of the API port."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generated(request, service, parse_completion, CompletionFormat)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        async with service.bodies.read(request, service.admission.refuse_body) as body:
            arrival_s = time.monotonic()
            async with service.turn(len(body)):
                asked = _with_headers(await service.read_chat(body), request)
                generation = await service.open(asked, arrival_s, "chatcmpl")
        return _reply(generation, service, ChatFormat)

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        return await _generated(request, service, parse_generate, GenerateFormat)

    @app.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        return await _generated(request, service, parse_generate_stream, GenerateFormat)

    add_token_routes(app, service)
    _add_models(app, service)

    has_keys = service.config.server.has_api_keys
    page = encode(
        document(OPERATIONS, version=version("sluice"), has_keys=has_keys, open_paths=PROBE_PATHS)
    )

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(page, media_type=JSON)


async def _generated(
    request: Request,
    service: Service,
    parse: Callable[[bytes, Defaults], Completion],
    kind: type[Format],
) -> Response:
    """Read, parse and submit. A request's clock starts with the last byte of its body."""
    async with service.bodies.read(request, service.admission.refuse_body) as body:
        arrival_s = time.monotonic()
        async with service.turn(len(body)):
            asked = await service.parsed(body, parse)
            generation = await service.open(_with_headers(asked, request), arrival_s)
    return _reply(generation, service, kind)


def _with_headers(asked: Completion, request: Request) -> Completion:
    """`asked` with deadlines and id from headers, its client, and the salt of the caller's key.

    Usage and first-token time must not reveal to a caller what others cached.
    """
    state = request.scope["state"]
    return replace(
        asked,
        deadlines=asked.deadlines.with_headers(request.headers),
        request_id=asked.request_id or state[ASKED_ID],
        cache_salt=asked.cache_salt or state[SALT],
        client=state[CLIENT],
    )


def _reply(generation: Generation, service: Service, kind: type[Format]) -> Response:
    form = kind(generation, service.config.model_name, service.tokenizer)
    if generation.request.stream:
        return EventStream(form, service.answers, service.config.server.sse_keep_alive_interval)
    return WholeReply(form, service.answers)


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> response_types.ModelCard:
        return response_types.ModelCard(
            id=service.config.model_name,
            created=int(service.runtime.created_s),
            root=service.config.root,
            max_model_len=ready.max_model_len if (ready := service.client.ready) else 0,
        )

    @app.get("/v1/models")
    async def models() -> Response:
        return answer(response_types.ModelList([card()]))

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if not model:  # /v1/models/
            return await models()
        service.admission.check_model(model)
        return answer(card())

    @app.get("/load")
    async def load() -> Response:
        return answer(response_types.Load(service.client.num_open))
