"""Tokens and usage in an engine's answer. Pure, linear in its bytes, and bounded in memory.

An event of a stream is one token, unless the events themselves tell how many they bring: vLLM and
SGLang by the usage of each event (`continuous_usage_stats`), vLLM also by its token ids, llama.cpp
by `tokens_predicted`, TGI always one. Dialects: OpenAI's completions, chats and responses,
Anthropic's messages, Ollama's, TGI's, llama.cpp's and SGLang's own.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

Framing = Literal["sse", "ndjson"]
"""How events of a streamed answer are told apart."""
Usage = tuple[int, int]
"""Prompt tokens and completion tokens."""
FRAMINGS: Mapping[str, Framing] = {
    "text/event-stream": "sse",
    "application/x-ndjson": "ndjson",
    "application/ndjson": "ndjson",
    "application/jsonl": "ndjson",
}
"""By the content type of an answer. A route says nothing: any may stream, and many do both."""
MAX_EVENT_BYTES = 1 << 16
"""An event over this is not kept and not parsed: 3e6 token ids in one held the loop for 1.9 s."""
MAX_TOKENS = 1 << 20
"""More tokens than one event can bring, or one answer tell: what an engine says is not trusted."""
MAX_CHOICES = 1 << 12


class _Told(Struct, gc=False):
    """The numbers of all dialects that tell the usage."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None  # /v1/responses, /v1/messages
    output_tokens: int | None = None
    prompt_eval_count: int | None = None  # Ollama
    eval_count: int | None = None
    input_length: int | None = None  # TGI; only in streams
    generated_tokens: int | None = None
    tokens_evaluated: int | None = None  # llama.cpp
    tokens_predicted: int | None = None

    def both(self) -> Usage | None:
        """None if neither is told. Embeddings have no completion tokens, reranking only a total."""
        prompt = _first(
            self.prompt_tokens, self.input_tokens, self.prompt_eval_count, self.input_length,
            self.tokens_evaluated,
        )  # fmt: skip
        completion = _first(
            self.completion_tokens, self.output_tokens, self.eval_count, self.generated_tokens,
            self.tokens_predicted,
        )  # fmt: skip
        if prompt is None and self.total_tokens is not None:
            prompt = _bounded(self.total_tokens - (completion or 0))
        return None if prompt is None and completion is None else (prompt or 0, completion or 0)


def _first(*told: int | None) -> int | None:
    for number in told:
        if number is not None:
            return _bounded(number)
    return None


def _bounded(tokens: int) -> int:
    return min(max(tokens, 0), MAX_TOKENS)


_NUMBER = re.compile(
    rb'"(%s)"\s{0,8}:\s{0,8}(\d{1,9})(?=[\s,}\]])' % "|".join(_Told.__struct_fields__).encode()
)
_NUMBER_BYTES = 64
"""More than any match."""
_NOTHING: Mapping[int, int] = {}


class Numbers:
    """The usage in a JSON text of any length, wherever it stands: at the end (most), at the front
    (chats of vLLM with `prompt_logprobs`), or between. The last of each name counts.

    Inside of a JSON string the quotes of a name are escaped, so that no text looks like one.
    """

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._last = b""

    def feed(self, data: bytes) -> Mapping[int, int]:
        """The next bytes, of which only the last few are kept. An answer in one piece brings no
        token that could be timed."""
        seen = self._last + data
        for name, number in _NUMBER.findall(seen):
            self._told[name.decode()] = int(number)
        self._last = seen[-_NUMBER_BYTES:]
        return _NOTHING

    @property
    def usage(self) -> Usage | None:
        """As far as it was told."""
        at_end = _NUMBER.findall(self._last + b"\n")  # a number ends where the text does
        told = self._told | {name.decode(): int(number) for name, number in at_end}
        return _Told(**told).both()


class _Delta(Struct, gc=False):
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


class _Choice(Struct, gc=False):
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


class _Part(Struct, gc=False):
    """`message`: Ollama's, or the first event of Anthropic's; `response`: of OpenAI's last."""

    content: Any = None
    thinking: Any = None
    tool_calls: Any = None
    usage: _Told | None = None


class _Event(_Told, gc=False):
    """The fields of all dialects that tell what an event brings. `response`: Ollama's text, or
    the whole of a response at the end of OpenAI's."""

    choices: list[_Choice] | None = None
    usage: _Told | None = None
    error: Any = None
    token: Any = None
    generated_text: Any = None
    details: _Told | None = None
    index: int = 0
    meta_info: _Told | None = None
    done: bool | None = None
    response: str | _Part | None = None
    thinking: Any = None
    message: str | _Part | None = None
    content: Any = None
    stop: Any = None
    type_: str = field(name="type", default="")


_events = msgspec.json.Decoder(_Event)
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ENDS = frozenset(
    (
        *("response.completed", "response.incomplete", "response.failed", "message_stop"),
        *("transcript.text.done", "speech.audio.done"),
    )
)


class Chunks:
    """One streamed answer. `is_done`: the engine said that it has ended. `is_failed`: it told of an
    error. `usage`: once told. `is_exact`: events tell how many tokens each brings."""

    def __init__(self, framing: Framing) -> None:
        self.is_done = False
        self.is_failed = False
        self.usage: Usage | None = None
        self.is_exact = False
        self._brought: dict[int, int] = {}
        self._has_tokens = False
        self._is_sse = framing == "sse"
        self._pending = b""
        self._large: Numbers | None = None  # of an event that is not kept
        self._unit: Literal["ids", "usage", "events"] | None = None  # known from the first token
        self._told: dict[int, int] = defaultdict(int)  # tokens so far, by choice

    @property
    def lacks_end(self) -> bool:
        """True if it brought tokens, and not what ends an answer in its dialect."""
        return self._has_tokens and not self.is_done

    def feed(self, data: bytes) -> Mapping[int, int]:
        """Tokens, by choice, of the events that ended in these bytes. An event is one line in all
        dialects."""
        self._brought = {}
        *lines, rest = data.split(b"\n")
        for line in lines:
            if self._pending or self._large is not None or len(line) > MAX_EVENT_BYTES:
                self._keep(line)
                self._end()
            elif line:
                self._line(line)
        if rest:
            self._keep(rest)
        return self._brought

    def _keep(self, part: bytes) -> None:
        if self._large is not None:
            self._large.feed(part)
            return
        self._pending = self._pending + part if self._pending else part
        if len(self._pending) > MAX_EVENT_BYTES:
            is_event = not self._is_sse or self._pending.startswith(b"data:")
            self._large = Numbers()
            self._large.feed(self._pending if is_event else b"")
            self._pending = self._pending[:5]

    def _end(self) -> None:
        line, self._pending = self._pending, b""
        large, self._large = self._large, None
        if large is None:
            self._line(line)
        elif not self._is_sse or line.startswith(b"data:"):
            self._unread(large.usage)

    def _line(self, line: bytes) -> None:
        if not self._is_sse:
            self._read(line)
        elif line.startswith(b"data:"):
            self._read(line[5:])

    def _unread(self, usage: Usage | None) -> None:
        """A large event is a token, unless its usage says better. It may be the last one."""
        if usage is not None:
            self.usage, self.is_done = usage, True
        is_told = usage is not None and self.is_exact
        self._add(0, self._since(0, usage[1]) if usage is not None and is_told else 1)

    def _read(self, text: bytes) -> None:
        """`text`: one event."""
        try:
            event = _events.decode(text)
        except _NO_JSON:
            self.is_done = self.is_done or text.strip() == b"[DONE]"
            return
        if event.error is not None:
            self.is_failed = True
        elif event.choices is not None:
            self._openai(event.choices, event.usage)
        elif event.token is not None:
            self._tgi(event)
        elif event.done is not None:
            self._ollama(event)
        elif event.meta_info is not None:
            self._sglang(event.index, event.meta_info)
        elif event.type_:
            self._typed(event)
        elif isinstance(event.stop, bool):
            self._llamacpp(event, is_last=event.stop)

    def _add(self, choice: int, num_tokens: int) -> None:
        if num_tokens > 0:
            self._has_tokens = True
            self._brought[choice] = self._brought.get(choice, 0) + num_tokens

    def _openai(self, choices: list[_Choice], usage: _Told | None) -> None:
        own = usage if len(choices) == 1 else None
        for choice in choices:
            self._add(choice.index, self._tokens_of(choice, own))
            self.is_done = self.is_done or choice.finish_reason is not None
        if usage is not None and not (choices and self._unit == "usage"):
            self.usage = usage.both()

    def _tokens_of(self, choice: _Choice, usage: _Told | None) -> int:
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
        choice = choice if 0 <= choice < MAX_CHOICES else 0
        before, self._told[choice] = self._told[choice], _bounded(so_far)
        return _bounded(self._told[choice] - before)

    def _tgi(self, event: _Event) -> None:
        self.is_exact = True
        self._add(0, 1)
        self.is_done = event.generated_text is not None
        if event.details is not None:
            self.usage = event.details.both()

    def _ollama(self, event: _Event) -> None:
        said = event.message if isinstance(event.message, _Part) else _Part()
        has_token = (
            event.response or event.thinking or said.content or said.thinking or said.tool_calls
        )
        self._add(0, int(bool(has_token)))
        if event.done:
            self.is_done, self.usage = True, event.both()

    def _sglang(self, choice: int, told: _Told) -> None:
        self.is_exact = True
        self._add(choice, self._since(choice, told.completion_tokens or 0))
        self.usage = (told.both() or (0, 0))[0], _bounded(sum(self._told.values()))

    def _llamacpp(self, event: _Event, *, is_last: bool) -> None:
        """Old versions tell their count only in the last event."""
        so_far = event.tokens_predicted
        self.is_exact = self.is_exact or (so_far is not None and not is_last)
        is_told = so_far is not None and self.is_exact
        if is_told:
            self._add(event.index, self._since(event.index, so_far or 0))
        elif event.content:
            self._add(event.index, 1)
        if is_last:
            self.is_done, self.usage = True, event.both()

    def _typed(self, event: _Event) -> None:
        """OpenAI's responses, transcriptions and speech; Anthropic's messages, which tell the
        prompt in the first event and the rest in one of the last."""
        kind = event.type_
        self._add(0, int(kind.endswith(".delta") or kind == "content_block_delta"))
        for part in (event, event.message, event.response):
            if isinstance(part, _Event | _Part) and part.usage is not None:
                told, before = part.usage.both() or (0, 0), self.usage or (0, 0)
                self.usage = told[0] or before[0], told[1]
        self.is_done = self.is_done or kind in _ENDS
        self.is_failed = self.is_failed or kind in ("error", "response.failed")
