"""Tokens and usage in an engine's answer. Pure, linear in its bytes, and bounded in memory.

An event of a stream is one token, unless the events themselves tell how many they bring: vLLM and
SGLang by the usage of each event (`continuous_usage_stats`), vLLM also by its token ids, llama.cpp
by `tokens_predicted`, TGI always one. Dialects: OpenAI's completions, chats and responses,
Anthropic's messages, Ollama's, TGI's, llama.cpp's and SGLang's own.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from sluice_core.bounded import Numbers

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
MAX_AT_ONCE = 1 << 12
"""Most tokens that are counted of one event."""
MAX_INDEX = (1 << 12) - 1
"""Largest index of an answer; one beyond it counts as the first."""


class _Told(Struct, gc=False):
    """The numbers of all dialects that tell the usage, as the engine wrote them."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    input_tokens: Any = None  # /v1/responses, /v1/messages
    output_tokens: Any = None
    prompt_eval_count: Any = None  # Ollama
    eval_count: Any = None
    input_length: Any = None  # TGI; only in streams
    generated_tokens: Any = None
    tokens_evaluated: Any = None  # llama.cpp
    tokens_predicted: Any = None

    def both(self, numbers: Numbers) -> Usage | None:
        """None if neither is told. Embeddings have no completion tokens, reranking only a total."""
        prompt = _first(
            numbers, self.prompt_tokens, self.input_tokens, self.prompt_eval_count,
            self.input_length, self.tokens_evaluated,
        )  # fmt: skip
        completion = _first(
            numbers, self.completion_tokens, self.output_tokens, self.eval_count,
            self.generated_tokens, self.tokens_predicted,
        )  # fmt: skip
        if prompt is None and (total := numbers.count(self.total_tokens)) is not None:
            prompt = max(total - (completion or 0), 0)
        return None if prompt is None and completion is None else (prompt or 0, completion or 0)


def _first(numbers: Numbers, *told: object) -> int | None:
    for each in told:
        if (found := numbers.count(each)) is not None:
            return found
    return None


def _index(numbers: Numbers, told: object) -> int:
    return numbers.count(told, MAX_INDEX) or 0


_NUMBER = re.compile(
    rb'"(%s)"\s{0,8}:\s{0,8}([^\s,}\]]{1,24})(?=[\s,}\]])'
    % "|".join(_Told.__struct_fields__).encode()
)
_NUMBER_BYTES = 64
"""More than any match."""
_NOTHING: Mapping[int, int] = {}


class UsageScan:
    """The usage in a JSON text of any length, wherever it stands: at the end (most), at the front
    (chats of vLLM with `prompt_logprobs`), or between. The last of each name counts.

    Inside of a JSON string the quotes of a name are escaped, so that no text looks like one.
    """

    def __init__(self, numbers: Numbers | None = None) -> None:
        self._numbers = numbers or Numbers("usage", Counter())
        self._told: dict[bytes, bytes] = {}
        self._last = b""

    def feed(self, data: bytes) -> Mapping[int, int]:
        """The next bytes, of which only the last few are kept. An answer in one piece brings no
        token that could be timed."""
        seen = self._last + data
        self._told.update(_NUMBER.findall(seen))
        self._last = seen[-_NUMBER_BYTES:]
        return _NOTHING

    @property
    def usage(self) -> Usage | None:
        """As far as it was told."""
        self._told.update(_NUMBER.findall(self._last + b"\n"))  # a number may end where all does
        told = {
            name.decode(): text.decode("latin-1")
            for name, text in self._told.items()
            if text != b"null"
        }
        return _Told(**told).both(self._numbers)


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
    index: Any = 0
    meta_info: _Told | None = None
    done: bool | None = None
    response: str | _Part | None = None
    thinking: Any = None
    message: str | _Part | None = None
    content: Any = None
    stop: Any = None
    type_: str = field(name="type", default="")

    @property
    def failure(self) -> int | None:
        """The status of the error that the event tells, in whatever form; None if it tells none.
        vLLM, SGLang and llama.cpp give it as `code`."""
        if not self.error and self.type_ not in _FAILED:
            return None
        code = self.error.get("code") if isinstance(self.error, dict) else None
        return code if isinstance(code, int) and 400 <= code <= 599 else 500


_events = msgspec.json.Decoder(_Event)
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ENDS = frozenset(
    (
        *("response.completed", "response.incomplete", "response.failed", "message_stop"),
        *("transcript.text.done", "speech.audio.done"),
    )
)
_FAILED = ("response.failed", "error")
_UNDONE = ("abort", "error")
"""Finish reasons of an answer that its engine gave up (vLLM's `FINISH_REASON_STRINGS`)."""


class Chunks:
    """One streamed answer. `is_done`: the engine said that it has ended. `error`: the status of the
    error that it told, in an answer that is a 200. `usage`: once told. `is_exact`: events tell how
    many tokens each brings. `numbers` reads the engine's."""

    def __init__(self, framing: Framing, numbers: Numbers | None = None) -> None:
        self._numbers = numbers or Numbers("usage", Counter())
        self.is_done = False
        self.error: int | None = None
        self.usage: Usage | None = None
        self.is_exact = False
        self._brought: dict[int, int] = {}
        self._is_sse = framing == "sse"
        self._is_foreign: bool | None = None  # in a dialect that is not read, once that is known
        self._open: set[int] = set()  # choices without a finish reason
        self._has_finished = False
        self._pending = b""
        self._large: UsageScan | None = None  # of an event that is not kept
        self._unit: Literal["ids", "usage", "events"] | None = None  # known from the first token
        self._told: dict[int, int] = defaultdict(int)  # tokens so far, by choice

    def close(self) -> None:
        """End the stream. An event that begins an error or an end may lack its newline."""
        self.feed(b"\n")

    @property
    def is_cut(self) -> bool:
        """True if it may not end here: the dialect's end, or a finish reason for each choice that
        has begun, must have come. An answer in a dialect that is not read is never cut."""
        has_finished = self._has_finished and not self._open
        return not (self._is_foreign or self.is_done or has_finished)

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
            self._large = UsageScan(self._numbers)
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
        """A large event is a token, unless its usage says better. It may be the last one, if only
        that tells the usage."""
        if usage is not None:
            self.usage, self.is_done = usage, self.is_done or not self.is_exact
        is_told = usage is not None and self.is_exact
        self._add(0, self._since(0, usage[1]) if usage is not None and is_told else 1)

    def _read(self, text: bytes) -> None:
        """`text`: one event."""
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
            is_ours = self._count(event) or self.error is not None
        if self._is_foreign is None:
            self._is_foreign = not is_ours

    def _count(self, event: _Event) -> bool:
        """Count what it brings; False if it is in no dialect that is read."""
        if event.choices is not None:
            self._openai(event.choices, event.usage)
        elif event.token is not None:
            self._tgi(event)
        elif event.done is not None:
            self._ollama(event)
        elif event.meta_info is not None:
            self._sglang(_index(self._numbers, event.index), event.meta_info)
        elif event.type_:
            self._typed(event)
        elif isinstance(event.stop, bool):
            self._llamacpp(event, is_last=event.stop)
        else:
            return False
        return True

    def _add(self, choice: int, num_tokens: int) -> None:
        if num_tokens > 0:
            before = self._brought.get(choice, 0)
            self._brought[choice] = min(before + num_tokens, MAX_AT_ONCE)

    def _openai(self, choices: list[_Choice], usage: _Told | None) -> None:
        own = usage if len(choices) == 1 else None
        for choice in choices:
            index = _index(self._numbers, choice.index)
            self._add(index, self._tokens_of(choice, index, own))
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

    def _tokens_of(self, choice: _Choice, index: int, usage: _Told | None) -> int:
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
        said = event.message if isinstance(event.message, _Part) else _Part()
        has_token = (
            event.response or event.thinking or said.content or said.thinking or said.tool_calls
        )
        self._add(0, int(bool(has_token)))
        if event.done:
            self.is_done, self.usage = True, event.both(self._numbers)

    def _sglang(self, choice: int, told: _Told) -> None:
        self.is_exact = True
        so_far = self._numbers.count(told.completion_tokens) or 0
        self._add(choice, self._since(choice, so_far))
        self.usage = (told.both(self._numbers) or (0, 0))[0], sum(self._told.values())

    def _llamacpp(self, event: _Event, *, is_last: bool) -> None:
        """Old versions tell their count only in the last event."""
        so_far = self._numbers.count(event.tokens_predicted)
        index = _index(self._numbers, event.index)
        self.is_exact = self.is_exact or (so_far is not None and not is_last)
        if so_far is not None and self.is_exact:
            self._add(index, self._since(index, so_far))
        elif event.content:
            self._add(index, 1)
        if is_last:
            self.is_done, self.usage = True, event.both(self._numbers)

    def _typed(self, event: _Event) -> None:
        """OpenAI's responses, transcriptions and speech; Anthropic's messages, which tell the
        prompt in the first event and the rest in one of the last."""
        kind = event.type_
        self._add(0, int(kind.endswith(".delta") or kind == "content_block_delta"))
        for part in (event, event.message, event.response):
            if isinstance(part, _Event | _Part) and part.usage is not None:
                told = part.usage.both(self._numbers) or (0, 0)
                self.usage = told[0] or (self.usage or (0, 0))[0], told[1]
        self.is_done = self.is_done or kind in _ENDS
