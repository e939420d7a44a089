"""Inputs that nothing is written to: those that get vectors, classes or scores. Pure."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct
from sluice_core.errors import RequestError

from ..generate import IDS
from ..json_body import convert
from ..sampling_params import TokenId

MAX_INPUTS = 2048
"""Texts of one request, as OpenAI has it."""
MAX_IMAGES = 128
"""Images of one request: as pixels they take more than in its body."""
_TEXT = {"type": "string", "minLength": 1}
Inputs = Annotated[
    str | list[Any],
    Meta(
        extra_json_schema={
            "anyOf": [
                _TEXT,
                IDS,
                *({"type": "array", "minItems": 1, "items": kind} for kind in (_TEXT, IDS)),
            ]
        }
    ),
]
Truncate = Annotated[int, Meta(ge=-1, le=2**31 - 1)]


class Pair(NamedTuple):
    """Two texts that are read as one, such as a query and a document."""

    first: str
    second: str


class Image(NamedTuple):
    """An image: base64 of its file."""

    data: str


Text = str | Sequence[int] | Pair | Image
"""A text, its token ids, a pair of texts, or an image."""
Modality = Literal["text", "image"]


class TextsUsage(Struct, frozen=True):
    """Token counts of a whole request."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsRequest:
    """Texts and images to read. `most_tokens`: of each text, None for an error if it is longer than
    the model reads, -1 for that length. `prompt_name`: of the model's prompts. `modality`: of
    inputs that are texts, None if each says what it is. `is_chat`: they came as messages."""

    inputs: tuple[Text, ...]
    model: str | None = None
    most_tokens: int | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None
    modality: Modality | None = None
    is_chat: bool = False


def read_inputs(given: str | list[Any], field: str) -> tuple[str | Sequence[int], ...]:
    """A text, token ids, or a list of either; raises RequestError."""
    if isinstance(given, str):
        return (text(given, field),)
    if not given:
        raise RequestError(f"{field} is empty", param=field)
    if isinstance(given[0], int):
        return (_ids(given, field),)
    if len(given) > MAX_INPUTS:
        raise RequestError(
            f"{field} has {len(given)} texts; one request may have {MAX_INPUTS}", param=field
        )
    return tuple(
        text(each, field) if isinstance(each, str) else _ids(each, field) for each in given
    )


def text(given: str, field: str) -> str:
    """`given`, which must not be empty; raises RequestError."""
    if not given:
        raise RequestError(f"{field} has an empty text", param=field)
    return given


def _ids(given: Any, field: str) -> Sequence[int]:
    if not given:
        raise RequestError(f"{field} has a text without tokens", param=field)
    return array("i", convert(given, list[TokenId], field))
