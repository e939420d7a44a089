"""Texts and images that become vectors: the bodies of their routes, parsed. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from sluice_core.errors import RequestError

from ..generate import ModelName, refuse_unsupported
from ..json_body import convert, parse_object
from ..operations import WORK_ERRORS, Counting, Operation
from .images import Messages, read_contents, read_images, read_messages
from .texts import Inputs, Modality, Text, TextsRequest, TextsUsage, Truncate, read_inputs

Dimensions = Annotated[int, Meta(ge=1, le=1 << 20)]
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "padding": (None, False),
    "truncation_side": (None, "right"),
    "use_activation": (None,),
    "normalize": (None,),
}
"""Values of known parameters that are not built, which ask for what is done anyway."""
_RIGHT = (None, "right", "Right")
_COHERE_ONLY = ("priority",)
_COHERE_INPUTS = ("texts", "images", "inputs")


class EmbeddingsFields(Struct, frozen=True, kw_only=True):
    """The fields of POST /v1/embeddings that are honoured, but for the inputs.

    `truncate_prompt_tokens`: tokens of each text that are read; -1 for all that the model reads.
    `prompt_name`: one of the model's own prompts, which is put in front of each text.
    """

    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Dimensions | None = None
    truncate_prompt_tokens: Truncate | None = None
    add_special_tokens: bool | None = True
    prompt_name: str | None = None
    user: str | None = None


class EmbeddingsBody(EmbeddingsFields, frozen=True, kw_only=True):
    """With texts, or images as base64 or data URLs. `modality`: Infinity's."""

    input: Inputs
    modality: Modality | None = None


class EmbeddingsChatBody(EmbeddingsFields, frozen=True, kw_only=True):
    """With texts and images in messages, as vLLM has them."""

    messages: Messages


class Embedding(Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of float32, little endian."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsReply(Struct, frozen=True, kw_only=True):
    """The vectors in the order of their texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: TextsUsage


class PoolingBody(EmbeddingsBody, frozen=True, kw_only=True):
    """The fields of POST /pooling that are honoured: vLLM's, for vectors."""

    task: Literal["embed"] | None = None


class PoolingChatBody(EmbeddingsChatBody, frozen=True, kw_only=True):
    """With texts and images in messages."""

    task: Literal["embed"] | None = None


class Pooled(Struct, frozen=True, kw_only=True):
    """One vector: numbers, or base64 of float32, little endian."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | str


class PoolingReply(Struct, frozen=True, kw_only=True):
    """The vectors in the order of their texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: TextsUsage


class EmbedBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /embed that are honoured: text-embeddings-inference's. `normalize`:
    vectors of length 1, even if the model's files do not say so."""

    inputs: Inputs
    truncate: bool | None = None
    prompt_name: str | None = None
    normalize: bool | None = True
    dimensions: Dimensions | None = None


Vectors = Annotated[list[list[float]], Meta(description="A vector for each text.")]


class CohereBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /v2/embed that are honoured: Cohere's, of which one has the inputs.
    `input_type`: a prompt's name. `max_tokens`: of each text."""

    texts: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    images: Annotated[list[str], Meta(min_length=1)] | None = None
    inputs: Annotated[list[Any], Meta(min_length=1)] | None = None
    model: ModelName | None = None
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "END"] | None = "END"
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class CohereVectors(
    Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"floats": "float"}
):
    """The vectors in each form that was asked for."""

    floats: list[list[float]] | None = None
    base64: list[str] | None = None


class BilledUnits(Struct, frozen=True):
    """Token counts of a whole request."""

    input_tokens: int


class CohereMeta(Struct, frozen=True):
    """What surrounds the answer."""

    billed_units: BilledUnits


class CohereReply(Struct, frozen=True, kw_only=True):
    """The vectors in the order of their texts, which are repeated."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(TextsRequest):
    """What is to be embedded. `normalize`: None as the model's files say. `forms`: of the vectors
    in the answer."""

    forms: frozenset[str] = frozenset({"float"})
    dimensions: int | None = None
    normalize: bool | None = None


def parse_embeddings(body: bytes) -> EmbedRequest:
    """The request in the body of POST /v1/embeddings; raises RequestError naming the field."""
    return _openai(body, EmbeddingsBody, EmbeddingsChatBody)


def parse_pooling(body: bytes) -> EmbedRequest:
    """The request in the body of POST /pooling; raises RequestError naming the field."""
    return _openai(body, PoolingBody, PoolingChatBody)


def parse_embed(body: bytes) -> EmbedRequest:
    """The request in the body of POST /embed; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, EmbedBody.__struct_fields__, {"truncation_direction": _RIGHT})
    asked = convert(fields, EmbedBody)
    return EmbedRequest(
        inputs=read_inputs(asked.inputs, "inputs"),
        dimensions=asked.dimensions,
        most_tokens=-1 if asked.truncate else None,
        prompt_name=asked.prompt_name,
        normalize=asked.normalize is not False,
    )


def parse_cohere(body: bytes) -> EmbedRequest:
    """The request in the body of POST /v2/embed; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, CohereBody.__struct_fields__, dict.fromkeys(_COHERE_ONLY, (None,)))
    asked = convert(fields, CohereBody)
    most = None if asked.truncate == "NONE" else asked.max_tokens or -1
    return EmbedRequest(
        inputs=_cohere_inputs(asked),
        model=asked.model,
        forms=frozenset(asked.embedding_types or ["float"]),
        dimensions=asked.output_dimension,
        most_tokens=most,
        prompt_name=asked.input_type,
    )


def _cohere_inputs(asked: CohereBody) -> tuple[Text, ...]:
    given = [name for name in _COHERE_INPUTS if getattr(asked, name) is not None]
    if len(given) != 1:
        named = ", ".join(given) or "none"
        sentence = f"one of texts, images and inputs is read, and there is {named}"
        raise RequestError(sentence, param=given[0] if given else "texts")
    if asked.texts is not None:
        return read_inputs(asked.texts, "texts")
    if asked.images is not None:
        return read_images(asked.images, "images")
    return read_contents(asked.inputs or [], "inputs")


def _openai(
    body: bytes, kind: type[EmbeddingsBody], chat: type[EmbeddingsChatBody]
) -> EmbedRequest:
    fields = parse_object(body)
    is_chat = fields.get("messages") is not None
    both = kind if not is_chat else chat
    refuse_unsupported(fields, both.__struct_fields__, NEUTRAL)
    asked = convert(fields, both)
    modality, inputs = None, tuple[Text, ...]()
    if isinstance(asked, EmbeddingsChatBody):
        inputs = read_messages(asked.messages)
    else:
        inputs, modality = read_inputs(asked.input, "input"), asked.modality
    return EmbedRequest(
        inputs=inputs,
        modality=modality,
        is_chat=is_chat,
        model=asked.model,
        forms=frozenset([asked.encoding_format or "float"]),
        dimensions=asked.dimensions,
        most_tokens=asked.truncate_prompt_tokens,
        add_special_tokens=asked.add_special_tokens is not False,
        prompt_name=asked.prompt_name,
    )


EMBEDDINGS = Operation(
    "POST",
    "/v1/embeddings",
    "A vector for each text or image.",
    EmbeddingsReply,
    bodies=((EmbeddingsBody,), (EmbeddingsChatBody,)),
    neutral=NEUTRAL,
    errors=WORK_ERRORS,
    example={"input": ["one text", "another text"]},
    counting=Counting(("input",)),
)
POOLING = Operation(
    "POST",
    "/pooling",
    "A vector for each text or image, in vLLM's form.",
    PoolingReply,
    bodies=((PoolingBody,), (PoolingChatBody,)),
    neutral=NEUTRAL,
    errors=WORK_ERRORS,
    example={"input": "one text"},
    counting=Counting(("input",)),
)
EMBED = Operation(
    "POST",
    "/embed",
    "A vector for each text or image, in text-embeddings-inference's form.",
    Vectors,
    bodies=((EmbedBody,),),
    neutral={"truncation_direction": _RIGHT},
    errors=WORK_ERRORS,
    example={"inputs": ["one text", "another text"]},
    counting=Counting(("inputs",)),
)
COHERE = Operation(
    "POST",
    "/v2/embed",
    "A vector for each text or image, in Cohere's form.",
    CohereReply,
    bodies=((CohereBody,),),
    neutral=dict.fromkeys(_COHERE_ONLY, (None,)),
    errors=WORK_ERRORS,
    example={"texts": ["one text"], "input_type": "query"},
    counting=Counting(_COHERE_INPUTS),
)
OPERATIONS = (EMBEDDINGS, POOLING, EMBED, COHERE)
