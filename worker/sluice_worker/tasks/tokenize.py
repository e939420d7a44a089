"""POST /tokenize and /detokenize: a text or a conversation to tokens, and back."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from sluice_core.errors import RequestError
from sluice_frontend.api import response_types
from sluice_frontend.api.operations import JSON, BoundOperation
from sluice_frontend.api.sse import encode
from sluice_frontend.api.tokenize import DETOKENIZE, TOKENIZE, Tokenize
from sluice_frontend.http.clients import CLIENT
from sluice_frontend.http.guards import Inflight, ReadReply
from sluice_frontend.serving.admission import MAX_ON_THEIR_WAY
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.reading import num_chars, read_detokenize, read_tokenize
from ..api.service import Service
from ..text.template import Pieces

LEAST_TOKENS = 1 << 18
"""Least bound of the tokens of one text; with a larger window, that is the bound."""
PART = 1 << 12
CHARS_PER_TOKEN = 8
"""Characters allowed for each token: ordinary text has three to five."""
BYTES_PER_TOKEN = 8
BYTES_PER_STR = 12

Write = Callable[[], bytes]
Handler = Callable[[Request, Service], Awaitable[tuple[int, Write]]]
"""(request, service) -> approximate bytes of the answer, and a function that writes it."""


def served(service: Service) -> list[BoundOperation]:
    """Bind both routes, for a limited number at once: the queue does not bound their memory. None
    for a model that reads images only."""
    if service.vectors is not None and service.vectors.sentence is None:
        return []
    open_ones = Inflight()

    def bound(work: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return _InTurn(request, service, open_ones, work)

        return handle

    return [
        BoundOperation(TOKENIZE, bound(_tokenize)),
        BoundOperation(DETOKENIZE, bound(_detokenize)),
    ]


class _InTurn(Response):
    """An answer whose turn ends when the client has read it: until then it takes memory."""

    def __init__(
        self, request: Request, service: Service, open_ones: Inflight, work: Handler
    ) -> None:
        super().__init__()
        self._request, self._service, self._work = request, service, work
        self._open_ones = open_ones

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, work and answer; raises TooManyOpen before a body is read."""
        with self._open_ones.open(scope["state"][CLIENT], MAX_ON_THEIR_WAY):
            size, write = await self._work(self._request, self._service)
            async with self._service.answers.written(size, write) as body:
                await ReadReply(body, media_type=JSON)(scope, receive, send)


async def _tokenize(request: Request, service: Service) -> tuple[int, Write]:
    async with service.bodies.read(request) as body, service.turn(len(body)):
        asked, source = await service.read(body, read_tokenize, service.templates)
        service.admission.check_model(asked.model)
        window = service.runtime.limits().max_model_len
        ids = await _token_ids(service, asked, source, len(body))
        strs = None
        if asked.return_token_strs:
            strs = await service.texts.result(len(ids), partial(service.tokenizer.token_strs, ids))
    reply = response_types.TokenizeReply(len(ids), window, ids, strs)
    per_token = BYTES_PER_TOKEN + (BYTES_PER_STR if asked.return_token_strs else 0)
    return len(ids) * per_token, partial(encode, reply)


async def _detokenize(request: Request, service: Service) -> tuple[int, Write]:
    async with service.bodies.read(request) as body, service.turn(len(body)):
        model, tokens = await service.read(body, read_detokenize)
        service.admission.check_model(model)
        _check_tokens(len(tokens), service, "tokens")
        service.prompts.check_ids(tokens, "tokens")
        text = await service.texts.result(len(tokens), partial(_text, service, tokens))
    return len(text), partial(encode, response_types.DetokenizeReply(text))


def _text(service: Service, tokens: Sequence[int]) -> str:
    """Their text; a token may stand for a hundred characters, so parts are counted first."""
    decode = partial(service.tokenizer.decode, skip_special_tokens=False)
    num_chars = 0
    for at in range(0, len(tokens), PART):
        num_chars += len(decode(tokens[at : at + PART]))
        _check_chars(num_chars, service, "tokens")
    return decode(tokens)


async def _token_ids(
    service: Service, asked: Tokenize, source: str | Pieces, num_bytes: int
) -> list[int]:
    field = "prompt" if isinstance(source, str) else "messages"
    check = partial(_check_tokens, service=service, field=field)
    if isinstance(source, str):
        _check_chars(len(source), service, field)
        encoded = partial(
            service.prompts.encode,
            source,
            add_special_tokens=asked.add_special_tokens,
            parse_special=asked.parse_special,
            check=check,
        )
        ids = await service.texts.result(num_bytes, encoded)
    else:
        _check_chars(num_chars(source), service, field)
        ids = await service.encode_rendered(source, num_bytes, check)
    check(len(ids))
    return ids


def _max_tokens(service: Service) -> int:
    return max(service.runtime.limits().max_model_len, LEAST_TOKENS)


def _check_chars(num_chars: int, service: Service, field: str) -> None:
    _check(num_chars, CHARS_PER_TOKEN * _max_tokens(service), "characters", field)


def _check_tokens(num_tokens: int, service: Service, field: str) -> None:
    _check(num_tokens, _max_tokens(service), "tokens", field)


def _check(num: int, most: int, noun: str, field: str) -> None:
    """Raises RequestError for a text far longer than any prompt of this model."""
    if num > most:
        raise RequestError(
            f"at least {num} {noun} are over the limit of {most} for one text; send it in parts",
            param=field,
        )
