"""Forms of a chat's contents, and places of its systems, that templates expect. Pure."""

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
    """A text whose markers stay what they are where a template prints a list or an object of it:
    Python escapes them there, and a control token of the text would be read."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _ESCAPED.sub(
            lambda found: chr(int(found[1][1:], 16)) if found[1] else found[0], super().__repr__()
        )


class Text(Marked):
    """A text without characters to loop over: who loops expects parts, and may take seconds."""

    __slots__ = ()

    def __iter__(self) -> Iterator[str]:
        return iter(())


class Parts(list[TemplateMessage]):
    """A content as parts. A template that prints it whole expects a text, so that is an error."""

    __slots__ = ()

    def __str__(self) -> str:
        raise TypeError("a list of parts is no text")


def shapes(messages: list[TemplateMessage]) -> Iterator[list[TemplateMessage]]:
    """Contents as they came, all as texts, all as parts.

    A tool's is a text at first, as in vLLM: most templates expect nothing else of it.
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
    """In one part: some templates read the first part alone."""
    part = {"type": "text", "text": _joined(message["content"])}
    return {**message, "content": Parts([part])}


def other_form(message: TemplateMessage) -> TemplateMessage:
    return (_as_parts if isinstance(message["content"], str) else _as_text)(message)


def with_one_system(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The developer's messages as the system's, and those as one in front of the others, as in
    vLLM: many templates know no more."""
    first = [{**message, "role": "system"} for message in messages if message["role"] in SYSTEM]
    if len(first) > 1:
        texts = (_joined(message["content"]) for message in first)
        first = [{"role": "system", "content": Marked("\n\n".join(filter(None, texts)))}]
    return [*first, *(message for message in messages if message["role"] not in SYSTEM)]


def without_system(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The system's text in front of the next user's, as llama.cpp has it: some templates show a
    system in no conversation, or in none that ends with a tool's message (Mistral's)."""
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
