"""A JSON object's members, which no two readers take for different ones. Pure.

Of a name that is given twice some readers take the first value and others the last. Some find a
name in any case, some skip a byte order mark, some stop at the object's end. All that is refused.
Values stay bytes: what is not looked at is not built.
"""

import re
import unicodedata
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from msgspec import Raw
from sluice_core.errors import RequestError

_members = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])
_NAME = re.compile(rb'\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_AFTER = re.compile(rb"\s*[,}]")
NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def members(text: bytes | Raw) -> dict[str, Raw] | None:
    """The members of an object; None if `text` is sound JSON of another kind.

    Raises RequestError for what is no JSON in UTF-8, and for a name that is given twice.
    """
    data = bytes(text)
    try:
        found = _members.decode(data)
    except msgspec.ValidationError:
        return None
    except NO_JSON as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    _check_single(data, found)
    return found


def _check_single(data: bytes, found: Mapping[str, Raw]) -> None:
    """Walk through the object: each member must be the one that `found` has."""
    at, seen = data.index(b"{") + 1, set()
    while match := _NAME.match(data, at):
        name = msgspec.json.decode(match[1])
        value = memoryview(found[name])
        at = match.end() + len(value)
        after = _AFTER.match(data, at)
        if name in seen or after is None or memoryview(data)[match.end() : at] != value:
            raise RequestError(f"the field {name[:64]!a} is given twice", param=name[:64])
        seen.add(name)
        at = after.end()


def check_spelling(names: Collection[str], deciding: Collection[str]) -> None:
    """Raise RequestError for a name that some readers take for one of `deciding`."""
    for name in names:
        if name not in deciding and _folded(name) in deciding:
            raise RequestError(
                f"the field {name[:64]!a} must be spelt {_folded(name)!r}", param=name
            )


def _folded(name: str) -> str:
    """As Go folds names, and more: U+017F is an s, U+212A a k."""
    return unicodedata.normalize("NFKC", name[:64]).casefold()


def items(text: Raw) -> list[Raw] | None:
    """The items of a list; None if it is none."""
    try:
        return _items.decode(text)
    except NO_JSON:
        return None


def first(text: Raw) -> bytes:
    """The first byte, which tells the kind of the value."""
    return bytes(memoryview(text)[:1])


def scalar(text: Raw | None) -> Any:
    """The value of a text, a number, a truth or null; None for lists, objects and what no reader
    takes."""
    if text is None or first(text) in (b"{", b"["):
        return None
    try:
        return msgspec.json.decode(text)
    except NO_JSON:
        return None
