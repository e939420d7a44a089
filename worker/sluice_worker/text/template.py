"""A model's chat template: messages in, the text of a prompt out. Pure but for the date.

A template comes with a checkpoint, so it runs in jinja's sandbox, with the names and the whitespace
rules of transformers. Only the template itself writes control tokens. The same characters in a
user's text are wrapped in markers here, and stay text (see `Tokenizer.encode_rendered`).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from sluice_core.errors import RequestError, UnsupportedParameter
from sluice_frontend.api.chat import Arguments, Conversation

from .contents import (
    CLOSE,
    END,
    OPEN,
    SYSTEM,
    Marked,
    Parts,
    TemplateMessage,
    Text,
    changed,
    other_form,
    shapes,
    with_one_system,
    without_system,
)

_TAG = re.compile(f"{END}([0-9]+){END}")
_MARKERS = re.compile(f"[{OPEN}{CLOSE}{END}]")
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")
_NOT_ASCII = re.compile(f"[^\x00-\x7f{OPEN}{CLOSE}{END}]")

MAX_REASON = 400
"""Characters of an error's sentence: a template may put a whole message into it."""
Pieces = list[tuple[str, bool]]
"""A rendered prompt: texts, each with True if it is a user's, in which no control token counts."""


class ChatTemplate:
    """One compiled template; rendering changes nothing in it, so threads may share it.

    `special_tokens`: the names that templates know (bos_token, ...), as text; `control_tokens`: the
    texts that the tokenizer reads as control tokens. Raises jinja2.TemplateError.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        control_tokens: Collection[str],
    ) -> None:
        environment = _Sandbox()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._control = any_of(control_tokens)
        self._begun = frozenset(t[:end] for t in control_tokens for end in range(1, len(t)))
        self._longest = max(map(len, control_tokens), default=0)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        self._knows_developer = "'developer'" in source or '"developer"' in source

    def render(self, conversation: Conversation, now: datetime) -> Pieces:
        """The prompt's text in pieces. Raises RequestError: with the template's own sentence if it
        refuses, and for a text that it does not show (see `_fitting`)."""
        self._check_read(conversation)
        names = {
            **self._special_tokens,
            **self._marked(dict(conversation.variables)),
            "tools": self._marked(_or_none(conversation.tools)),
            "documents": self._marked(_or_none(conversation.documents)),
            "add_generation_prompt": conversation.add_generation_prompt,
            "strftime_now": now.strftime,
        }
        if conversation.reasoning_effort is not None:  # templates test if it is defined
            names["reasoning_effort"] = self._marked(conversation.reasoning_effort)
            names.setdefault("enable_thinking", conversation.reasoning_effort != "none")  # as vLLM
        messages = self._fitting([self._marked(each) for each in conversation.messages], names)
        if not conversation.continue_final_message:
            return _pieces(self._written(messages, names))
        messages[-1] = _with_end(messages[-1])
        return _pieces(_cut_at_end(self._written(messages, names)))

    def _written(self, messages: list[TemplateMessage], names: Mapping[str, Any]) -> str:
        """The template's output, markers included."""
        try:
            return self._template.render({**names, "messages": messages})
        except Exception as error:  # a template's expression can raise whatever Python can
            does = "refuses" if isinstance(error, TemplateError) else "cannot render these messages"
            reason = _MARKERS.sub("", _TAG.sub("", str(error)))[:MAX_REASON]
            raise RequestError(f"the chat template {does}: {reason}", param="messages") from error

    def _fitting(
        self, messages: list[TemplateMessage], names: Mapping[str, Any]
    ) -> list[TemplateMessage]:
        """`messages` in the first form in which the template shows the text of each.

        Contents are tried as they came, as texts and as parts. A dropped system text moves to the
        front, or else to the next user's message. Raises RequestError for a text that no form
        shows. An assistant's text beside tool calls may be missing: 19 of 135 public templates drop
        it on purpose (Llama 3's, Hermes', Mistral's). Its reasoning may be missing too.
        """
        problems: list[RequestError] = []
        for arranged in self._arrangements(messages):
            dropped: set[str] = set()
            for shaped in shapes(arranged):
                try:
                    fitting, lost = self._repaired(shaped, names)
                except RequestError as error:
                    problems.append(error)
                    continue
                if not lost:
                    return fitting
                dropped |= {arranged[at]["role"] for at in lost}
                problems.append(_not_shown(arranged[min(lost)], messages))
            if dropped.isdisjoint(SYSTEM):
                break
        raise max(problems, key=_tells)

    def _arrangements(self, messages: list[TemplateMessage]) -> Iterator[list[TemplateMessage]]:
        """The messages, with one system in front of them, and without one."""
        roles = {message["role"] for message in messages}
        if self._knows_developer or "developer" not in roles:
            yield messages
        one = with_one_system(messages)
        if one != messages:
            yield one
        yield without_system(one)

    def _repaired(
        self, messages: list[TemplateMessage], names: Mapping[str, Any]
    ) -> tuple[list[TemplateMessage], set[int]]:
        """`messages`, and the places of those that still lose a text that must be shown. Messages
        that lose text take their other form if that helps."""
        lost = self._lost(messages, names)
        if lost:
            other = [other_form(each) if at in lost else each for at, each in enumerate(messages)]
            with suppress(RequestError):
                if len(still := self._lost(other, names)) < len(lost):
                    messages, lost = other, still
        return messages, {at for at in lost if not messages[at].get("tool_calls")}

    def _lost(self, messages: list[TemplateMessage], names: Mapping[str, Any]) -> set[int]:
        """The places of messages with a text whose end the template does not write.

        Each text gets a unique tag behind it. Searching the text itself would fail: a short one may
        occur elsewhere, and templates trim texts, cut reasoning off, or write JSON.
        """
        owners: list[int] = []

        def tagged(text: str, at: int) -> str:
            if not text:
                return text
            owners.append(at)
            return Text(f"{text}{END}{len(owners) - 1}{END}")

        each = [changed(message, partial(tagged, at=at)) for at, message in enumerate(messages)]
        shown = {int(tag) for tag in _TAG.findall(self._written(each, names))}
        return {at for tag, at in enumerate(owners) if tag not in shown}

    def _check_read(self, conversation: Conversation) -> None:
        """Refuse texts that the template never reads: they would be lost in silence."""
        for name in ("tools", "documents"):
            if getattr(conversation, name) and name not in self.variables:
                raise UnsupportedParameter(
                    f"the chat template of this model does not read {name}", param=name
                )

    def _marked(self, value: Any) -> Any:
        """`value` with each control token in its texts between markers."""
        match value:
            case str():
                if found := _MARKERS.search(value):
                    raise RequestError(
                        f"messages: U+{ord(found[0]):X} is no character", param="messages"
                    )
                marked = self._control.sub(f"{OPEN}\\g<0>{CLOSE}", value)
                return Marked(self._mark_begun(marked))
            case Arguments():
                return Arguments(self._marked(dict(value)), self._marked(str(value)))
            case dict():
                return {self._marked(key): self._marked(item) for key, item in value.items()}
            case list() | tuple():
                return [self._marked(item) for item in value]
        return value

    def _mark_begun(self, text: str) -> str:
        """The same, also with markers around an end that begins a control token: the template's
        next text may complete it, trimmed or not."""
        body = text.rstrip()
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._begun:
                return f"{body[:-length]}{OPEN}{body[-length:]}{CLOSE}{text[len(body) :]}"
        return text


def _tells(problem: RequestError) -> int:
    """Rank of how much an error says to the client: most for a lost text, then the template's own
    sentence. An error that a wrong form of the contents may cause says least."""
    return 2 if problem.__cause__ is None else int(type(problem.__cause__) is TemplateError)


def _not_shown(message: TemplateMessage, messages: Sequence[TemplateMessage]) -> RequestError:
    """`message` is one of `messages`, or made from their system messages."""
    places = [at for at, each in enumerate(messages) if each is message]
    places += [at for at, each in enumerate(messages) if each["role"] in SYSTEM]
    return RequestError(
        f"messages[{places[0]}].content does not appear in the prompt that the model's chat "
        "template renders",
        param="messages",
    )


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of `texts` at each place, fast for any number of texts. As
    one alternation, a thousand control tokens took 64 s for 4 MB of "<"."""
    return re.compile(_branches(sorted({text for text in texts if text})) or "(?!)")


def _branches(texts: Sequence[str]) -> str:
    """A pattern of sorted `texts`: their common beginning, then a branch for each character."""
    head = commonprefix(texts)
    rests = [text[len(head) :] for text in texts]
    longer = groupby(filter(None, rests), itemgetter(0))
    tails = "|".join(_branches(list(group)) for _, group in longer)
    if not tails:
        return re.escape(head)
    return f"{re.escape(head)}(?:{tails}){'' if all(rests) else '?'}"


def _or_none(values: tuple[dict[str, Any], ...]) -> list[dict[str, Any]] | None:
    """None for an empty list: templates test `if tools`, and some `is none`."""
    return list(values) or None


def _with_end(message: TemplateMessage) -> TemplateMessage:
    """The message with an end marker behind its text, and a space that shows trimming."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": Marked(f"{content}{END} ")}
    *parts, last = content
    parts.append({**last, "text": Marked(f"{last['text']}{END} ")})
    return {**message, "content": Parts(parts)}


def _cut_at_end(text: str) -> str:
    """The text before the end marker, trimmed if the template trims other messages."""
    head, found, tail = text.rpartition(END)
    if not found:
        raise RequestError(
            "the chat template drops the final message, so it cannot be continued",
            param="continue_final_message",
        )
    head = head.replace(END, "")
    return head if tail.startswith(" ") else head.rstrip()


def _pieces(text: str) -> Pieces:
    """Cut at markers. A template may have cut a pair apart; a lone one is dropped."""
    pieces: Pieces = []
    start = 0
    for found in _MARKED.finditer(text):
        pieces.append((text[start : found.start()], False))
        pieces.append((found[1] or "", True))
        start = found.end()
    pieces.append((text[start:], False))
    return [(piece, is_plain) for piece, is_plain in pieces if piece]


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox with the names that chat templates use, and no others."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = partial(dict)  # a call, and not the type with its attributes
        del self.globals["lipsum"]


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, in a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja's namespace, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON (jinja's own filter escapes HTML); markers stay markers in every case."""
    if isinstance(value, Parts):
        return str(value)
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
