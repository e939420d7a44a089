"""A request to a foreign engine: how many sequences, how large, how urgent, what is refused."""

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import BodyTooLarge, RequestError
from sluice_core.work import Deadlines
from sluice_gate.request.asked import MAX_SEQUENCES, PICTURE_BYTES, Asked, Door, read
from sluice_gate.request.estimate import TokenSize
from sluice_gate.request.operations import COUNTED

DOOR = Door("vllm", None, 1 << 20)
OLLAMA = Door("ollama", "m", 1 << 20)


def asked(path: str, door: Door = DOOR, **fields: Any) -> Asked:
    return read(door, path, json.dumps(fields, ensure_ascii=False).encode(), {})


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
        ("/v1/responses", {"input": "abc"}, (16,)),
        ("/api/generate", {"prompt": "abc"}, (3,)),
        ("/generate", {"inputs": "abc"}, (3,)),
        ("/generate", {"text": ["a", "bc"]}, (1, 2)),
        ("/generate_stream", {"inputs": "abc"}, (3,)),
        ("/v1/embeddings", {"input": ["a", "bc", "def"]}, (1, 2, 3)),
        ("/v1/embeddings", {"input": [5, 6]}, (8,)),
        ("/embed", {"inputs": ["a", "bc"]}, (1, 2)),
        ("/api/embed", {"input": ["a", "bc"]}, (1, 2)),
        ("/api/embeddings", {"prompt": "abc"}, (3,)),
        ("/rerank", {"query": "q", "documents": ["a", {"text": "bc"}]}, (1, 14)),
        ("/rerank", {"query": "q", "texts": ["a", "bc"]}, (1, 2)),
        ("/score", {"data_1": "q", "data_2": ["a", "bc"]}, (1, 2)),
        ("/v1/score", {"text_1": "q", "text_2": "a"}, (1,)),
    ],
)
def test_each_prompt_is_one_with_the_bytes_of_its_text(
    path: str, fields: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    assert asked(path, **fields).prompts == sizes


@pytest.mark.parametrize(
    ("path", "fields", "num"),
    [
        ("/v1/completions", {"prompt_embeds": ["x", "y"]}, 2),
        ("/generate", {"input_embeds": [[0.5, 1.5], [2.5, 3.5]]}, 2),
        ("/v1/chat/completions", {"messages": [[{"role": "user"}], [{"role": "user"}]]}, 2),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "documents": ["a", "b"]}, 1),
        ("/completion", {"prompt": ["a", "b"], "n_predict": 4}, 2),
        ("/invocations", {"prompt": ["a", "b"], "n": 3}, 6),
        ("/invocations", {"messages": [{"role": "user"}], "n": 6}, 6),
        ("/invocations", {"input": ["a", "b", "c"]}, 3),
        ("/invocations", {"text_1": "q", "text_2": ["a", "b"]}, 2),
        ("/V1/completions/", {"prompt": ["a", "b"]}, 2),
        ("/", {"inputs": ["a", "b"], "parameters": {"best_of": 2}}, 4),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 3}]}, 6),
    ],
)
def test_sequences_are_counted_on_every_route(path: str, fields: dict[str, Any], num: int) -> None:
    assert places(asked(path, **fields)) == num


def test_a_chat_is_one_prompt_of_its_whole_body() -> None:
    tools = [{"type": "function", "function": {"name": "x" * 5000}}]
    talk = [{"role": "user", "content": "a"}]
    plain = asked("/v1/chat/completions", messages=talk).prompts[0]
    assert asked("/v1/chat/completions", messages=talk, tools=tools).prompts[0] > plain + 5000


def test_a_picture_in_a_chat_counts_as_a_picture_and_not_as_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "x" * 500_000}}
    (size,) = asked("/v1/chat/completions", messages=[{"content": [picture, picture]}]).prompts
    assert 2 * PICTURE_BYTES < size < 2 * PICTURE_BYTES + 200


def test_more_sequences_than_any_engine_takes_are_refused() -> None:
    assert places(asked("/v1/completions", prompt="a", n=MAX_SEQUENCES)) == MAX_SEQUENCES
    with pytest.raises(RequestError, match="16,384 sequences"):
        asked("/v1/completions", prompt=["a", "b"], n=MAX_SEQUENCES)


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
    ("path", "stream", "is_stream"),
    [
        ("/v1/chat/completions", None, False),
        ("/v1/chat/completions", False, False),
        ("/v1/chat/completions", True, True),
        ("/v1/chat/completions", "true", True),
        ("/v1/responses", True, True),
        ("/v1/messages", True, True),
        ("/api/chat", None, True),
        ("/api/generate", True, True),
        ("/api/generate", False, False),
        ("/generate", None, False),
        ("/generate", True, True),
        ("/generate_stream", None, True),
        ("/api/embed", None, False),
    ],
)
def test_a_body_says_whether_its_answer_is_streamed(
    path: str, stream: object, is_stream: bool
) -> None:
    assert asked(path, stream=stream).is_stream is is_stream


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"n": 1} {"n": 6}'),
        *(b'\xef\xbb\xbf{"n": 6}', '{"n": 6}'.encode("utf-16"), '{"n": 6}'.encode("utf-32-be")),
        *(b'{"n": 1, "n": 6}', b'{"n": 6, "n": 1}', b'{"n": 1, "\\u006e": 6}', b'{"n": 6, "n": 6}'),
        *(b'{"N": 6}', '{"\uff4e": 6}'.encode(), '{"\u017ftream": true}'.encode()),
        *(
            b'{"temperature": NaN}',
            b'{"n": 6,}',
            b'{"prompt": "\\ud800"}',
            b"{'n': 6}",
            b'{"n": 06}',
        ),
        b'{"sampling_params": {"n": 1, "n": 6}}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/api/chat"])
def test_a_body_with_two_readings_or_none_is_refused(path: str, body: bytes) -> None:
    for door in (DOOR, OLLAMA):
        with pytest.raises(RequestError):
            read(door, path, body, {"content-type": "text/plain"})


@pytest.mark.parametrize("body", [b"", b"--x\r\n", b"RIFF", b"[1]", b"null", b"a=1&n=6"])
def test_a_body_of_another_kind_counts_one_on_a_route_without_a_row(body: bytes) -> None:
    headers = {"content-type": "multipart/form-data", "x-slo-ttft-ms": "200"}
    expected = Asked((len(body),), deadlines=Deadlines(200.0))
    assert read(DOOR, "/v1/audio/transcriptions", body, headers) == expected


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize(
    "body", [b"{", b'\xef\xbb\xbf{"n": 6}', '{"n": 6}'.encode("utf-16"), b'{"n": 1, "n": 6}']
)
def test_what_may_be_json_must_be_so_on_every_route(body: bytes, kind: str) -> None:
    with pytest.raises(RequestError):
        read(DOOR, "/invocations", body, {"content-type": kind})


def _zstd(text: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(text)


@pytest.mark.parametrize(
    ("name", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("ZSTD", _zstd)]
)
def test_a_compressed_body_is_counted_and_bounded(
    name: str, encode: Callable[[bytes], bytes]
) -> None:
    body, headers = encode(b'{"prompt": ["a", "b"], "n": 3}'), {"content-encoding": name}
    got = read(DOOR, "/v1/completions", body, headers)
    assert places(got) == 6
    assert got.body is None, "it goes to the engine as it came"
    with pytest.raises(RequestError, match=f"not {name.lower()}"):
        read(DOOR, "/v1/completions", b"none", headers)
    with pytest.raises(BodyTooLarge):
        read(DOOR, "/v1/completions", encode(b" " * (DOOR.max_bytes + 1)), headers)


def test_a_compression_that_nobody_here_reads_counts_one_and_never_reaches_ollama() -> None:
    assert places(read(DOOR, "/v1/completions", b"...", {"content-encoding": "br"})) == 1
    with pytest.raises(RequestError, match="JSON object"):
        read(OLLAMA, "/v1/completions", b"...", {"content-encoding": "br"})


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


@given(
    st.sampled_from([*sorted(COUNTED), "/invocations"]),
    st.dictionaries(st.sampled_from(names), json_values),
)
def test_no_body_breaks_the_counting(path: str, fields: dict[str, Any]) -> None:
    try:
        got = read(DOOR, path, json.dumps(fields).encode(), {})
    except RequestError as error:
        assert "sequences at most" in error.message or "not JSON" in error.message  # noqa: PT017
        return
    assert places(got) >= 1
    assert all(size >= 0 for size in got.prompts)


def test_priority_and_deadlines_are_read() -> None:
    got = asked("/v1/completions", prompt="a", priority=-3, slo_ttft_ms=200, slo_tpot_ms=20.5)
    assert got.priority == -3
    assert got.deadlines == Deadlines(200.0, 20.5)
    assert asked("/v1/completions", prompt="a") == Asked((1,))


def test_a_body_and_its_headers_are_merged() -> None:
    body = b'{"prompt": "a", "slo_ttft_ms": 200}'
    got = read(DOOR, "/v1/completions", body, {"x-slo-tpot-ms": "20"})
    assert got.deadlines == Deadlines(200.0, 20.0)
    with pytest.raises(RequestError, match="different deadlines"):
        read(DOOR, "/v1/completions", body, {"x-slo-ttft-ms": "300"})


@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_deadline_that_is_none_is_refused_on_every_route(path: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(DOOR, path, b"{}", {"x-slo-ttft-ms": "soon"})
    assert caught.value.param == "x-slo-ttft-ms"


@pytest.mark.parametrize("value", [0, -1, "200", True, 1e300, [1]])
def test_a_deadline_in_the_body_is_the_gates_to_refuse(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        asked("/v1/completions", prompt="a", slo_tpot_ms=value)
    assert caught.value.param == "slo_tpot_ms"


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
