"""Vectors of texts and images under the routes of OpenAI, vLLM, Cohere and
text-embeddings-inference."""

import math
import time
import uuid
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from sluice_core.errors import RequestError
from sluice_frontend.api.operations import BoundOperation, Operation
from sluice_frontend.api.pooling import embed
from sluice_frontend.api.pooling.embed import EmbedRequest
from sluice_frontend.api.pooling.texts import TextsUsage
from sluice_frontend.api.sse import encode
from starlette.requests import Request
from starlette.responses import Response

from ..api.encoding import TextsReply, read_texts, reader_of
from ..api.service import Service
from ..text.texts import TextReader

Parse = Callable[[bytes], EmbedRequest]
Form = Callable[["Embedded"], object]
"""(vectors) -> the answer's body."""
BYTES_PER_NUMBER = 24


def served(service: Service) -> list[BoundOperation]:
    """Bind the routes, if the model makes vectors."""
    facts = service.vectors
    if facts is None or facts.classes is not None:
        return []
    reader = reader_of(service)
    return [
        BoundOperation(operation, partial(_embed, service, reader, facts.normalizes, parse, form))
        for operation, parse, form in _ROUTES
    ]


async def _embed(
    service: Service,
    reader: TextReader,
    normalizes: bool,
    parse: Parse,
    form: Form,
    request: Request,
) -> Response:
    """`normalizes`: the model's vectors have the length 1."""

    def refuse(asked: EmbedRequest) -> None:
        service.check_dimensions(asked.dimensions)
        if asked.normalize is False and normalizes:
            raise RequestError("this model's vectors have the length 1", param="normalize")

    asked, encoding = await read_texts(service, reader, parse, request, refuse)
    scales = asked.dimensions is not None
    scales = scales or (asked.normalize is True and not normalizes)

    def body(vectors: list[bytes]) -> bytes:
        if scales:
            vectors = [of_length_1(vector, asked.dimensions) for vector in vectors]
        told = Embedded(asked, vectors, encoding.num_tokens, service.config.model_name)
        return encode(form(told))

    return TextsReply(encoding, service.answers, len(asked.forms) * BYTES_PER_NUMBER, body)


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
        usage=TextsUsage(told.num_tokens, told.num_tokens),
    )


def _pooling(told: Embedded) -> embed.PoolingReply:
    return embed.PoolingReply(
        id=f"pool-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=told.model,
        data=[embed.Pooled(index=i, data=one) for i, one in enumerate(told.shown)],
        usage=TextsUsage(told.num_tokens, told.num_tokens),
    )


def _cohere(told: Embedded) -> embed.CohereReply:
    forms = told.asked.forms
    return embed.CohereReply(
        id=f"embd-{uuid.uuid4().hex}",
        embeddings=embed.CohereVectors(
            floats=told.floats if "float" in forms else None,
            base64=told.base64 if "base64" in forms else None,
        ),
        texts=[text for text in told.asked.inputs if isinstance(text, str)],
        meta=embed.CohereMeta(embed.BilledUnits(told.num_tokens)),
    )


_ROUTES: tuple[tuple[Operation, Parse, Form], ...] = (
    (embed.EMBEDDINGS, embed.parse_embeddings, _openai),
    (embed.POOLING, embed.parse_pooling, _pooling),
    (embed.EMBED, embed.parse_embed, lambda told: told.floats),
    (embed.COHERE, embed.parse_cohere, _cohere),
)
