"""Images in a request's body: data URLs, base64, and the contents of messages. Pure.

A URL is never fetched: it would let clients reach what this server reaches.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from sluice_core.errors import RequestError

from ..json_body import convert
from .texts import MAX_INPUTS, Image, text

DATA = "data:image/"
_BASE64 = ";base64"
Messages = Annotated[
    list[Any],
    Meta(min_length=1, description="A conversation, or a list of them: each a text or an image."),
]


class ImageUrl(Struct, frozen=True):
    """Where an image is: in the URL itself."""

    url: str


class ContentPart(Struct, frozen=True):
    """A part of a content: a text or an image."""

    type: str = ""
    text: str | None = None
    image_url: ImageUrl | str | None = None


class Content(Struct, frozen=True):
    """A message, or what has a content."""

    content: str | list[ContentPart]


def is_data_url(given: str) -> bool:
    """True if a text can only be meant as an image."""
    return given[: len(DATA)].lower() == DATA


def read_image(given: str, field: str) -> Image:
    """The image in a data URL, or in base64 alone; raises RequestError."""
    if given[:5].lower() == "data:":
        head, comma, data = given.partition(",")
        if not comma or not is_data_url(head) or not head.lower().endswith(_BASE64):
            raise RequestError(f"{field}: a data URL of an image in base64 is read", param=field)
        return Image(data)
    if "://" in given[:64]:
        raise RequestError(
            f"{field}: an image is sent as base64 or as a data URL; no URL is fetched", param=field
        )
    if not given:
        raise RequestError(f"{field} has an empty image", param=field)
    return Image(given)


def read_images(given: Sequence[str], field: str) -> tuple[Image, ...]:
    """Each of a list of images; raises RequestError."""
    return tuple(read_image(each, field) for each in check_number(given, field))


def read_messages(given: list[Any]) -> tuple[str | Image, ...]:
    """The text or image of each conversation; raises RequestError."""
    listed = given if isinstance(given[0], list) else [given]
    return tuple(
        _only_part(convert(each, list[Content], "messages"), "messages")
        for each in check_number(listed, "messages")
    )


def read_contents(given: list[Any], field: str) -> tuple[str | Image, ...]:
    """The text or image of each object with a content; raises RequestError."""
    contents = [convert(each, Content, field) for each in check_number(given, field)]
    return tuple(_only_part([each], field) for each in contents)


def check_number(given: Sequence[Any], field: str) -> Sequence[Any]:
    """`given`, which must have 1 to MAX_INPUTS inputs; raises RequestError."""
    if not 0 < len(given) <= MAX_INPUTS:
        raise RequestError(
            f"{field} has {len(given)} inputs; one request may have 1 to {MAX_INPUTS}", param=field
        )
    return given


def _only_part(contents: list[Content], field: str) -> str | Image:
    found = [part for each in contents for part in _parts(each, field)]
    if len(found) != 1:
        raise RequestError(
            f"{field} has {len(found)} texts and images where one is read", param=field
        )
    return found[0]


def _parts(content: Content, field: str) -> list[str | Image]:
    if isinstance(content.content, str):
        return [text(content.content, field)]
    return [_part(part, field) for part in content.content]


def _part(part: ContentPart, field: str) -> str | Image:
    url = part.image_url
    if url is not None:
        return read_image(url if isinstance(url, str) else url.url, field)
    if part.text is None:
        raise RequestError(f"{field} has a part that is no text and no image_url", param=field)
    return text(part.text, field)
