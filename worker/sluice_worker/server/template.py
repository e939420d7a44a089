"""A model's chat template: messages in, the text of a prompt out. Pure.

A template comes with a checkpoint, so it runs in jinja's sandbox, with the names and the whitespace
rules that transformers gives it. Control tokens are what the template writes: the same characters
in a user's text are wrapped in markers here, and stay text (see `Tokenizer.encode_rendered`).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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

from ..chat import Conversation
from ..errors import RequestError, UnsupportedParameter

# Noncharacters, which Unicode reserves for such use: a text that holds one is refused.
OPEN, CLOSE, END = "\ufdd0", "\ufdd1", "\ufdd2"
_READ_AS = {"reasoning_effort": ("reasoning_effort", "enable_thinking")}
_MARKERS = re.compile(f"[{OPEN}{CLOSE}{END}]")
_MARKED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}|[{OPEN}{CLOSE}]")
_NOT_ASCII = re.compile(f"[^\x00-\x7f{OPEN}{CLOSE}{END}]")

MAX_REASON = 400
"""Characters of an error's sentence: a template may put a whole message into it."""
Pieces = list[tuple[str, bool]]
"""A rendered prompt: texts, and whether each is a user's, in which no control token is read."""


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
        self._form = _content_form(tree)
        self._knows_developer = "'developer'" in source or '"developer"' in source

    def render(self, conversation: Conversation, now: datetime) -> Pieces:
        """The prompt's text in pieces. Raises RequestError with the template's own sentence."""
        self._check_read(conversation)
        given: Sequence[dict[str, Any]] = conversation.messages
        if not self._knows_developer and any(each["role"] == "developer" for each in given):
            given = _with_one_system(given)
        messages = self._marked([self._shaped(message) for message in given])
        if conversation.continue_final_message:
            _mark_end(messages[-1])
        names = {
            **self._special_tokens,
            **self._marked(dict(conversation.variables)),
            "messages": messages,
            "tools": self._marked(_or_none(conversation.tools)),
            "documents": self._marked(_or_none(conversation.documents)),
            "add_generation_prompt": conversation.add_generation_prompt,
            "strftime_now": now.strftime,
        }
        if conversation.reasoning_effort is not None:  # templates ask whether it is defined
            names["reasoning_effort"] = self._marked(conversation.reasoning_effort)
            names.setdefault("enable_thinking", conversation.reasoning_effort != "none")  # as vLLM
        try:
            text = self._template.render(names)
        except TemplateError as error:
            reason = str(error)[:MAX_REASON]
            raise RequestError(f"the chat template refuses: {reason}", param="messages") from error
        except Exception as error:  # a template's expression can raise whatever Python can
            reason = str(error)[:MAX_REASON]
            raise RequestError(
                f"the chat template cannot render these messages: {reason}", param="messages"
            ) from error
        if conversation.continue_final_message:
            text = _cut_at_end(text)
        return _pieces(text)

    def _check_read(self, conversation: Conversation) -> None:
        """What the template never reads would be ignored, so it is refused."""
        given = {name: "chat_template_kwargs" for name in conversation.variables}
        given |= {name: name for name in conversation.fields}
        for name, param in given.items():
            if self.variables.isdisjoint(_READ_AS.get(name, (name,))):
                raise UnsupportedParameter(
                    f"the chat template of this model does not read {name}", param=param
                )

    def _shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy whose content has the form that the template reads: a text, or a list of parts.

        A tool's is a text to all, as in vLLM: most templates expect nothing else of it.
        """
        shaped = dict(message)
        content = shaped.get("content")
        form = "text" if shaped["role"] == "tool" else self._form
        if isinstance(content, list) and form == "text":
            shaped["content"] = _joined(content)
        elif isinstance(content, str) and form == "parts":
            shaped["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list):
            shaped["content"] = [dict(part) for part in content]
        return shaped

    def _marked(self, value: Any) -> Any:
        """`value` with each control token in its texts between markers."""
        match value:
            case str():
                if found := _MARKERS.search(value):
                    raise RequestError(
                        f"messages: U+{ord(found[0]):X} is no character", param="messages"
                    )
                return self._mark_begun(self._control.sub(f"{OPEN}\\g<0>{CLOSE}", value))
            case dict():
                return {self._marked(key): self._marked(item) for key, item in value.items()}
            case list() | tuple():
                return [self._marked(item) for item in value]
        return value

    def _mark_begun(self, text: str) -> str:
        """The same with a control token that its end begins between markers too: a template may
        put a text behind it that goes on with it, trimmed or not."""
        body = text.rstrip()
        for length in range(min(self._longest, len(body)), 0, -1):
            if body[-length:] in self._begun:
                return f"{body[:-length]}{OPEN}{body[-length:]}{CLOSE}{text[len(body) :]}"
        return text


def _with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The developer's messages as the system's, and those as one in front of the others, as in
    vLLM: many templates know no more."""
    roles = ("system", "developer")
    first = [{**message, "role": "system"} for message in messages if message["role"] in roles]
    if len(first) > 1:
        texts = (_joined(message["content"]) for message in first)
        first = [{"role": "system", "content": "\n\n".join(filter(None, texts))}]
    return [*first, *(message for message in messages if message["role"] not in roles)]


def _joined(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def any_of(texts: Collection[str]) -> re.Pattern[str]:
    """What finds the longest of `texts` at each place, however many there are: as one alternation
    a thousand control tokens took 64 s for 4 MB of "<"."""
    return re.compile(_branches(sorted({text for text in texts if text})) or "(?!)")


def _branches(texts: Sequence[str]) -> str:
    """A pattern of sorted `texts`: what all begin with, then a branch for each character."""
    head = commonprefix(texts)
    rests = [text[len(head) :] for text in texts]
    longer = groupby(filter(None, rests), itemgetter(0))
    tails = "|".join(_branches(list(group)) for _, group in longer)
    if not tails:
        return re.escape(head)
    return f"{re.escape(head)}(?:{tails}){'' if all(rests) else '?'}"


def _or_none(values: tuple[dict[str, Any], ...]) -> list[dict[str, Any]] | None:
    """Templates ask `if tools`, and some `is none`."""
    return list(values) or None


def _mark_end(message: dict[str, Any]) -> None:
    """Put the end marker, and a space that shows whether the template trims, behind the text."""
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1]["text"] += END + " "
    elif isinstance(content, str):
        message["content"] = content + END + " "
    else:
        raise RequestError(
            "continue_final_message needs a final message with text", param="continue_final_message"
        )


def _cut_at_end(text: str) -> str:
    """The text before the end marker; trimmed as the template trims other messages."""
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
    """jinja's own, without names that begin with an underscore."""

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
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _content_form(tree: nodes.Template) -> str:
    """What the template takes a message's content for: "text", "parts", or "either".

    Read off the tree: does it loop over `content`, and does it ask whether something is a string?
    """
    names = {"content", *_aliases(tree)}
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return "text"
    asks = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return "either" if asks else "parts"


def _aliases(tree: nodes.Template) -> Iterator[str]:
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, {"content"}):
            yield assign.target.name


def _is_content(node: nodes.Node | None, names: Collection[str]) -> bool:
    """Whether `node` is a message's content, filters (selectattr, ...) looked through."""
    while isinstance(node, nodes.Filter):
        node = node.node
    match node:
        case nodes.Getattr():
            return bool(node.attr == "content")
        case nodes.Getitem(arg=nodes.Const()):
            return bool(node.arg.as_const() == "content")
        case nodes.Name():
            return node.name in names
    return False
