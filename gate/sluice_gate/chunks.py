"""Tokens and usage in an engine's answer. Pure.

An event of a stream is one token, unless the events themselves tell how many they bring: vLLM and
SGLang by the usage of each event (`continuous_usage_stats`), vLLM also by its token ids, TGI always
one. Dialects: OpenAI's completions, chats and responses, Ollama's, TGI's, and SGLang's own.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

Framing = Literal["sse", "ndjson", "none"]
"""How events of a streamed answer are told apart; "none" for an answer in one piece."""
Usage = tuple[int, int]
"""Prompt tokens and completion tokens."""


class _Told(Struct, frozen=True):
    """OpenAI's usage, and by other names that of /v1/responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None

    def both(self) -> Usage | None:
        completion = self.completion_tokens or self.output_tokens or 0
        prompt = self.input_tokens if self.prompt_tokens is None else self.prompt_tokens
        if prompt is None:
            return (
                None if self.total_tokens is None else (self.total_tokens - completion, completion)
            )
        return prompt, completion


class _Details(Struct, frozen=True):
    """TGI's; `input_length` only in streams, `prefill` only in answers in one piece."""

    generated_tokens: int = 0
    input_length: int = 0
    prefill: Sequence[Any] = ()

    def both(self) -> Usage:
        return self.input_length or len(self.prefill), self.generated_tokens


class _Answer(Struct, frozen=True):
    """The fields of all dialects that tell the usage."""

    usage: _Told | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    details: _Details | None = None
    meta_info: _Told | None = None

    def both(self) -> Usage | None:
        told = self.usage or self.details or self.meta_info
        if told is not None:
            return told.both()
        if self.prompt_eval_count is None and self.eval_count is None:
            return None
        return self.prompt_eval_count or 0, self.eval_count or 0


class _Delta(Struct, frozen=True):
    role: Any = None
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None

    @property
    def has_content(self) -> bool:
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or self.tool_calls
            or self.refusal
        )


class _Choice(Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: Any = None
    token_ids: list[Any] | None = None

    @property
    def has_token(self) -> bool:
        """A text that is empty, but is neither the first event nor the last, is a token whose
        characters are not yet whole."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        is_other = self.finish_reason is not None or self.delta.role is not None
        return self.delta.has_content or not is_other


class _Message(Struct, frozen=True):
    """Ollama's."""

    content: str = ""
    thinking: str = ""
    tool_calls: Any = None


class _Event(_Answer, frozen=True):
    """The fields of all dialects that tell what an event brings. `response`: Ollama's text, or
    the whole of a response at the end of OpenAI's."""

    choices: list[_Choice] | None = None
    token: Any = None
    generated_text: Any = None
    index: int = 0
    output_ids: list[Any] | None = None
    done: bool | None = None
    response: Any = None
    thinking: str = ""
    message: _Message | str | None = None
    type_: str = field(name="type", default="")
    error: Any = None

    @property
    def failure(self) -> int | None:
        """The status of the error that the event tells, in whatever form; None if it tells none.
        vLLM, SGLang and llama.cpp give it as `code`."""
        if not self.error and self.type_ not in _FAILED:
            return None
        code = self.error.get("code") if isinstance(self.error, dict) else None
        return code if isinstance(code, int) and 400 <= code <= 599 else 500


_events = msgspec.json.Decoder(_Event)
_answers = msgspec.json.Decoder(_Answer)
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_FAILED = ("response.failed", "error")
_UNDONE = ("abort", "error")
"""Finish reasons of an answer that its engine gave up (vLLM's `FINISH_REASON_STRINGS`)."""


class Chunks:
    """One streamed answer. `is_done`: the engine said that it has ended. `usage`: once told.
    `is_exact`: events tell how many tokens each brings. `last_indexes`: the choice of each token
    that the last `feed` brought. `error`: the status of the error that it told, in an answer that
    is a 200."""

    def __init__(self, framing: Framing) -> None:
        self.is_done = False
        self.usage: Usage | None = None
        self.is_exact = False
        self.last_indexes: list[int] = []
        self.error: int | None = None
        self._is_sse = framing == "sse"
        # In a dialect that we do not read; None until the first event decides.
        self._is_foreign: bool | None = True if framing == "none" else None
        self._open: set[int] = set()  # choices without a finish reason
        self._has_finished = False
        self._pending = b""
        self._unit: Literal["ids", "usage", "events"] | None = None  # known from the first token
        self._told: dict[int, int] = defaultdict(int)  # tokens so far, by choice

    def feed(self, data: bytes) -> int:
        """Tokens of the events that ended in these bytes. An event is one line in all dialects."""
        self.last_indexes = []
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            if not self._is_sse:
                self._read(line)
            elif line.startswith(b"data:"):
                self._read(line[5:])
        return len(self.last_indexes)

    def close(self) -> None:
        """No more will come. An event that begins an error or an end may lack its newline."""
        self.feed(b"\n")

    @property
    def is_cut(self) -> bool:
        """True if it may not end here: the dialect's end, or a finish reason for each choice that
        has begun, must have come. An answer in a dialect that we do not read is never cut."""
        has_finished = self._has_finished and not self._open
        return not (self._is_foreign or self.is_done or has_finished)

    def _read(self, text: bytes) -> None:
        try:
            event = _events.decode(text)
        except _NO_JSON:
            said = text.strip()
            self.is_done = self.is_done or said == b"[DONE]"
            is_ours = said in (b"", b"[DONE]")
        else:
            self.error = self.error or event.failure
            is_ours = self._count(event)
        self._is_foreign = not is_ours if self._is_foreign is None else self._is_foreign

    def _count(self, event: _Event) -> bool:
        """False if it is in no dialect that we read."""
        if event.choices is not None:
            self._openai(event.choices, event.usage)
        elif event.token is not None:
            self._tgi(event)
        elif event.done is not None:
            self._ollama(event)
        elif event.meta_info is not None:
            self._sglang(event.index, event.meta_info)
        elif event.type_:
            self._responses(event)
        else:
            return False
        return True

    def _add(self, choice: int, num_tokens: int) -> None:
        self.last_indexes += [choice] * num_tokens

    def _openai(self, choices: list[_Choice], usage: _Told | None) -> None:
        own = usage if len(choices) == 1 else None
        for choice in choices:
            self._add(choice.index, self._brought(choice, own))
            self._ends(choice)
        if usage is not None and not (choices and self._unit == "usage"):
            self.usage = usage.both()

    def _ends(self, choice: _Choice) -> None:
        if choice.finish_reason is None:
            self._open.add(choice.index)
            return
        self._open.discard(choice.index)
        self._has_finished = True
        if choice.finish_reason in _UNDONE:
            self.error = self.error or 500

    def _brought(self, choice: _Choice, usage: _Told | None) -> int:
        """Tokens of one event. Some engines send the usage of the whole answer with the last event:
        so the first event with a token decides whether each has its own."""
        so_far = None if usage is None else usage.completion_tokens
        if self._unit is None:
            if choice.token_ids:
                self._unit = "ids"
            elif so_far:
                self._unit = "usage"
            elif choice.has_token:
                self._unit = "events"
            self.is_exact = self._unit in ("ids", "usage")
        if self._unit == "ids":
            return len(choice.token_ids or ())
        if self._unit == "usage":
            return 0 if so_far is None else self._since(choice.index, so_far)
        return int(choice.has_token) if self._unit else 0

    def _since(self, choice: int, so_far: int) -> int:
        before, self._told[choice] = self._told[choice], so_far
        return max(so_far - before, 0)

    def _tgi(self, event: _Event) -> None:
        self.is_exact = True
        self._add(0, 1)
        self.is_done = event.generated_text is not None
        if event.details is not None:
            self.usage = event.details.both()

    def _ollama(self, event: _Event) -> None:
        said = event.message if isinstance(event.message, _Message) else _Message()
        has_token = (
            event.response or event.thinking or said.content or said.thinking or said.tool_calls
        )
        self._add(0, int(bool(has_token)))
        if event.done:
            self.is_done, self.usage = True, event.both()

    def _sglang(self, choice: int, told: _Told) -> None:
        self.is_exact = True
        self._add(choice, self._since(choice, told.completion_tokens or 0))
        self.usage = told.prompt_tokens or 0, sum(self._told.values())

    def _responses(self, event: _Event) -> None:
        self._add(0, int(event.type_.endswith(".delta")))
        if event.type_ in _ENDS:
            self.is_done = True
            self.usage = usage_of(msgspec.json.encode(event.response))


def usage_of(body: bytes) -> Usage | None:
    """Usage of an answer in one piece; embeddings have no completion tokens. None: not told."""
    try:
        return _answers.decode(body).both()
    except _NO_JSON:
        return None
