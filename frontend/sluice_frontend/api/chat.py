"""POST /v1/chat/completions: JSON bytes to a conversation and how to answer it. Pure.

The template shows tools to the model. A call that it writes comes back as text, because calls are
not parsed here. So tool_choice may be none (tools are not shown) or auto.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct
from sluice_core.errors import RequestError, UnsupportedParameter

from . import response_types
from .generate import (
    NEUTRAL,
    AnswerFields,
    Completion,
    Name,
    Tokens,
    answered,
    refuse_streamed_scores,
    refuse_unsupported,
)
from .json_body import convert, parse_object
from .operations import WORK_ERRORS, Counting, Operation
from .sampling_params import OPENAI, Defaults, NumLogprobs, resolve

MAX_ITEMS = 4096
"""Limit of messages, tools, documents, and of parts and calls of one message. All messages together
may have four times as many: templates that join texts in a loop take quadratic time."""
Few = Meta(max_length=MAX_ITEMS)
Nothing = Annotated[list[Any], Meta(max_length=0)] | None


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """One part of a message's content; other kinds (image_url, input_audio) are not built.

    A part whose text is null is left out, as in vLLM.
    """

    text: str | None


class InputTextPart(TextPart, frozen=True, tag="input_text"):
    """What a caller said, as the Responses API calls it."""


class OutputTextPart(TextPart, frozen=True, tag="output_text"):
    """What a model said, as the Responses API calls it."""


class RefusalPart(Struct, frozen=True, tag_field="type", tag="refusal"):
    """What an assistant said in place of an answer: a text to the template."""

    refusal: str | None


class ThinkingPart(Struct, frozen=True, tag_field="type", tag="thinking"):
    """What an assistant thought: a text to the template, as in vLLM."""

    thinking: str | None


Part = TextPart | InputTextPart | OutputTextPart | RefusalPart | ThinkingPart
TEXT_KINDS = tuple(part.__struct_config__.tag for part in get_args(Part))


class FunctionCall(Struct, frozen=True):
    """What an assistant called: a name, and arguments as JSON text or as an object."""

    name: Name
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    """One call in an assistant's message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, frozen=True):
    """One message. Fields not named here reach the template too.

    The last ones are what a reply carries as null or empty: a client may send a reply back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[str | Part], Few] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Few] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing = None


class Function(Struct, frozen=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, frozen=True):
    """A tool as OpenAI's clients send it."""

    type: Literal["function"]
    function: Function


class ConversationFields(Struct, frozen=True, kw_only=True):
    """What a chat template reads: in the bodies of /v1/chat/completions and of /tokenize."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_ITEMS)]
    tools: Annotated[list[Tool], Few] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    documents: Annotated[list[dict[str, Any]], Few] | None = None
    reasoning_effort: Name | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[Name, Any] | None = None


class ChatFields(AnswerFields, frozen=True, kw_only=True):
    """What POST /v1/chat/completions honours beside its ConversationFields."""

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None


CHAT_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL,
    "add_special_tokens": (None, False),
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),  # no call is parsed: at most one is none
    "prediction": (None,),
    "return_prompt_text": (None, False),
    "store": (None, True, False),  # for a provider's dashboard: the answer is the same
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""As NEUTRAL, for chats. Sources: OpenAI's and vLLM's chat body."""


CHAT_FIELDS = frozenset(ConversationFields.__struct_fields__ + ChatFields.__struct_fields__)


class Arguments(dict[str, Any]):
    """A call's arguments: an object, but the client's own text if a template prints or joins it
    (`'```json' + arguments`), as DeepSeek's do."""

    __slots__ = ("_text",)

    def __init__(self, fields: Mapping[str, Any], text: str) -> None:
        super().__init__(fields)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text

    def __getattr__(self, name: str) -> Any:
        """A method of the text, as in `arguments.strip()`; a field of that name wins."""
        if name.startswith("_") or name in self:
            raise AttributeError(name)
        return getattr(self._text, name)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat as its template sees it. `messages`: at least one, as JSON, without null fields.
    `variables`: the caller's chat_template_kwargs."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, Any], ...] = ()
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chat:
    """One validated chat: `completion` lacks its prompt, which a template makes."""

    conversation: Conversation
    completion: Completion


def parse_chat(body: bytes, defaults: Defaults = OPENAI) -> Chat:
    """The chat in the body of POST /v1/chat/completions; raises RequestError naming the field."""
    fields = parse_object(body)
    refuse_unsupported(fields, CHAT_FIELDS, CHAT_NEUTRAL)
    conversation, typed = parse_conversation(fields), convert(fields, ChatFields)
    asked = typed.max_completion_tokens  # the newer name wins, as in vLLM
    asked = typed.max_tokens if asked is None else asked
    max_tokens = defaults.max_new_tokens if asked is None else asked
    if typed.top_logprobs and not typed.logprobs:  # 0 is vLLM's default, and clients send it
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    refuse_streamed_scores(typed.stream, typed.prompt_logprobs)
    sampling = resolve(
        typed,
        max_tokens=max_tokens,
        logprobs=(typed.top_logprobs or 0) if typed.logprobs else None,
        defaults=defaults,
    )
    completion = Completion(
        prompts=(),
        prompt_field="messages",
        length_field="max_tokens"
        if typed.max_completion_tokens is None
        else "max_completion_tokens",
        max_tokens=max_tokens,
        has_default_length=asked is None,
        sampling=sampling,
    )
    return Chat(conversation, answered(completion, typed))


def parse_conversation(fields: Mapping[str, Any]) -> Conversation:
    """The conversation in a body; raises RequestError naming the field."""
    if fields.get("tool_choice") not in (None, "none", "auto"):
        raise UnsupportedParameter(
            "tool_choice other than none and auto is not supported: output is not constrained",
            param="tool_choice",
        )
    _refuse_media(fields.get("messages"))
    typed = convert(fields, ConversationFields)
    _check_total(typed.messages)
    has_prompt = typed.add_generation_prompt
    if typed.continue_final_message and has_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    tools = () if typed.tool_choice == "none" else tuple(fields.get("tools") or ())
    return Conversation(
        messages=tuple(_message(message) for message in fields["messages"]),
        tools=tools,
        documents=tuple(typed.documents or ()),
        reasoning_effort=typed.reasoning_effort,
        add_generation_prompt=not typed.continue_final_message
        if has_prompt is None
        else has_prompt,
        continue_final_message=bool(typed.continue_final_message),
        variables=_variables(typed.chat_template_kwargs or {}),
    )


def _check_total(messages: list[Message]) -> None:
    """Raise for too many parts, or calls, in all messages together."""
    parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    calls = sum(len(message.tool_calls or ()) for message in messages)
    for noun, num in (("parts of contents", parts), ("tool calls", calls)):
        if num > 4 * MAX_ITEMS:
            raise RequestError(
                f"messages: {num} {noun} are over the limit of {4 * MAX_ITEMS} for all together",
                param="messages",
            )


def _variables(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs`; raises for names of the request's own fields."""
    for name in kwargs:
        if name in ConversationFields.__struct_fields__ or name.endswith("_token"):
            raise RequestError(
                f"chat_template_kwargs cannot set {name!r}", param="chat_template_kwargs"
            )
    return kwargs


def _refuse_media(messages: object) -> None:
    """Raise for parts of other kinds; `messages` is not checked yet."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in TEXT_KINDS:
                raise UnsupportedParameter(
                    f"messages: only text parts are supported, and not {json.dumps(kind)[:64]}",
                    param="messages",
                )


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A checked message as templates want it: no nulls, a content, arguments as objects.

    A content is a text or a list of text parts, and a refusal is a part of it. An assistant's
    reasoning gets both its names, as in vLLM: a template reads one of them.
    """
    message = {name: value for name, value in given.items() if value is not None}
    if message.get("name") == "":
        del message["name"]
    thought = message.get("reasoning", message.get("reasoning_content"))
    if message["role"] == "assistant" and thought is not None:
        message["reasoning"] = message["reasoning_content"] = thought
    content = message.get("content") or ""  # templates print a missing one as None
    if refusal := message.pop("refusal", ""):
        parts = [content] if isinstance(content, str) else content
        content = [*filter(None, parts), refusal] if content else refusal
    if not isinstance(content, str):
        parts = map(_part, content)
        content = [part for part in parts if part["text"] is not None] or ""
    message["content"] = content
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _part(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """A checked part as a text part, which all templates know."""
    if isinstance(given, str):
        return {"type": "text", "text": given}
    if (kind := given["type"]) == "text":
        return given
    return {"type": "text", "text": given[kind if kind in ("refusal", "thinking") else "text"]}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A checked call. Arguments that are no object become an empty one: a model wrote them, and all
    later requests of its conversation contain them."""
    given = call["function"].get("arguments") or {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    arguments = Arguments(found if isinstance(found, dict) else {}, text)
    return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}


CHAT = Operation(
    "POST",
    "/v1/chat/completions",
    "The next message of a conversation.",
    response_types.ChatReply,
    bodies=((ConversationFields, ChatFields),),
    neutral=CHAT_NEUTRAL,
    event=response_types.ChatChunk,
    errors=WORK_ERRORS,
    example={
        "messages": [{"role": "user", "content": "def add(a, b):"}],
        "max_completion_tokens": 8,
    },
    counting=Counting(has_n=True),
)
OPERATIONS = (CHAT,)
