"""POST /v1/decisions: questions about one input, answered by the probabilities of labels. Pure.

Bodies and answers are OpenAI's (openai 3.52). Each option of a question has a letter or a digit,
which the model is asked for. Its probabilities come from the next token alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct
from sluice_core.errors import RequestError

from .chat import MAX_ITEMS, Conversation, parse_conversation
from .generate import ModelName, Name, refuse_unsupported
from .json_body import convert, parse_object
from .operations import WORK_ERRORS, Counting, Operation

MAX_QUESTIONS = 400
Instructions = Annotated[str, Meta(min_length=1)]
NEUTRAL: Mapping[str, tuple[object, ...]] = {"prompt_cache_options": (None,)}


class Predicate(Struct, frozen=True, tag_field="type", tag="predicate"):
    """How likely a statement about the input is true."""

    instructions: Instructions
    name: str | None = None


class ChoiceOption(Struct, frozen=True):
    """One value of a choice, and what it means."""

    value: str | bool
    description: str | None = None


class Choice(Struct, frozen=True, tag_field="type", tag="choice"):
    """Which of some values fits the input."""

    instructions: Instructions
    choices: Annotated[list[ChoiceOption], Meta(min_length=2, max_length=255)]
    name: str | None = None


class Level(Struct, frozen=True):
    """One level of a score, and what it means."""

    label: Annotated[str, Meta(min_length=1)]
    description: str | None = None


class ScoreQuestion(Struct, frozen=True, tag_field="type", tag="score"):
    """On which of some levels, from 0 on, the input is."""

    instructions: Instructions
    levels: Annotated[list[Level], Meta(min_length=2, max_length=10)]
    name: str | None = None


Question = Predicate | Choice | ScoreQuestion


class DecisionsBody(Struct, frozen=True, kw_only=True):
    """The fields of POST /v1/decisions that are honoured. `input`: a text, or messages.
    `prompt_cache_key`: callers of another key share no cached prompt. `safety_identifier`: for a
    provider's records, as `user` elsewhere."""

    input: str | Annotated[list[Any], Meta(min_length=1, max_length=MAX_ITEMS)]
    questions: Annotated[list[Question], Meta(min_length=1, max_length=MAX_QUESTIONS)]
    model: ModelName | None = None
    prompt_cache_key: Name | None = None
    safety_identifier: str | None = None


class PredicateAnswer(Struct, frozen=True, tag_field="type", tag="predicate"):
    """`probability`: that the statement is true."""

    probability: float
    name: str | None


class ValueProbability(Struct, frozen=True):
    """How likely one value is."""

    value: str | bool
    probability: float


class ChoiceAnswer(Struct, frozen=True, tag_field="type", tag="choice"):
    """`choice`: the likeliest value; `confidence`: its probability."""

    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float
    name: str | None


class LevelProbability(Struct, frozen=True):
    """How likely one level is; `value`: its number, from 0 on."""

    value: int
    label: str
    probability: float


class ScoreAnswer(Struct, frozen=True, tag_field="type", tag="score"):
    """`score`: the mean of the levels' numbers; `confidence`: of the likeliest level."""

    score: float
    probabilities: list[LevelProbability]
    confidence: float
    name: str | None


class InputDetails(Struct, frozen=True):
    """Tokens that were computed for an earlier prompt."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, frozen=True):
    """None: nothing is thought."""

    reasoning_tokens: int = 0


class DecisionsUsage(Struct, frozen=True):
    """Tokens of all questions together, each with the whole input."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class DecisionsReply(Struct, frozen=True):
    """The answers in the order of their questions."""

    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    model: str
    usage: DecisionsUsage


@dataclass(frozen=True, slots=True)
class Decisions:
    """The questions, and for each the conversation that asks it."""

    questions: tuple[Question, ...]
    conversations: tuple[Conversation, ...]
    model: str | None
    cache_key: str


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"


def labels_of(question: Question) -> str | None:
    """A letter or digit for each option; None for more options than there are letters."""
    match question:
        case Predicate():
            return LETTERS[:2]
        case Choice(choices=choices):
            return LETTERS[: len(choices)] if len(choices) <= len(LETTERS) else None
        case ScoreQuestion(levels=levels):
            return DIGITS[: len(levels)]


def parse_decisions(body: bytes) -> Decisions:
    """The request in the body of POST /v1/decisions; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, DecisionsBody.__struct_fields__, NEUTRAL)
    asked = convert(fields, DecisionsBody)
    given = asked.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    try:
        conversation = parse_conversation({"messages": given})
    except RequestError as error:
        sentence = error.message.replace("messages", "input", 1)
        raise RequestError(sentence, param="input") from error
    return Decisions(
        tuple(asked.questions),
        tuple(_asking(conversation, _text_of(question)) for question in asked.questions),
        asked.model,
        asked.prompt_cache_key or "",
    )


def _text_of(question: Question) -> str:
    """What the model is asked. Raises RequestError."""
    labels, options = labels_of(question), _options(question)
    if labels is None:
        raise RequestError(
            f"questions: {len(options)} choices; at most {len(LETTERS)} have a letter",
            param="questions",
        )
    if len(set(options)) < len(options):
        raise RequestError("questions: two options are the same", param="questions")
    lines = (f"{label}. {option}" for label, option in zip(labels, options, strict=True))
    kind = "digit" if isinstance(question, ScoreQuestion) else "letter"
    return "\n".join([question.instructions, "", f"Answer with one {kind} only.", *lines])


def _options(question: Question) -> list[str]:
    match question:
        case Predicate():
            return ["Yes", "No"]
        case Choice(choices=choices):
            return [_described(_shown(one.value), one.description) for one in choices]
        case ScoreQuestion(levels=levels):
            return [_described(one.label, one.description) for one in levels]


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else ("true" if value else "false")


def _described(option: str, description: str | None) -> str:
    return f"{option}: {description}" if description else option


def _asking(conversation: Conversation, question: str) -> Conversation:
    """`conversation`, ending in the question. All questions have the same beginning."""
    *before, last = conversation.messages
    if last["role"] != "user":
        before, last = [*before, last], {"role": "user", "content": ""}
    content = last["content"]
    if isinstance(content, str):
        asked: Any = f"{content}\n\n{question}" if content else question
    else:
        asked = [*content, {"type": "text", "text": question}]
    return Conversation((*before, {**last, "content": asked}))


def answered(
    question: Question, probabilities: Sequence[float]
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    """The answer to a question. `probabilities`: of its options, which add up to 1."""
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    match question:
        case Predicate(name=name):
            return PredicateAnswer(probabilities[0], name)
        case Choice(choices=choices, name=name):
            listed = [
                ValueProbability(one.value, share)
                for one, share in zip(choices, probabilities, strict=True)
            ]
            return ChoiceAnswer(choices[best].value, listed, probabilities[best], name)
        case ScoreQuestion(levels=levels, name=name):
            told = [
                LevelProbability(number, level.label, share)
                for number, (level, share) in enumerate(zip(levels, probabilities, strict=True))
            ]
            mean = sum(number * share for number, share in enumerate(probabilities))
            return ScoreAnswer(mean, told, probabilities[best], name)


DECISIONS = Operation(
    "POST",
    "/v1/decisions",
    "Answers to questions about one input, as probabilities.",
    DecisionsReply,
    bodies=((DecisionsBody,),),
    neutral=NEUTRAL,
    errors=WORK_ERRORS,
    example={
        "input": "The parcel came late, and open.",
        "questions": [{"type": "predicate", "instructions": "The customer complains."}],
    },
    counting=Counting(("questions",)),
)
OPERATIONS = (DECISIONS,)
