"""Requests that an engine gets alone and behind the gate, and what differs in answers each time.

Pure. A request is a method, a path and the bytes of its body.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from bench.peers.variants import MODEL_NAME

_TEXT = rb'"(?:id|created_at)":\s*"[^"]*"'
_NUMBERS = rb'"(?:created|(?:total|load|prompt_eval|eval)_duration)":\s*[0-9.e+-]+'
_TIMINGS = rb'"timings":\s*\{[^}]*\}'
VARIABLE = re.compile(rb"|".join((_TEXT, _NUMBERS, _TIMINGS)))

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    path: str
    body: bytes | None = None
    method: str = "POST"

    def __str__(self) -> str:
        return f"{self.method} {self.path} {(self.body or b'')[:120].decode(errors='replace')}"


@dataclass(frozen=True, slots=True)
class Answered:
    """What came back, without what always differs."""

    status: int
    content_type: str
    body: bytes


def answered(status: int, content_type: str, body: bytes) -> Answered:
    """The answer with names, times and durations blotted out."""
    return Answered(status, content_type, VARIABLE.sub(b'"varies":0', body))


def _json(path: str, *, model: str = MODEL_NAME, **fields: Any) -> Asked:
    return Asked(path, json.dumps({"model": model, **fields}).encode())


def _completion(prompt: Any = "abc def ghi", **fields: Any) -> Asked:
    given = {"max_tokens": 12, "temperature": 0, **fields}
    return _json("/v1/completions", prompt=prompt, **given)


def _chat(*texts: str, **fields: Any) -> Asked:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    given = {"max_tokens": 12, "temperature": 0, **fields}
    return _json("/v1/chat/completions", messages=messages, **given)


NAMED = {"type": "function", "function": {"name": "weather"}}
ENDS = {"stop": ["a", "e", "i"]}
"""For what some engines take as no limit."""
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def _completions() -> list[Asked]:
    return [
        _completion(),
        _completion(stream=True),
        _completion(**USAGE),
        _completion("one two three four", max_tokens=1),
        _completion("one two three four", max_tokens=1, stream=True),
        _completion(temperature=0.8, seed=7),
        _completion(temperature=0.8, seed=7, stream=True),
        _completion(temperature=1.2, seed=11, top_p=0.9, top_k=20),
        _completion(logprobs=3),
        _completion(logprobs=3, stream=True),
        _completion(stop=["a"], max_tokens=24),
        _completion(stop="e", max_tokens=24, stream=True),
        _completion(presence_penalty=0.5, frequency_penalty=0.5),
        _completion(["abc", "def"]),
        _completion(["abc"], stream=True),
        _completion([300, 301, 302]),
        _completion(n=2, temperature=0.9, seed=3),
        _completion(echo=True),
        _completion("x " * 300, max_tokens=4),
        _completion('\u00e9\u4e2d\U0001f600 \\ " \n', max_tokens=4),
        _completion(max_tokens=32, **USAGE),
        _completion(user="someone", priority=0),
    ]


def _chats() -> list[Asked]:
    return [
        _chat("hello"),
        _chat("hello", stream=True),
        _chat("hello", **USAGE),
        _chat("hello", "yes", "and then"),
        _chat("hello", logprobs=True, top_logprobs=2),
        _chat("hello", logprobs=True, top_logprobs=2, stream=True),
        _chat("hello", temperature=0.9, seed=5, stream=True),
        _chat("hello", max_completion_tokens=5, max_tokens=None, **ENDS),
        _chat("hello", tools=[TOOL]),
        _chat("hello", tools=[TOOL], stream=True),
        _chat("hello", tools=[TOOL], tool_choice="none"),
        _chat("hello", tools=[TOOL], tool_choice=NAMED),
        _chat("hello", tools=[TOOL], tool_choice=NAMED, stream=True),
        _chat("hello", response_format={"type": "text"}),
    ]


def _errors() -> list[Asked]:
    """What the engine refuses. A body that is no JSON object is refused by the gate."""
    path = "/v1/completions"
    return [
        _completion(max_tokens=-5, **ENDS),
        _json(path, model="no-such-model", prompt="a", max_tokens=2, temperature=0),
        _completion(temperature=-3),
        _completion(max_tokens="many"),
        _completion("x " * 5000, max_tokens=1),
        _completion(n=0),
        _json("/v1/chat/completions", messages=[], max_tokens=2, temperature=0),
        _json("/v1/chat/completions", messages="hello", max_tokens=2),
        _json("/v1/chat/completions", max_tokens=2),
        Asked("/v1/no-such-route", b"{}"),
        Asked("/v1/models", None, "GET"),
        Asked("/v1/completions", None, "GET"),
        Asked("/no/such/page?with=query", None, "GET"),
    ]


_PROMPT = {"inputs": "abc def", "parameters": {"max_new_tokens": 8}}
_OPTIONS = {"num_predict": 8, "temperature": 0}
_GENERATE: dict[str, Any] = {"prompt": "abc def", "options": _OPTIONS}
_TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "options": _OPTIONS}
NATIVE: dict[str, list[Asked]] = {
    "sluice": [
        Asked("/generate", json.dumps(_PROMPT).encode()),
        Asked("/generate_stream", json.dumps(_PROMPT).encode()),
        _json("/tokenize", prompt="abc def"),
        Asked("/version", None, "GET"),
    ],
    "vllm": [
        _json("/tokenize", prompt="abc def"),
        _json("/detokenize", tokens=[300, 301]),
        Asked("/version", None, "GET"),
    ],
    "llamacpp": [
        _json("/completion", prompt="abc def", n_predict=8, temperature=0),
        _json("/completion", prompt="abc def", n_predict=8, temperature=0, stream=True),
        _json("/tokenize", content="abc def"),
        _json("/detokenize", tokens=[300, 301]),
    ],
    "ollama": [
        _json("/api/generate", **_GENERATE),
        _json("/api/generate", **_GENERATE, stream=False),
        _json("/api/chat", **_TALK),
        _json("/api/chat", **_TALK, stream=False),
        _json("/api/generate", model="no-such-model", prompt="a"),
        _json("/api/show"),
        Asked("/api/tags", None, "GET"),
        Asked("/api/version", None, "GET"),
    ],
}
"""Routes of its own."""


def requests(engine: str) -> list[Asked]:
    """At least 50 requests, the same for all engines but for their own routes."""
    return [*_completions(), *_chats(), *_errors(), *NATIVE[engine]]
