"""How many sequences an engine would run for a request, read as engines read it. Pure.

The routes and the fields are those of vLLM, SGLang, TGI, llama.cpp and Ollama. A request that an
engine would refuse runs none. The gate's own reading is not used here: the two are compared.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

MOST = 1 << 14
"""Answers to a prompt that vLLM takes at most (VLLM_MAX_N_SEQUENCES)."""


class Fields(NamedTuple):
    """The fields of a route that say how much is asked: lists of prompts, answers to each, and
    answers inside of another field."""

    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()


_CHAT = Fields((), ("n", "n_cmpl"))
_TEXT = Fields(("prompt",), ("n", "n_cmpl", "best_of"))
_GENERATE = Fields(
    ("inputs", "text", "input_ids", "prompt"),
    (),
    (("parameters", "best_of"), ("sampling_params", "n")),  # TGI's, SGLang's
)
_ONE = Fields()
ROUTES: Mapping[str, Fields] = {
    "/v1/completions": _TEXT,
    "/completions": _TEXT,
    "/completion": _TEXT,
    "/infill": _TEXT,
    "/v1/chat/completions": _CHAT,
    "/chat/completions": _CHAT,
    "/v1/messages": _ONE,
    "/v1/responses": _ONE,
    "/generate": _GENERATE,
    "/generate_stream": _GENERATE,
    "/api/generate": _ONE,
    "/api/chat": _ONE,
}


def path_of(target: bytes) -> str:
    """The path of a request's target, as uvicorn hands it to an engine: decoded, without query."""
    return unquote_to_bytes(target.partition(b"?")[0]).decode("utf-8", "replace")


def sequences(method: str, target: bytes, body: bytes) -> int:
    """The sequences of one request: prompts times answers to each."""
    path = path_of(target)
    if method != "POST" or path not in (*ROUTES, "/invocations"):
        return 0
    try:
        fields = json.loads(body)  # the last of equal names wins, also in pydantic and nlohmann
    except (ValueError, RecursionError):
        return 0
    if not isinstance(fields, dict):
        return 0
    route = ROUTES.get(path, _CHAT if "messages" in fields else _TEXT)  # vLLM's /invocations
    return _prompts(fields, route) * _answers(fields, route)


def _prompts(fields: Mapping[str, Any], route: Fields) -> int:
    return max((_many(fields[name]) for name in route.prompts if name in fields), default=1)


def _many(value: object) -> int:
    """A list of token ids, also one with texts in between (llama.cpp), is one prompt."""
    if not isinstance(value, list) or any(isinstance(item, int | float) for item in value):
        return 1
    return max(1, len(value))


def _answers(fields: Mapping[str, Any], route: Fields) -> int:
    told = [fields.get(name) for name in route.answers]
    for outer, name in route.inside:
        inner = fields.get(outer)
        told.append(inner.get(name) if isinstance(inner, dict) else None)
    return max([1, *map(_whole, told)])


def _whole(value: object) -> int:
    """3, 3.0, "3" and "3.0" are whole numbers in pydantic's lax mode; others are refused."""
    if isinstance(value, str):
        found = re.fullmatch(r"([+-]?\d+)(\.0*)?", value.strip().replace("_", ""))
        return _whole(int(found[1])) if found else 0
    if isinstance(value, float) and value.is_integer():
        return _whole(int(value))
    return value if isinstance(value, int) and abs(value) <= MOST else 0
