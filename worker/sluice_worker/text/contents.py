"""Forms of a chat's contents, and places of its system messages, that templates expect. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SYSTEM = ("system", "developer")
TemplateMessage = dict[str, Any]
"""A message with `content`: a text, or a list of text parts that is not empty."""


# Noncharacters, which Unicode reserves for such use: a text that holds one is refused.
OPEN, CLOSE, END = "\ufdd0", "\ufdd1", "\ufdd2"
_ESCAPED = re.compile(r"\\(?:(ufdd[012])|.)")


class Marked(str):
    """A text that keeps its markers when a template prints a list or an object with it. Python
    escapes markers there, so a control token in the text would take effect."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _ESCAPED.sub(
            lambda found: chr(int(found[1][1:], 16)) if found[1] else found[0], super().__repr__()
        )


class Text(Marked):
    """A text that cannot be iterated: a template that loops expects parts, and may take seconds."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        return iter(())


class Parts(list[TemplateMessage]):
    """A content as parts. Printing it whole is an error: that template expects a text."""

    __slots__ = ()

    def __str__(self) -> str:
        raise TypeError("a list of parts is no text")


def shapes(messages: list[TemplateMessage]) -> Iterator[list[TemplateMessage]]:
    """Contents as they came, all as texts, all as parts.

    A tool's content is tried as a text first, as in vLLM: most templates expect only that.
    """
    given = [_as_text(each) if each["role"] == "tool" else changed(each) for each in messages]
    yield given
    texts = [_as_text(each) for each in messages]
    if texts != given:
        yield texts
    yield [_as_text(each) if each["role"] == "tool" else _as_parts(each) for each in messages]


def changed(message: TemplateMessage, change: Callable[[str], str] = Marked) -> TemplateMessage:
    """A copy with each text of its content changed."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": change(content)}
    parts = Parts({**part, "text": change(part["text"])} for part in content)
    return {**message, "content": parts}


def _as_text(message: TemplateMessage) -> TemplateMessage:
    return {**message, "content": _joined(message["content"])}


def _as_parts(message: TemplateMessage) -> TemplateMessage:
    """All in one part: some templates read only the first part."""
    part = {"type": "text", "text": _joined(message["content"])}
    return {**message, "content": Parts([part])}


def other_form(message: TemplateMessage) -> TemplateMessage:
    return (_as_parts if isinstance(message["content"], str) else _as_text)(message)


def with_one_system(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Developer messages become system messages, and all of these one message at the front, as in
    vLLM: many templates know no other form."""
    first = [{**message, "role": "system"} for message in messages if message["role"] in SYSTEM]
    if len(first) > 1:
        texts = (_joined(message["content"]) for message in first)
        first = [{"role": "system", "content": Marked("\n\n".join(filter(None, texts)))}]
    return [*first, *(message for message in messages if message["role"] not in SYSTEM)]


def without_system(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The system's text moves in front of the next user's, as in llama.cpp. Some templates never
    show a system message, or not before a final tool message (Mistral's)."""
    kept: list[TemplateMessage] = []
    texts: list[str] = []
    for message in messages:
        if message["role"] == "system":
            texts.append(_joined(message["content"]))
        elif message["role"] == "user" and texts:
            both = Marked("\n\n".join([*texts, _joined(message["content"])]))
            kept.append({**message, "content": both})
            texts = []
        else:
            kept.append(message)
    return list(messages) if texts else kept


def _joined(content: str | list[TemplateMessage]) -> str:
    if isinstance(content, str):
        return content
    return Marked("\n".join(part["text"] for part in content))
