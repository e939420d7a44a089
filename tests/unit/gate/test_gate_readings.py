"""No reader of an engine finds more in a body than the gate has counted.

The readers here stand for engines: Python's json as vLLM and SGLang use it, which takes other
encodings and the last of two members; one that takes the first; and Go's, which finds a name in
any case and stops at the object's end.
"""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_gate.request.asked import Asked, Door, read
from sluice_gate.request.estimate import TokenSize

Reader = Callable[[bytes], Any]


def _last(body: bytes) -> Any:
    return json.loads(body)


def _first(body: bytes) -> Any:
    return json.loads(body, object_pairs_hook=lambda pairs: dict(reversed(pairs)))


def _go(body: bytes) -> Any:
    value, _ = json.JSONDecoder(
        object_pairs_hook=lambda pairs: {
            name.casefold().replace("\u017f", "s"): item for name, item in pairs
        }
    ).raw_decode(body.decode("utf-8").lstrip("\ufeff").lstrip())
    return value


READERS: list[Reader] = [_last, _first, _go]


def sequences(value: Any) -> int:
    """What a generous engine runs."""
    if not isinstance(value, dict):
        return 0
    prompt, n = value.get("prompt"), value.get("n", 1)
    num = len(prompt) if isinstance(prompt, list) and all(isinstance(p, str) for p in prompt) else 1
    return num * (n if isinstance(n, int) and not isinstance(n, bool) else 1)


NAMES = ["n", "N", "\\u006e", "prompt", "Prompt", "\\u0070rompt", "stream", "x", "\uff4e"]
VALUES = ["1", "6", '"a"', '["a", "b", "c"]', "true", "null", "[1, 2]", "{}", "NaN", "6.0"]
members = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)).map(lambda m: f'"{m[0]}": {m[1]}'),
    max_size=5,
)
before = st.sampled_from(["", " ", "\ufeff", "\n"])
after = st.sampled_from(["", " ", "x", '{"n": 6}', ","])
encodings = st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-16", "utf-16-le", "utf-32-be"])
paths = st.sampled_from(["/v1/completions", "/completion", "/invocations", "/api/generate", "/x"])
kinds = st.sampled_from(["application/json", "text/plain", ""])


@settings(max_examples=500)
@given(members, before, after, encodings, paths, kinds, st.sampled_from(["vllm", "ollama"]))
def test_no_reader_finds_more_sequences_than_were_counted(
    given_members: list[str], start: str, end: str, encoding: str, path: str, kind: str, engine: str
) -> None:
    text = start + "{" + ", ".join(given_members) + "}" + end
    body = text.encode(encoding)
    try:
        asked = read(Door(engine, None, 1 << 20), path, body, {"content-type": kind})
    except RequestError:
        return
    counted = asked.work(TokenSize(), "").num_sequences
    for found in readings(asked, body):
        assert sequences(found) <= counted


def readings(asked: Asked, body: bytes) -> list[Any]:
    """What each reader finds in the bytes that the engine gets."""
    found = []
    for reader in READERS:
        try:
            found.append(reader(asked.body or body))
        except (ValueError, RecursionError):
            continue
    return found


def test_the_readers_find_what_they_should() -> None:
    body = b'{"n": 1, "N": 6, "n": 2} x'
    assert sequences(_go(body)) == 2
    assert sequences(_first(body[:-2])) == 1
    assert sequences(_last(body[:-2])) == 2
