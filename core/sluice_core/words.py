"""Texts of others lose their control characters here, and nowhere else. Pure.

A terminal obeys ESC; U+202E turns the rest of a line around; U+2028 or a line feed makes one line
two; a tag or a zero-width character hides words. None of them is printable by Unicode's categories,
as `str.isprintable` reads them. So there is no list of such characters to keep.
"""

from typing import Any

MAX_WORDS = 1 << 14
"""Characters of one sentence, if nothing asks for less."""


def clean(text: str, most: int = MAX_WORDS) -> str:
    """The first `most` characters of `text` in one line: white space is a blank, and what cannot be
    printed is written as an escape, as `\\x1b`."""
    text = text[:most]
    if text.isprintable():
        return text
    return "".join(map(_shown, text))[:most]


def _shown(char: str) -> str:
    if char.isprintable():
        return char
    return " " if char.isspace() else char.encode("unicode_escape").decode()


def clean_all(value: Any, most: int = MAX_WORDS) -> Any:
    """`value`, of JSON's types, with each text in it cleaned, keys too."""
    if isinstance(value, str):
        return clean(value, most)
    if isinstance(value, dict):
        return {clean(str(key), most): clean_all(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean_all(item, most) for item in value]
    return value


def in_url(host: str) -> str:
    """Return `host` as URLs have it: an IPv6 address between brackets."""
    return f"[{host}]" if ":" in host else host
