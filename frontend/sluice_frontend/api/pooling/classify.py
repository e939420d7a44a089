"""Texts, pairs and images that get classes or scores: the bodies of their routes, parsed. Pure."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from sluice_core.errors import RequestError

from ..generate import ModelName, refuse_unsupported
from ..json_body import convert, parse_object
from ..operations import WORK_ERRORS, Counting, Operation
from .images import Messages, read_messages
from .texts import (
    MAX_INPUTS,
    Inputs,
    Pair,
    Text,
    TextsRequest,
    TextsUsage,
    Truncate,
    read_inputs,
    text,
)

Texts = Annotated[str | list[Any], Meta(description="A text, or a list of texts.")]
MAX_LABELS = 256
TEMPLATE = "This is a photo of {}."
"""As in transformers' pipeline."""
Label = Annotated[str, Meta(min_length=1, max_length=1024)]
TopN = Annotated[int, Meta(ge=0, le=MAX_INPUTS)]
NEUTRAL: dict[str, tuple[object, ...]] = {
    "instruction": (None, ""),
    "max_tokens_per_doc": (None, 0),
    "max_tokens_per_query": (None, 0),
    "truncation_direction": (None, "right", "Right"),
    "truncation_side": (None, "right"),
}
"""Values of known parameters that are not built, which ask for what is done anyway."""
_SIDES = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)


class ClassifyFields(Struct, frozen=True, kw_only=True):
    """The fields of POST /classify that are honoured, but for the inputs: vLLM's.

    `use_activation`: probabilities, as the model's files have them; false for what the model gives.
    `labels`: classes for a model of images and texts; each is put in the `hypothesis_template`.
    """

    model: ModelName | None = None
    truncate_prompt_tokens: Truncate | None = None
    add_special_tokens: bool | None = True
    use_activation: bool | None = None
    labels: Annotated[list[Label], Meta(min_length=1, max_length=MAX_LABELS)] | None = None
    hypothesis_template: Annotated[str, Meta(max_length=1024)] | None = None


class ClassifyBody(ClassifyFields, frozen=True, kw_only=True):
    """With texts, or images as base64 or data URLs."""

    input: Inputs


class ClassifyChatBody(ClassifyFields, frozen=True, kw_only=True):
    """With texts and images in messages."""

    messages: Messages


class ClassProbabilities(Struct, frozen=True, kw_only=True):
    """The classes of one text. `label`: of the most probable one."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(Struct, frozen=True, kw_only=True):
    """The classes in the order of their texts."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassProbabilities]
    usage: TextsUsage


class PredictBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /predict that are honoured: text-embeddings-inference's. `inputs`: a text,
    a pair of texts, or a list of lists of one or two."""

    inputs: Texts
    raw_scores: bool | None = False
    truncate: bool | None = None


class Prediction(Struct, frozen=True):
    """A class of one text."""

    score: float
    label: str


Predictions = Annotated[
    list[Prediction | list[Prediction]], Meta(description="Classes, the best first.")
]


class ScoreBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /v1/score that are honoured: vLLM's. Two of the sides are given: texts of
    one for one, or one text for all of the other."""

    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    model: ModelName | None = None
    truncate_prompt_tokens: Truncate | None = None
    use_activation: bool | None = None


class Score(Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(Struct, frozen=True, kw_only=True):
    """The scores in the order of their pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: TextsUsage


class RerankBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /v1/rerank that are honoured: Jina's, Cohere's and vLLM's. `top_n`: most
    results, 0 for all."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[Any], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: ModelName | None = None
    top_n: TopN | None = None
    return_documents: bool | None = False
    truncate_prompt_tokens: Truncate | None = None


class RankedDocument(Struct, frozen=True):
    """A document's text."""

    text: str


class Ranked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document's relevance, 0 to 1."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankReply(Struct, frozen=True, kw_only=True):
    """The documents, the most relevant first."""

    id: str
    model: str
    usage: TextsUsage
    results: list[Ranked]


class RankBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /rerank that are honoured where `texts` is there:
    text-embeddings-inference's."""

    query: Annotated[str, Meta(min_length=1)]
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: bool | None = False
    return_text: bool | None = False
    truncate: bool | None = None


class Rank(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One text's score."""

    index: int
    score: float
    text: str | None = None


Ranks = Annotated[list[Rank], Meta(description="The texts, the most relevant first.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyRequest(TextsRequest):
    """Texts or pairs to judge. `is_raw`: what the model gives, without its activation. `is_single`:
    one was sent, not a list of one. `most_results`, `with_texts`: of an answer that ranks.
    `is_bare`: that answer is a list. `labels`: classes that the client names, and `captions`, which
    are read in their place."""

    labels: tuple[str, ...] = ()
    captions: tuple[str, ...] = ()
    is_raw: bool = False
    is_single: bool = False
    most_results: int | None = None
    with_texts: bool = False
    is_bare: bool = False


def parse_classify(body: bytes) -> ClassifyRequest:
    """The request in the body of POST /classify; raises RequestError naming the field."""
    fields = parse_object(body)
    is_chat = fields.get("messages") is not None
    kind: type[ClassifyBody] | type[ClassifyChatBody] = (
        ClassifyChatBody if is_chat else ClassifyBody
    )
    refuse_unsupported(fields, kind.__struct_fields__, NEUTRAL)
    asked = convert(fields, kind)
    inputs: tuple[Text, ...]
    if isinstance(asked, ClassifyChatBody):
        inputs = read_messages(asked.messages)
    else:
        inputs = read_inputs(asked.input, "input")
    labels = tuple(asked.labels or ())
    return ClassifyRequest(
        inputs=inputs,
        is_chat=is_chat,
        labels=labels,
        captions=_captions(labels, asked.hypothesis_template),
        model=asked.model,
        most_tokens=asked.truncate_prompt_tokens,
        add_special_tokens=asked.add_special_tokens is not False,
        is_raw=asked.use_activation is False,
    )


def _captions(labels: tuple[str, ...], template: str | None) -> tuple[str, ...]:
    template = TEMPLATE if template is None else template
    if "{}" not in template:
        raise RequestError("hypothesis_template has no {}", param="hypothesis_template")
    return tuple(template.replace("{}", label) for label in labels)


def parse_predict(body: bytes) -> ClassifyRequest:
    """The request in the body of POST /predict; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, PredictBody.__struct_fields__, NEUTRAL)
    asked = convert(fields, PredictBody)
    given = asked.inputs
    is_single = isinstance(given, str) or bool(given and isinstance(given[0], str))
    listed = [given] if is_single else given
    if not listed or len(listed) > MAX_INPUTS:
        sentence = f"inputs has {len(listed)} texts; one request may have 1 to {MAX_INPUTS}"
        raise RequestError(sentence, param="inputs")
    return ClassifyRequest(
        inputs=tuple(_one_or_two(each) for each in listed),
        most_tokens=-1 if asked.truncate else None,
        is_raw=asked.raw_scores is True,
        is_single=is_single,
    )


def parse_score(body: bytes) -> ClassifyRequest:
    """The request in the body of POST /v1/score; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, ScoreBody.__struct_fields__, NEUTRAL)
    asked = convert(fields, ScoreBody)
    for one, other in _SIDES:
        first, second = getattr(asked, one), getattr(asked, other)
        if first is not None and second is not None:
            return ClassifyRequest(
                inputs=_pairs(_texts(first, one), _texts(second, other), one),
                model=asked.model,
                most_tokens=asked.truncate_prompt_tokens,
                is_raw=asked.use_activation is False,
            )
    raise RequestError("queries and documents are missing", param="queries")


def parse_rerank(body: bytes) -> ClassifyRequest:
    """The request in the body of POST /v1/rerank; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, RerankBody.__struct_fields__, NEUTRAL)
    asked = convert(fields, RerankBody)
    documents = [_document(each) for each in asked.documents]
    return ClassifyRequest(
        inputs=tuple(Pair(asked.query, each) for each in documents),
        model=asked.model,
        most_tokens=asked.truncate_prompt_tokens,
        most_results=asked.top_n or None,
        with_texts=asked.return_documents is True,
    )


def parse_rank(body: bytes) -> ClassifyRequest:
    """The request in the body of POST /rerank: `texts` are text-embeddings-inference's. Raises
    RequestError naming the field."""
    fields = parse_object(body)
    if "texts" not in fields:
        return parse_rerank(body)
    refuse_unsupported(fields, RankBody.__struct_fields__, NEUTRAL)
    asked = convert(fields, RankBody)
    return ClassifyRequest(
        inputs=tuple(Pair(asked.query, text(each, "texts")) for each in asked.texts),
        most_tokens=-1 if asked.truncate else None,
        is_raw=asked.raw_scores is True,
        with_texts=asked.return_text is True,
        is_bare=True,
    )


def _one_or_two(given: Any) -> Text:
    listed = [given] if isinstance(given, str) else given
    both = convert(listed, list[str], "inputs")
    if not 1 <= len(both) <= 2:
        raise RequestError("inputs has neither a text nor a pair of texts", param="inputs")
    found = [text(each, "inputs") for each in both]
    return found[0] if len(found) == 1 else Pair(*found)


def _texts(given: str | list[Any], field: str) -> list[str]:
    listed = [given] if isinstance(given, str) else convert(given, list[str], field)
    return [text(each, field) for each in listed]


def _pairs(first: list[str], second: list[str], field: str) -> tuple[Pair, ...]:
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second) or not 0 < len(first) <= MAX_INPUTS:
        raise RequestError(
            f"{field} has {len(first)} texts for {len(second)}: one is for all, or each for one, "
            f"and one request may have {MAX_INPUTS}",
            param=field,
        )
    return tuple(map(Pair, first, second))


def _document(given: Any) -> str:
    """A text, or an object with one."""
    if isinstance(given, dict):
        given = given.get("text")
    if not isinstance(given, str):
        raise RequestError("documents has neither texts nor objects with text", param="documents")
    return text(given, "documents")


_INPUTS = Counting(("input", "inputs"))
_RANKED = Counting(("documents", "texts"))
_SCORED = Counting(("documents", "items", "data_2", "text_2"))
CLASSIFY = Operation(
    "POST",
    "/classify",
    "The classes of each text or image.",
    ClassifyReply,
    bodies=((ClassifyBody,), (ClassifyChatBody,)),
    neutral=NEUTRAL,
    errors=WORK_ERRORS,
    example={"input": ["one text", "another text"]},
    counting=_INPUTS,
)
PREDICT = Operation(
    "POST",
    "/predict",
    "The classes of each text or pair, in text-embeddings-inference's form.",
    Predictions,
    bodies=((PredictBody,),),
    neutral=NEUTRAL,
    errors=WORK_ERRORS,
    example={"inputs": "one text"},
    counting=_INPUTS,
)
SCORES = tuple(
    Operation(
        "POST",
        path,
        "The score of each pair of texts.",
        ScoreReply,
        bodies=((ScoreBody,),),
        neutral=NEUTRAL,
        errors=WORK_ERRORS,
        example={"queries": "a query", "documents": ["one text", "another text"]},
        counting=_SCORED,
    )
    for path in ("/v1/score", "/score")
)
RERANKS = tuple(
    Operation(
        "POST",
        path,
        "Documents by their relevance for a query.",
        RerankReply,
        bodies=((RerankBody,),),
        neutral=NEUTRAL,
        errors=WORK_ERRORS,
        example={"query": "a query", "documents": ["one text", "another text"], "top_n": 1},
        counting=_RANKED,
    )
    for path in ("/v1/rerank", "/v2/rerank")
)
RANK = Operation(
    "POST",
    "/rerank",
    "Documents by their relevance, or `texts` in text-embeddings-inference's form.",
    RerankReply | Ranks,
    bodies=((RerankBody,), (RankBody,)),
    neutral=NEUTRAL,
    errors=WORK_ERRORS,
    example={"query": "a query", "texts": ["one text", "another text"]},
    counting=_RANKED,
)
OPERATIONS = (CLASSIFY, PREDICT, *SCORES, *RERANKS, RANK)
