"""The API port: OpenAI's routes, a plain /generate, tokens, models, health and load."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

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
from sluice_frontend.process.app import Served
from starlette.requests import Request
from starlette.responses import Response

from .formats import ChatFormat, CompletionFormat, Format, GenerateFormat
from .generation import Generation
from .openapi import document
from .operations import OPERATIONS
from .service import Service
from .stream import EventStream, WholeReply
from .tokens import TokenRoutes


def own_routes(service: Service) -> list[Served]:
    """Make all routes of the API port but its probes."""

    async def completions(request: Request) -> Response:
        return await _generated(request, service, parse_completion, CompletionFormat)

    async def chat(request: Request) -> Response:
        async with service.bodies.read(request, service.admission.refuse_body) as body:
            arrival_s = time.monotonic()
            async with service.turn(len(body)):
                asked = _with_headers(await service.read_chat(body), request)
                generation = await service.open(asked, arrival_s, "chatcmpl")
        return _reply(generation, service, ChatFormat)

    async def generate(request: Request) -> Response:
        return await _generated(request, service, parse_generate, GenerateFormat)

    async def generate_stream(request: Request) -> Response:
        return await _generated(request, service, parse_generate_stream, GenerateFormat)

    tokens = TokenRoutes(service)
    return [
        Served("POST", "/v1/completions", completions),
        Served("POST", "/v1/chat/completions", chat),
        Served("POST", "/generate", generate),
        Served("POST", "/generate_stream", generate_stream),
        Served("POST", "/tokenize", tokens.tokenize),
        Served("POST", "/detokenize", tokens.detokenize),
        *_model_routes(service),
        _document_route(service.config.server.has_api_keys),
    ]


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


def _model_routes(service: Service) -> list[Served]:
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
        Served("GET", "/v1/models", models),
        Served("GET", "/v1/models/{model:path}", model),
        Served("GET", "/load", load),
    ]


def _document_route(has_keys: bool) -> Served:
    page = encode(
        document(OPERATIONS, version=version("sluice"), has_keys=has_keys, open_paths=PROBE_PATHS)
    )

    async def openapi(request: Request) -> Response:
        return Response(page, media_type=JSON)

    return Served("GET", "/openapi.json", openapi)
