"""Text that follows a prompt: OpenAI's completions and TGI's /generate."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sluice_core.work import is_background
from sluice_frontend.api import generate
from sluice_frontend.api.generate import Completion
from sluice_frontend.api.operations import BoundOperation, Operation
from sluice_frontend.api.sampling_params import Defaults
from sluice_frontend.http.clients import CLIENT, SALT
from sluice_frontend.http.guards import ASKED_ID
from starlette.requests import Request
from starlette.responses import Response

from ..api.formats import CompletionFormat, Format, GenerateFormat
from ..api.generation import Generation
from ..api.service import Service
from ..api.stream import EventStream, WholeReply

Parse = Callable[[bytes, Defaults], Completion]
_ROUTES: tuple[tuple[Operation, Parse, type[Format]], ...] = (
    (generate.COMPLETIONS, generate.parse_completion, CompletionFormat),
    (generate.GENERATE, generate.parse_generate, GenerateFormat),
    (generate.GENERATE_STREAM, generate.parse_generate_stream, GenerateFormat),
)


def served(service: Service) -> list[BoundOperation]:
    """Bind the three routes, if the model writes text."""
    if service.task != "generate":
        return []
    return [
        BoundOperation(operation, partial(_generate, service, parse, kind))
        for operation, parse, kind in _ROUTES
    ]


async def _generate(
    service: Service, parse: Parse, kind: type[Format], request: Request
) -> Response:
    """Read, parse and submit. A request's clock starts with the last byte of its body."""
    async with service.bodies.read(request, service.admission.refusal_of(request.headers)) as body:
        arrival_s = time.monotonic()
        async with service.turn(len(body)):
            asked = await service.parsed(body, parse)
            generation = await service.open(with_headers(asked, request), arrival_s)
    return reply(generation, service, kind)


def with_headers(asked: Completion, request: Request) -> Completion:
    """Add deadlines, class and id from headers, the client, and the salt of the caller's key.

    Usage and first-token time must not reveal to a caller what others cached.
    """
    state = request.scope["state"]
    return replace(
        asked,
        deadlines=asked.deadlines.with_headers(request.headers),
        request_id=asked.request_id or state[ASKED_ID],
        cache_salt=asked.cache_salt or state[SALT],
        client=state[CLIENT],
        is_background=is_background(request.headers),
    )


def reply(generation: Generation, service: Service, kind: type[Format]) -> Response:
    """Make the answer: a stream of events, or one piece."""
    form = kind(generation, service.config.model_name, service.tokenizer)
    if generation.request.stream:
        return EventStream(form, service.answers, service.config.server.sse_keep_alive_interval)
    return WholeReply(form, service.answers)
