"""A vector for each text: OpenAI's, vLLM's, text-embeddings-inference's and Cohere's routes."""

import math
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from sluice_core.errors import RequestError
from sluice_core.wire import Encode, packed
from sluice_core.work import Work
from sluice_frontend.api import embed
from sluice_frontend.api.embed import EmbedRequest
from sluice_frontend.api.operations import BoundOperation, Operation
from sluice_frontend.api.sse import encode
from sluice_frontend.http.clients import CLIENT
from sluice_frontend.http.guards import JSON, ReadReply
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..api.encoding import Encoding
from ..api.service import Service
from ..api.stream import watched
from ..text.texts import TextReader

Parse = Callable[[bytes], EmbedRequest]
Form = Callable[["Embedded"], object]
"""(vectors) -> the answer's body."""
BYTES_PER_NUMBER = 24
FLOAT_BYTES = array("f").itemsize


def served(service: Service) -> list[BoundOperation]:
    """Bind the route, if the model makes vectors."""
    if service.sentence is None:
        return []
    reader = TextReader(service.prompts, service.sentence)
    return [
        BoundOperation(operation, partial(_embed, service, reader, parse, form))
        for operation, parse, form in _ROUTES
    ]


async def _embed(
    service: Service, reader: TextReader, parse: Parse, form: Form, request: Request
) -> Response:
    async with service.bodies.read(request, service.admission.refuse_body) as body:
        arrival_s = time.monotonic()
        async with service.turn(len(body)):
            asked = await service.read(body, parse)
            client = request.scope["state"][CLIENT]
            encoding = await _open(service, reader, asked, client, arrival_s, len(body))
    return VectorReply(encoding, asked, form, service)


async def _open(
    service: Service,
    reader: TextReader,
    asked: EmbedRequest,
    client: str,
    arrival_s: float,
    num_bytes: int,
) -> Encoding:
    """Let the texts in and submit them, or raise why not."""
    facts = service.admission.check_open()
    service.admission.check_model(asked.model)
    service.check_dimensions(asked.dimensions)
    assert service.sentence is not None
    if asked.normalize is False and service.sentence.normalizes:
        raise RequestError("this model's vectors have the length 1", param="normalize")
    read = partial(
        reader.read,
        asked.inputs,
        facts.max_model_len,
        cut=_cut(asked.most_tokens, facts.max_model_len),
        add_special_tokens=asked.add_special_tokens,
        prompt_name=asked.prompt_name,
    )
    texts = await service.texts.result(num_bytes, read)
    if any(len(text.token_ids) == 0 for text in texts):
        raise RequestError("input has a text without tokens", param="input")
    work = Work(tuple(len(text.token_ids) for text in texts), client=client)
    service.admission.admit(work, arrival_s)
    runtime, encoding = service.runtime, Encoding(service.runtime.ledger, service.client.abort)
    for text in texts:
        name, num = service.next_id(), len(text.token_ids)
        timer = runtime.recorder.arrive(name, arrival_s, time.monotonic(), num, client=client)
        message = Encode(name, packed(text.token_ids), text.num_skipped)
        service.client.submit(message, encoding.add(timer))
    return encoding


def _cut(most: int | None, window: int) -> int | None:
    """Tokens to which longer texts are cut; None: they are refused."""
    if most is not None and most > window:
        raise RequestError(
            f"truncate_prompt_tokens {most} is over the {window} tokens that the model reads",
            param="truncate_prompt_tokens",
        )
    return window if most is not None and most < 0 else most


class Embedded(NamedTuple):
    """The vectors of a request, as packed float32, and their names for the answer."""

    asked: EmbedRequest
    values: list[bytes]
    num_tokens: int
    model: str

    @property
    def floats(self) -> list[list[float]]:
        """Them as numbers."""
        return [array("f", values).tolist() for values in self.values]

    @property
    def base64(self) -> list[str]:
        """Them as base64 of float32, little endian."""
        return [b64encode(values).decode() for values in self.values]

    @property
    def shown(self) -> Sequence[list[float] | str]:
        """Them in the one form that was asked for."""
        return self.base64 if "base64" in self.asked.forms else self.floats


class VectorReply(Response):
    """The vectors in one piece. A client that leaves frees the places of its texts."""

    def __init__(
        self, encoding: Encoding, asked: EmbedRequest, form: Form, service: Service
    ) -> None:
        super().__init__()
        self._encoding, self._asked, self._form = encoding, asked, form
        self._model, self._answers = service.config.model_name, service.answers
        is_done = service.sentence is not None and service.sentence.normalizes
        self._scales = asked.dimensions is not None or (asked.normalize is True and not is_done)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Collect all vectors, then answer; nothing is sent to a client that has left."""
        encoding = self._encoding
        async with watched(encoding, receive):
            vectors = await encoding.vectors()
            if encoding.has_left:
                return
            num = sum(map(len, vectors)) // FLOAT_BYTES
            size = num * BYTES_PER_NUMBER * len(self._asked.forms)
            async with self._answers.written(size, partial(self._body, vectors)) as body:
                await ReadReply(body, media_type=JSON)(scope, receive, send)

    def _body(self, vectors: list[bytes]) -> bytes:
        asked = self._asked
        if self._scales:
            vectors = [of_length_1(vector, asked.dimensions) for vector in vectors]
        told = Embedded(asked, vectors, self._encoding.num_tokens, self._model)
        return encode(self._form(told))


def of_length_1(vector: bytes, dimensions: int | None) -> bytes:
    """Its first numbers, or all, scaled to the length 1."""
    numbers = array("f", vector)[:dimensions]
    length = math.sqrt(math.fsum(x * x for x in numbers)) or 1.0
    return array("f", (x / length for x in numbers)).tobytes()


def _openai(told: Embedded) -> embed.EmbeddingsReply:
    return embed.EmbeddingsReply(
        id=f"embd-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=told.model,
        data=[embed.Embedding(index=i, embedding=one) for i, one in enumerate(told.shown)],
        usage=embed.EmbeddingUsage(told.num_tokens, told.num_tokens),
    )


def _pooling(told: Embedded) -> embed.PoolingReply:
    return embed.PoolingReply(
        id=f"pool-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=told.model,
        data=[embed.Pooled(index=i, data=one) for i, one in enumerate(told.shown)],
        usage=embed.EmbeddingUsage(told.num_tokens, told.num_tokens),
    )


def _cohere(told: Embedded) -> embed.CohereReply:
    forms = told.asked.forms
    return embed.CohereReply(
        id=f"embd-{uuid.uuid4().hex}",
        embeddings=embed.CohereVectors(
            floats=told.floats if "float" in forms else None,
            base64=told.base64 if "base64" in forms else None,
        ),
        texts=[str(text) for text in told.asked.inputs],
        meta=embed.CohereMeta(embed.BilledUnits(told.num_tokens)),
    )


_ROUTES: tuple[tuple[Operation, Parse, Form], ...] = (
    (embed.EMBEDDINGS, embed.parse_embeddings, _openai),
    (embed.POOLING, embed.parse_pooling, _pooling),
    (embed.EMBED, embed.parse_embed, lambda told: told.floats),
    (embed.COHERE, embed.parse_cohere, _cohere),
)
