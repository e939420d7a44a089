"""How many sequences an engine would run for a request, read as engines read it. Pure.

The routes and the fields are those of vLLM, SGLang, TGI and llama.cpp. A request that an engine
would refuse runs none. The gate's own reading is not used here: the two are compared.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

PROMPTS = ("prompt", "inputs", "text", "input_ids")
GENERATING = frozenset(
    (
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/completions", "/chat/completions", "/completion", "/infill", "/invocations"),
        *("/generate", "/generate_stream", "/api/generate", "/api/chat"),
    )
)


def path_of(target: bytes) -> str:
    """The path of a request's target, as uvicorn hands it to an engine: decoded, without query."""
    return unquote_to_bytes(target.partition(b"?")[0]).decode("utf-8", "replace")


def sequences(method: str, target: bytes, body: bytes) -> int:
    """The sequences of one request: prompts times answers to each."""
    if method != "POST" or path_of(target) not in GENERATING:
        return 0
    try:
        fields = json.loads(body)  # the last of equal names wins, also in pydantic and nlohmann
    except (ValueError, RecursionError):
        return 0
    return _prompts(fields) * _answers(fields) if isinstance(fields, dict) else 0


def _prompts(fields: Mapping[str, Any]) -> int:
    return max((_many(fields[name]) for name in PROMPTS if name in fields), default=1)


def _many(value: object) -> int:
    """A list of token ids, also one with texts in between (llama.cpp), is one prompt."""
    if not isinstance(value, list) or any(isinstance(item, int | float) for item in value):
        return 1
    return max(1, len(value))


def _answers(fields: Mapping[str, Any]) -> int:
    inside = [fields.get("parameters"), fields.get("sampling_params")]
    told = [fields.get(name) for name in ("n", "n_cmpl", "best_of")]
    told += [
        each.get(name) for each in inside if isinstance(each, dict) for name in ("n", "best_of")
    ]
    return max(1, *(_whole(value) for value in told))


def _whole(value: object) -> int:
    """3, 3.0 and "3" are whole numbers in pydantic's lax mode; an engine refuses all others."""
    try:
        number = float(value) if isinstance(value, str | int | float) else 0.0
    except (ValueError, OverflowError):
        return 0
    return int(number) if number.is_integer() and abs(number) <= 1 << 14 else 0
