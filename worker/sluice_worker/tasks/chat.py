"""POST /v1/chat/completions: the next message of a conversation."""

import time
from functools import partial

from sluice_frontend.api.chat import CHAT
from sluice_frontend.api.operations import BoundOperation
from starlette.requests import Request
from starlette.responses import Response

from ..api.formats import ChatFormat
from ..api.service import Service
from .generate import reply, with_headers


def served(service: Service) -> list[BoundOperation]:
    """Bind the chat's route, if the model writes text."""
    if service.task != "generate":
        return []
    return [BoundOperation(CHAT, partial(_chat, service))]


async def _chat(service: Service, request: Request) -> Response:
    async with service.bodies.read(request, service.admission.refusal_of(request.headers)) as body:
        arrival_s = time.monotonic()
        async with service.turn(len(body)):
            asked = with_headers(await service.read_chat(body), request)
            generation = await service.open(asked, arrival_s, "chatcmpl")
    return reply(generation, service, ChatFormat)
