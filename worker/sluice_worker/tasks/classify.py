"""Classes of texts and images, scores of pairs: vLLM's, Jina's and text-embeddings-inference's
routes."""

import time
import uuid
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from sluice_core.errors import RequestError
from sluice_core.model.classes import Activation, Classes, sigmoid
from sluice_core.model.images import Similarity
from sluice_core.model.sentence import TokenScore
from sluice_frontend.api.chat import Conversation
from sluice_frontend.api.operations import BoundOperation, Operation
from sluice_frontend.api.pooling import classify
from sluice_frontend.api.pooling.classify import ClassifyRequest
from sluice_frontend.api.pooling.texts import Pair, TextsUsage
from sluice_frontend.api.sse import encode
from starlette.requests import Request
from starlette.responses import Response

from ..api.encoding import FLOAT_BYTES, TextsReply, read_texts, reader_of
from ..api.service import Service
from ..text.pieces import Check
from ..text.texts import TextReader

Parse = Callable[[bytes], ClassifyRequest]
BYTES_PER_CLASS = 96
"""Of an answer: a number and its label."""


class Judged(NamedTuple):
    """The numbers of each text's classes, and their names for the answer."""

    asked: ClassifyRequest
    values: list[list[float]]
    classes: Classes
    num_tokens: int
    model: str

    @property
    def shown(self) -> list[list[float]]:
        """The numbers in the form that was asked for: probabilities, or as the model gives them."""
        if self.asked.is_raw:
            return self.values
        return [self.classes.probabilities(values) for values in self.values]

    @property
    def relevances(self) -> list[float]:
        """One score a pair, 0 to 1: an order among documents needs no other activation."""
        return [values[0] if self.asked.is_raw else sigmoid(values[0]) for values in self.values]

    @property
    def usage(self) -> TextsUsage:
        """The tokens of the whole request."""
        return TextsUsage(self.num_tokens, self.num_tokens)


Form = Callable[[Judged], object]
"""(numbers) -> the answer's body."""


def served(service: Service) -> list[BoundOperation]:
    """Bind the routes, if the model is a classifier. Scores need one number a pair. A model of
    images and texts has the classes that a request names."""
    facts = service.vectors
    if facts is None:
        return []
    if facts.similarity is not None:
        compare = partial(_compare, service, reader_of(service), facts.similarity)
        return [BoundOperation(classify.CLASSIFY, compare)]
    if facts.classes is None:
        return []
    score, classes = facts.token_score, facts.classes
    reader = reader_of(service, None if score is None else partial(_written, service, score))
    scores = len(classes.labels) == 1 and facts.sentence is not None
    return [
        BoundOperation(operation, partial(_judge, service, reader, classes, parse, form))
        for operation, parse, form in ((*_CLASSES, *_SCORES) if scores else _CLASSES)
    ]


def _written(service: Service, score: TokenScore, pair: Pair, check: Check) -> list[int]:
    """A pair as the model's chat template writes it, each text a message of its own."""
    roles = [("system", score.prompt), ("query", pair.first), ("document", pair.second)]
    variables = dict(score.variables)
    conversation = Conversation(
        tuple({"role": role, "content": text} for role, text in roles if text is not None),
        add_generation_prompt=variables.pop("add_generation_prompt", False) is True,
        variables=variables,
    )
    return service.tokenizer.encode_rendered(service.templates.render(conversation), check)


async def _judge(
    service: Service,
    reader: TextReader,
    classes: Classes,
    parse: Parse,
    form: Form,
    request: Request,
) -> Response:
    asked, encoding = await read_texts(service, reader, parse, request, _refuse_labels)

    def body(packed: list[bytes]) -> bytes:
        values = [array("f", numbers).tolist() for numbers in packed]
        model = service.config.model_name
        return encode(form(Judged(asked, values, classes, encoding.num_tokens, model)))

    return TextsReply(encoding, service.answers, BYTES_PER_CLASS, body)


def _refuse_labels(asked: ClassifyRequest) -> None:
    if asked.labels:
        raise RequestError("this model has classes of its own", param="labels")


async def _compare(
    service: Service, reader: TextReader, similarity: Similarity, request: Request
) -> Response:
    """Judge images by labels: each is read as a text beside them."""

    def refuse(asked: ClassifyRequest) -> None:
        if not asked.labels:
            raise RequestError("labels is missing: the classes of this request", param="labels")

    asked, encoding = await read_texts(service, reader, _parse_with_captions, request, refuse)
    activation: Activation = "softmax" if similarity.bias is None else "sigmoid"

    def body(packed: list[bytes]) -> bytes:
        vectors = [array("f", numbers) for numbers in packed]
        images, captions = vectors[: -len(asked.labels)], vectors[-len(asked.labels) :]
        values = [[similarity.of(image, caption) for caption in captions] for image in images]
        classes, model = Classes(asked.labels, activation), service.config.model_name
        return encode(_classes(Judged(asked, values, classes, encoding.num_tokens, model)))

    return TextsReply(encoding, service.answers, FLOAT_BYTES, body)


def _parse_with_captions(body: bytes) -> ClassifyRequest:
    asked = classify.parse_classify(body)
    return replace(asked, inputs=(*asked.inputs, *asked.captions))


def _classes(judged: Judged) -> classify.ClassifyReply:
    labels, rows = judged.classes.labels, judged.shown
    return classify.ClassifyReply(
        id=f"classify-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=judged.model,
        data=[
            classify.ClassProbabilities(
                index=index, label=labels[row.index(max(row))], probs=row, num_classes=len(row)
            )
            for index, row in enumerate(rows)
        ],
        usage=judged.usage,
    )


def _predictions(judged: Judged) -> object:
    labels = judged.classes.labels
    found = [
        sorted(map(classify.Prediction, row, labels), key=lambda one: -one.score)
        for row in judged.shown
    ]
    return found[0] if judged.asked.is_single else found


def _scores(judged: Judged) -> classify.ScoreReply:
    return classify.ScoreReply(
        id=f"score-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=judged.model,
        data=[classify.Score(index=i, score=row[0]) for i, row in enumerate(judged.shown)],
        usage=judged.usage,
    )


def _order(judged: Judged) -> list[tuple[int, float, str | None]]:
    """Number, relevance and text of each document, the most relevant first; text None if it is not
    to be told."""
    asked, scores = judged.asked, judged.relevances
    best = sorted(range(len(scores)), key=lambda number: -scores[number])
    pairs = asked.inputs if asked.with_texts else [None] * len(scores)
    texts = [pair.second if isinstance(pair, Pair) else None for pair in pairs]
    return [(number, scores[number], texts[number]) for number in best[: asked.most_results]]


def _documents(judged: Judged) -> classify.RerankReply:
    return classify.RerankReply(
        id=f"rerank-{uuid.uuid4().hex}",
        model=judged.model,
        usage=judged.usage,
        results=[
            classify.Ranked(
                index=index,
                relevance_score=score,
                document=None if text is None else classify.RankedDocument(text),
            )
            for index, score, text in _order(judged)
        ],
    )


def _ranks(judged: Judged) -> list[classify.Rank]:
    return [classify.Rank(index=i, score=score, text=text) for i, score, text in _order(judged)]


def _ranked(judged: Judged) -> object:
    return _ranks(judged) if judged.asked.is_bare else _documents(judged)


_CLASSES: tuple[tuple[Operation, Parse, Form], ...] = (
    (classify.CLASSIFY, classify.parse_classify, _classes),
    (classify.PREDICT, classify.parse_predict, _predictions),
)
_SCORES: tuple[tuple[Operation, Parse, Form], ...] = (
    *((operation, classify.parse_score, _scores) for operation in classify.SCORES),
    *((operation, classify.parse_rerank, _documents) for operation in classify.RERANKS),
    (classify.RANK, classify.parse_rank, _ranked),
)
