"""Tokens and usage in an engine's answer. Pure.

An event of a stream is one token, unless the events themselves tell how many they bring: vLLM and
SGLang by the usage of each event (`continuous_usage_stats`), vLLM also by its token ids, TGI always
one. Dialects: OpenAI's completions, chats and responses, Ollama's, TGI's, and SGLang's own.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from sluice_core.bounded import Numbers

Framing = Literal["sse", "ndjson", "none"]
"""How events of a streamed answer are told apart; "none" for an answer in one piece."""
Usage = tuple[int, int]
"""Prompt tokens and completion tokens."""
MAX_AT_ONCE = 1 << 12
"""Most tokens that are counted of what comes at once."""
MAX_INDEX = (1 << 12) - 1
"""Largest index of an answer; one beyond it counts as the first."""


class _Told(Struct, frozen=True):
    """OpenAI's usage, and by other names that of /v1/responses."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None

    def both(self, numbers: Numbers) -> Usage | None:
        count = numbers.count
        completion = count(self.completion_tokens) or count(self.output_tokens) or 0
        prompt = count(self.input_tokens if self.prompt_tokens is None else self.prompt_tokens)
        if prompt is None:
            total = count(self.total_tokens)
            return None if total is None else (max(total - completion, 0), completion)
        return prompt, completion


class _Details(Struct, frozen=True):
    """TGI's; `input_length` only in streams, `prefill` only in answers in one piece."""

    generated_tokens: Any = None
    input_length: Any = None
    prefill: Sequence[Any] = ()

    def both(self, numbers: Numbers) -> Usage:
        prompt = numbers.count(self.input_length) or len(self.prefill)
        return prompt, numbers.count(self.generated_tokens) or 0


class _Answer(Struct, frozen=True):
    """The fields of all dialects that tell the usage."""

    usage: _Told | None = None
    prompt_eval_count: Any = None
    eval_count: Any = None
    details: _Details | None = None
    meta_info: _Told | None = None

    def both(self, numbers: Numbers) -> Usage | None:
        told = self.usage or self.details or self.meta_info
        if told is not None:
            return told.both(numbers)
        prompt, completion = map(numbers.count, (self.prompt_eval_count, self.eval_count))
        return None if prompt is None and completion is None else (prompt or 0, completion or 0)


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
    index: Any = 0
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
    index: Any = 0
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
    is a 200. `numbers` reads the engine's."""

    def __init__(self, framing: Framing, numbers: Numbers | None = None) -> None:
        self._numbers = numbers or Numbers("usage", Counter())
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
            if not is_ours:
                self._numbers.leave_out()
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
            self._sglang(self._index(event.index), event.meta_info)
        elif event.type_:
            self._responses(event)
        else:
            return False
        return True

    def _index(self, told: object) -> int:
        return self._numbers.count(told, MAX_INDEX) or 0

    def _add(self, choice: int, num_tokens: int) -> None:
        room = MAX_AT_ONCE - len(self.last_indexes)
        self.last_indexes += [choice] * min(num_tokens, room)

    def _openai(self, choices: list[_Choice], usage: _Told | None) -> None:
        own = usage if len(choices) == 1 else None
        for choice in choices:
            index = self._index(choice.index)
            self._add(index, self._brought(choice, index, own))
            self._ends(choice, index)
        if usage is not None and not (choices and self._unit == "usage"):
            self.usage = usage.both(self._numbers)

    def _ends(self, choice: _Choice, index: int) -> None:
        if choice.finish_reason is None:
            self._open.add(index)
            return
        self._open.discard(index)
        self._has_finished = True
        if choice.finish_reason in _UNDONE:
            self.error = self.error or 500

    def _brought(self, choice: _Choice, index: int, usage: _Told | None) -> int:
        """Tokens of one event. Some engines send the usage of the whole answer with the last event:
        so the first event with a token decides whether each has its own."""
        so_far = None if usage is None else self._numbers.count(usage.completion_tokens)
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
            return 0 if so_far is None else self._since(index, so_far)
        return int(choice.has_token) if self._unit else 0

    def _since(self, choice: int, so_far: int) -> int:
        before, self._told[choice] = self._told[choice], so_far
        return max(so_far - before, 0)

    def _tgi(self, event: _Event) -> None:
        self.is_exact = True
        self._add(0, 1)
        self.is_done = event.generated_text is not None
        if event.details is not None:
            self.usage = event.details.both(self._numbers)

    def _ollama(self, event: _Event) -> None:
        said = event.message if isinstance(event.message, _Message) else _Message()
        has_token = (
            event.response or event.thinking or said.content or said.thinking or said.tool_calls
        )
        self._add(0, int(bool(has_token)))
        if event.done:
            self.is_done, self.usage = True, event.both(self._numbers)

    def _sglang(self, choice: int, told: _Told) -> None:
        self.is_exact = True
        count = self._numbers.count
        self._add(choice, self._since(choice, count(told.completion_tokens) or 0))
        self.usage = count(told.prompt_tokens) or 0, sum(self._told.values())

    def _responses(self, event: _Event) -> None:
        self._add(0, int(event.type_.endswith(".delta")))
        if event.type_ in _ENDS:
            self.is_done = True
            self.usage = usage_of(msgspec.json.encode(event.response), self._numbers)


def usage_of(body: bytes, numbers: Numbers | None = None) -> Usage | None:
    """Usage of an answer in one piece; embeddings have no completion tokens. None: not told."""
    numbers = numbers or Numbers("usage", Counter())
    try:
        return _answers.decode(body).both(numbers)
    except _NO_JSON:
        if body.lstrip()[:1] == b"{":  # else it is a sound, or a text
            numbers.leave_out()
        return None
