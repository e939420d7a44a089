"""A request to a foreign engine: how many sequences, how large, how urgent, what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_core.work import Deadlines
from sluice_gate.asked import GENERATING, Asked, TokenSize, read


def asked(path: str, engine: str = "vllm", **fields: Any) -> Asked:
    return read(path, json.dumps(fields).encode(), {}, engine)


def places(got: Asked) -> int:
    return got.work(TokenSize(), "").num_sequences


@pytest.mark.parametrize(
    ("path", "fields", "sizes"),
    [
        ("/v1/completions", {"prompt": "abc"}, (3,)),
        ("/v1/completions", {"prompt": "äöü"}, (6,)),
        ("/v1/completions", {"prompt": [1, 2, 3]}, (12,)),
        ("/v1/completions", {"prompt": ["a", "bc"]}, (1, 2)),
        ("/v1/completions", {"prompt": [[1], [2, 3]]}, (4, 8)),
        ("/v1/completions", {"prompt": []}, (0,)),
        ("/v1/completions", {}, (0,)),
        ("/v1/responses", {"input": "abc"}, (3,)),
        ("/v1/responses", {"input": [{"role": "user", "content": "abc"}] * 2}, (6,)),
        ("/api/generate", {"prompt": "abc"}, (3,)),
        ("/generate", {"inputs": "abc"}, (3,)),
        ("/generate", {"text": ["a", "bc"]}, (1, 2)),
        ("/generate_stream", {"inputs": "abc"}, (3,)),
        ("/v1/embeddings", {"input": ["a", "bc", "def"]}, (1, 2, 3)),
        ("/v1/embeddings", {"input": [5, 6]}, (8,)),
        ("/embed", {"inputs": ["a", "bc"]}, (1, 2)),
        ("/api/embed", {"input": ["a", "bc"]}, (1, 2)),
        ("/api/embeddings", {"prompt": "abc"}, (3,)),
        ("/rerank", {"query": "q", "documents": ["a", {"text": "bc"}]}, (1, 2)),
        ("/rerank", {"query": "q", "texts": ["a", "bc"]}, (1, 2)),
        ("/score", {"data_1": "q", "data_2": ["a", "bc"]}, (1, 2)),
        ("/v1/score", {"text_1": "q", "text_2": "a"}, (1,)),
        ("/pooling", {"messages": [{"role": "user", "content": "abc"}]}, (3,)),
    ],
)
def test_each_prompt_is_one_with_the_bytes_of_its_text(
    path: str, fields: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert asked(path, **fields).prompts == sizes


def test_a_chat_is_one_prompt_of_all_its_texts() -> None:
    parts = [{"type": "text", "text": "bc"}, {"type": "image_url", "image_url": {"url": "x" * 99}}]
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert asked("/v1/chat/completions", messages=messages).prompts == (3,)
    assert asked("/api/chat", "ollama", messages=messages).prompts == (3,)


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({"n": 4}, 4),
        ({"n": 2, "best_of": 5}, 5),
        ({"best_of": 3}, 3),
        ({"n": 6, "use_beam_search": True}, 6),
        ({"n_cmpl": 3}, 3),
        ({"n": 0}, 1),
        ({"n": -2}, 1),
        ({"n": None}, 1),
        ({"n": True}, 1),
        ({"n": "4"}, 4),
        ({"n": 4.0}, 4),
        ({"n": 4.5}, 1),
        ({"n": "many"}, 1),
        ({"n": "inf"}, 1),
        ({"n": [4]}, 1),
    ],
)
def test_answers_to_a_prompt_count_each(fields: dict[str, Any], n: int) -> None:
    got = asked("/v1/completions", prompt=["a", "b"], **fields)
    assert got.n == n
    assert places(got) == 2 * n


def test_answers_are_counted_where_the_dialect_has_them() -> None:
    assert places(asked("/generate", inputs="a", parameters={"best_of": 3})) == 3
    assert places(asked("/generate", text="a", sampling_params={"n": 3})) == 3
    assert places(asked("/v1/embeddings", input="a", n=3)) == 1


@pytest.mark.parametrize(
    ("path", "stream", "framing"),
    [
        ("/v1/chat/completions", None, "none"),
        ("/v1/chat/completions", False, "none"),
        ("/v1/chat/completions", True, "sse"),
        ("/v1/chat/completions", "true", "sse"),
        ("/v1/responses", True, "sse"),
        ("/api/chat", None, "ndjson"),
        ("/api/generate", True, "ndjson"),
        ("/api/generate", False, "none"),
        ("/generate", None, "none"),
        ("/generate", True, "sse"),
        ("/generate_stream", None, "sse"),
        ("/v1/embeddings", True, "none"),
        ("/api/embed", None, "none"),
    ],
)
def test_a_streamed_answer_has_the_framing_of_its_dialect(
    path: str, stream: object, framing: str
) -> None:
    got = asked(path, stream=stream)
    assert (got.framing, got.is_stream) == (framing, framing != "none")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("path", ["/v1/completions", "/api/chat"])
def test_a_body_that_is_no_object_is_one_sequence_for_the_engine_to_refuse(
    path: str, body: bytes
) -> None:
    got = read(path, body, {"x-slo-ttft-ms": "200"}, "ollama")
    assert got == Asked((len(body),), 1, False, "none", 0, Deadlines(200.0))


def test_what_only_a_lenient_parser_takes_is_counted_all_the_same() -> None:
    """An engine in Python runs these, so none may pass beside the cap."""
    for flaw in (b"NaN", b"1e999", b"9" * 400, rb'"\ud800"'):
        body = b'{"prompt": ["a", "b"], "n": 3, "temperature": %s}' % flaw
        assert places(read("/v1/completions", body, {}, "vllm")) == 6
        body = b'{"prompt": ["a", "b"], "n": 3, "priority": %s}' % flaw
        assert places(read("/v1/completions", body, {}, "vllm")) == 6


def test_other_routes_count_one_whatever_they_hold() -> None:
    body = b'{"prompt": ["a", "b"], "n": 3, "stream": true}'
    assert places(read("/v1/audio/speech", body, {}, "vllm")) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["text", "content", "best_of", "n"]), inner, max_size=3)
    ),
    max_leaves=12,
)
names = ["prompt", "messages", "input", "inputs", "documents", "n", "best_of", "stream", "priority"]
names += ["parameters", "sampling_params", "options", "text", "texts"]


@given(st.sampled_from(sorted(GENERATING)), st.dictionaries(st.sampled_from(names), json_values))
def test_no_body_breaks_the_counting(path: str, fields: dict[str, Any]) -> None:
    got = read(path, json.dumps(fields).encode(), {}, "vllm")
    assert places(got) >= 1
    assert all(size >= 0 for size in got.prompts)


def test_priority_and_deadlines_are_read() -> None:
    got = asked("/v1/completions", prompt="a", priority=-3, slo_ttft_ms=200, slo_tpot_ms=20.5)
    assert got.priority == -3
    assert got.deadlines == Deadlines(200.0, 20.5)
    assert asked("/v1/completions", prompt="a") == Asked((1,), 1, False, "none", 0, Deadlines())


def test_a_body_and_its_headers_are_merged() -> None:
    body = b'{"prompt": "a", "slo_ttft_ms": 200}'
    got = read("/v1/completions", body, {"x-slo-tpot-ms": "20"}, "vllm")
    assert got.deadlines == Deadlines(200.0, 20.0)
    with pytest.raises(RequestError, match="different deadlines"):
        read("/v1/completions", body, {"x-slo-ttft-ms": "300"}, "vllm")


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_deadline_that_is_none_is_refused_on_every_route(path: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(path, b"{}", {"x-slo-ttft-ms": "soon"}, "vllm")
    assert caught.value.param == "x-slo-ttft-ms"


@pytest.mark.parametrize("value", [0, -1, "200", True, 1e300, [1]])
def test_a_deadline_in_the_body_is_the_gates_to_refuse(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        asked("/v1/completions", prompt="a", slo_tpot_ms=value)
    assert caught.value.param == "slo_tpot_ms"


@pytest.mark.parametrize(
    "name", ["num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread"]
)
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
def test_options_that_reload_ollamas_model_are_refused_by_name(path: str, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        asked(path, "ollama", options={"temperature": 0, name: 1})
    assert caught.value.param == f"options.{name}"
    assert places(asked(path, "ollama", options={"temperature": 0, name: None})) == 1
    assert places(asked(path, "vllm", options={name: 1})) == 1


@pytest.mark.parametrize("value", [0, 0.0, "0", "0s", "0h0m", "-0"])
def test_unloading_ollamas_model_is_refused(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        asked("/api/generate", "ollama", keep_alive=value)
    assert caught.value.param == "keep_alive"


@pytest.mark.parametrize("value", [None, -1, 300, "5m", "0.5h", "10s", "", "soon"])
def test_other_times_of_ollamas_model_pass(value: object) -> None:
    assert places(asked("/api/generate", "ollama", keep_alive=value)) == 1


def test_ollamas_openai_routes_have_no_such_fields() -> None:
    got = asked("/v1/completions", "ollama", prompt="a", options={"num_ctx": 1}, keep_alive=0)
    assert places(got) == 1


def test_token_size_starts_at_four_bytes_and_follows_the_answers() -> None:
    size = TokenSize()
    assert size.tokens(4000) == 1000
    for _ in range(50):
        size.learn(300, 100)
    assert size.tokens(3000) == pytest.approx(1000, abs=2)
    size.learn(0, 500)  # an image: nothing about text
    size.learn(500, 0)
    assert size.tokens(3000) == pytest.approx(1000, abs=2)
    assert size.tokens(0) == 1
