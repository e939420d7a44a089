"""POST /tokenize and /detokenize: what a text or a conversation is in tokens, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from ..errors import TooManyOpen
from ..tokenize import Tokenize, parse_detokenize, parse_tokenize
from . import shapes
from .guards import Inflight, answer
from .off_loop import off_loop, parsed
from .service import MAX_ON_THEIR_WAY, Service


def add_token_routes(app: FastAPI, service: Service) -> None:
    """Both routes, for so many at once: what they read and hold is not bounded by the queue."""
    open_ones = Inflight()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        with _turn(open_ones):
            async with service.bodies.read(request) as body:
                return await _tokenize(body, service)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        with _turn(open_ones):
            async with service.bodies.read(request) as body:
                return await _detokenize(body, service)


@contextmanager
def _turn(open_ones: Inflight) -> Iterator[None]:
    """Raises TooManyOpen before a body is read."""
    if open_ones.num_open >= MAX_ON_THEIR_WAY:
        sentence = f"{open_ones.num_open} texts are being tokenized already"
        raise TooManyOpen(sentence, retry_after_s=1)
    with open_ones:
        yield


async def _tokenize(body: bytes, service: Service) -> Response:
    asked = await parsed(body, parse_tokenize)
    service.check_model(asked.model)
    window = service.limits().max_model_len
    ids = await _token_ids(service, asked, len(body))
    strs = None
    if asked.return_token_strs:
        strs = await off_loop(len(ids), lambda: service.tokenizer.token_strs(ids))
    return answer(shapes.TokenizeReply(len(ids), window, ids, strs))


async def _detokenize(body: bytes, service: Service) -> Response:
    asked = await parsed(body, parse_detokenize)
    service.check_model(asked.model)
    service.prompts.check_ids(asked.tokens, "tokens")
    text = await off_loop(
        len(asked.tokens),
        lambda: service.tokenizer.decode(asked.tokens, skip_special_tokens=False),
    )
    return answer(shapes.DetokenizeReply(text))


async def _token_ids(service: Service, asked: Tokenize, num_bytes: int) -> list[int]:
    source = asked.source
    if not isinstance(source, str):
        return await service.render(source, num_bytes)
    encoded = partial(
        service.tokenizer.encode,
        source,
        add_special_tokens=asked.add_special_tokens,
        parse_special=asked.parse_special,
    )
    return await service.texts.tokenized(num_bytes, encoded)
