"""POST /v1/decisions: the model's next token tells the probabilities of a question's labels.

All questions of a request go to the engine at once. They begin alike, so the first one computes the
input, and the others find it in the cache.
"""

import time
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from math import exp
from typing import NamedTuple

from sluice_core.errors import RequestError
from sluice_core.work import Sampling
from sluice_frontend.api.decisions import (
    DECISIONS,
    Decisions,
    DecisionsReply,
    DecisionsUsage,
    InputDetails,
    OutputDetails,
    Question,
    answered,
    labels_of,
)
from sluice_frontend.api.fit import check_length
from sluice_frontend.api.generate import Completion
from sluice_frontend.api.operations import BoundOperation
from sluice_frontend.api.sampling_params import SamplingParams
from sluice_frontend.api.sse import encode
from starlette.requests import Request
from starlette.responses import Response

from ..api.generation import Generation, OpenChoice
from ..api.reading import read_decisions
from ..api.service import Service
from ..api.stream import WholeReply
from ..text.template import Pieces
from .generate import with_headers

BYTES_PER_QUESTION = 8192
"""Most of an answer: fifty values and their probabilities."""


class Labels(NamedTuple):
    """The token ids of each label of one question: with a space before it, and without."""

    ids: tuple[tuple[int, ...], ...]

    def probabilities(self, logprobs: dict[int, float]) -> list[float]:
        """Of the labels, which add up to 1."""
        shares = [sum(exp(logprobs[i]) for i in ids) for ids in self.ids]
        total = sum(shares)
        return [share / total if total else 1 / len(shares) for share in shares]


def served(service: Service) -> list[BoundOperation]:
    """Bind the route, if the model writes text."""
    if service.task != "generate":
        return []
    return [BoundOperation(DECISIONS, partial(_decide, service))]


async def _decide(service: Service, request: Request) -> Response:
    async with service.bodies.read(request, service.admission.refusal_of(request.headers)) as body:
        arrival_s = time.monotonic()
        async with service.turn(len(body)):
            asked, pieces = await service.read(body, read_decisions, service.templates)
            service.admission.check_model(asked.model)
            work = partial(_read, service, asked, pieces)
            labels, prompts = await service.texts.result(len(body), work)
            told = with_headers(_completion(asked, labels, prompts), request)
            generation = await service.open(told, arrival_s, "decision")
    form = DecisionsForm(generation, service, asked.questions, labels)
    return WholeReply(form, service.answers)


def _read(
    service: Service, asked: Decisions, pieces: Sequence[Pieces]
) -> tuple[list[Labels], Sequence[Sequence[int]]]:
    """The labels of each question, and its prompt."""
    texts = [labels_of(question) or "" for question in asked.questions]
    labels = {text: _labels(service, text) for text in dict.fromkeys(texts)}
    window = service.runtime.limits().max_model_len
    check = partial(check_length, window=window, field="input")
    prompts = [array("i", service.tokenizer.encode_rendered(each, check)) for each in pieces]
    return [labels[text] for text in texts], prompts


def _labels(service: Service, labels: str) -> Labels:
    """Raises RequestError if a label is not one token of this model, or two are the same."""
    found = []
    for label in labels:
        spelled = (
            service.tokenizer.encode(text, add_special_tokens=False) for text in _ways(label)
        )
        found.append(tuple(dict.fromkeys(ids[0] for ids in spelled if len(ids) == 1)))
    known = [token_id for ids in found for token_id in ids]
    if not all(found) or len(set(known)) < len(known):
        raise RequestError(
            "this model has no token of its own for each letter or digit", param="questions"
        )
    return Labels(tuple(found))


def _ways(label: str) -> tuple[str, str]:
    return label, f" {label}"


def _completion(
    asked: Decisions, labels: Sequence[Labels], prompts: Sequence[Sequence[int]]
) -> Completion:
    """One token for each question, with the log-probabilities of all labels."""
    ids = dict.fromkeys(i for one in labels for way in one.ids for i in way)
    return Completion(
        prompts=tuple(prompts),
        prompt_field="input",
        length_field="questions",
        max_tokens=1,
        has_default_length=False,
        sampling=SamplingParams(Sampling(label_ids=tuple(ids)), temperature=0.0, ignore_eos=True),
        model=asked.model,
        cache_salt=asked.cache_key,
    )


class DecisionsForm:
    """The answers in one piece (`stream.Whole`)."""

    def __init__(
        self,
        generation: Generation,
        service: Service,
        questions: Sequence[Question],
        labels: Sequence[Labels],
    ) -> None:
        self.generation, self._model = generation, service.config.model_name
        self._questions, self._labels = questions, labels

    def num_bytes(self, prompts: Iterable[OpenChoice], num_tokens: int) -> int:
        """Approximate bytes of the answer."""
        return BYTES_PER_QUESTION * num_tokens

    def body(self, texts: Sequence[str]) -> bytes:
        """All answers, in the order of their questions."""
        choices, counts = self.generation.choices, self.generation.counts()
        answers = [
            answered(question, labels.probabilities(choice.scored.labels))
            for question, labels, choice in zip(self._questions, self._labels, choices, strict=True)
        ]
        cached = sum(choice.cached_tokens for choice in choices)
        num_input, num_output = counts.prompt_tokens, counts.completion_tokens
        usage = DecisionsUsage(
            num_input, InputDetails(cached), num_output, OutputDetails(), num_input + num_output
        )
        return encode(DecisionsReply(answers, self._model, usage))
