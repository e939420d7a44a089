"""Answers of a hostile engine: events, whole bodies, and bytes that are no HTTP."""

import asyncio
import json
from collections.abc import Iterator

import pytest
from fuzz.budget import fuzzed, spend
from fuzz.front import Front, front
from fuzz.words import words
from hypothesis import given
from hypothesis import strategies as st
from strangers.client import Reply, ask, request
from strangers.engine import Answer, stream

NAMES = words(
    "choices usage index text delta content role token_ids finish_reason",
    "prompt_tokens completion_tokens total_tokens input_tokens output_tokens details",
    "generated_tokens input_length prefill eval_count prompt_eval_count meta_info",
    "token generated_text done response message thinking type output_ids stop",
)
WHOLE = (1 << 62, -(1 << 62), 1 << 70, -1, 0, 1, 5)
NUMBERS = (*WHOLE, 1e308, -1e308, 0.5, float("nan"), float("inf"))
TEXTS = ("", "a", "\x1b[2J", "\u2028", "\ud800", "response.completed", ".delta", "NaN", "x" * 300)
leaf = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.none(), st.booleans())
value = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=12,
)
usage = st.dictionaries(st.sampled_from(NAMES[9:16]), leaf, max_size=4)
choice = st.dictionaries(st.sampled_from(NAMES[2:9]), leaf | usage, max_size=4)
event = st.one_of(
    st.fixed_dictionaries({"choices": st.lists(choice, max_size=3), "usage": usage | leaf}),
    st.dictionaries(st.sampled_from(NAMES), value, max_size=6),
    value,
).map(lambda body: json.dumps(body).encode())
line = st.one_of(event, st.binary(max_size=40), st.just(b"[DONE]"), st.just(b""))
lead = st.sampled_from(
    [b"data: ", b"data:", b"", b": ", b"event: a\ndata: ", b"DATA: ", b"\xef\xbb\xbfdata:"]
)
end = st.sampled_from([b"\n\n", b"\n", b"\r\n\r\n", b"\r", b""])
streamed = st.lists(st.tuples(lead, line, end).map(b"".join), max_size=8)
SSE = "text/event-stream"
TYPES = (SSE, "application/x-ndjson", f"{SSE}; charset=utf-8", "text/plain")
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/api/chat")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with front(tmp_path_factory.mktemp("answers")) as one:
        yield one


def asked(made: Front, path: str, answer: Answer, *, is_stream: bool) -> Reply:
    """What a client gets of the answer."""
    gate = made.living()
    made.engine.answers(answer)
    sent = request("POST", path, {"prompt": "a", "messages": [], "stream": is_stream})
    return asyncio.run(ask(gate.address, sent, limit_s=20))


def is_told(rest: bytes) -> bool:
    """Whether nothing follows the engine's bytes, or the one event that says that they were cut."""
    return rest == b"" or (
        b"the engine closed the connection" in rest and rest.count(b'"error"') == 1
    )


def test_every_stream_arrives_byte_for_byte_and_none_ends_the_gate(made: Front) -> None:
    @fuzzed
    @given(st.sampled_from(ROUTES), st.sampled_from(TYPES), streamed)
    def holds(path: str, kind: str, pieces: list[bytes]) -> None:
        reply = asked(made, path, stream(pieces, kind), is_stream=True)
        made.judge((path, pieces))
        sent = b"".join(pieces)
        assert (reply.status, reply.body[: len(sent)]) == (200, sent)
        assert is_told(reply.body[len(sent) :]), reply.body

    spend(holds)


def test_every_whole_answer_arrives_byte_for_byte_and_none_ends_the_gate(made: Front) -> None:
    @fuzzed
    @given(st.sampled_from(ROUTES), event | st.binary(max_size=99))
    def holds(path: str, body: bytes) -> None:
        told = [("content-type", "application/json"), ("content-length", str(len(body)))]
        reply = asked(made, path, Answer(headers=told, pieces=[body]), is_stream=False)
        made.judge((path, body))
        assert (reply.status, reply.body) == (200, body)

    spend(holds)


OK = b"HTTP/1.1 200 OK\r\n"
HEADS = [
    *(OK, OK, OK, b"", b"\r\n", b"\0\0\0\n", b"HTTP/1.1 200\r\n", b"HTTP/9.9 200 OK\r\n"),
    *(b"HTTP/1.1 %d X\r\n" % status for status in (101, 204, 304, 60, 999, 1000)),
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
]
FIELDS = [
    line.encode("latin-1") + b"\r\n"
    for line in (
        *(
            "content-length: 3",
            "content-length: -3",
            "content-length: 9",
            ": x",
            "x",
            " a",
            "x: \x01",
        ),
        *("transfer-encoding: chunked", "content-encoding: gzip", "x: \xff\x80", "set-cookie: a"),
        *("content-type: text/event-stream", "location: /x", "connection: close", "upgrade: x"),
    )
]
RESTS = (b"abc", b"", b"3\r\nabc\r\n0\r\n\r\n", b"zz\r\nabc", b"fffffffffffffffff\r\n", b"3\r\nab")
http = st.tuples(
    st.sampled_from(HEADS), st.lists(st.sampled_from(FIELDS), max_size=4), st.sampled_from(RESTS)
).map(lambda parts: parts[0] + b"".join(parts[1]) + b"\r\n" + parts[2])


def test_no_bytes_of_an_engine_bring_an_error_that_does_not_name_it(made: Front) -> None:
    @fuzzed
    @given(http | st.binary(max_size=60), st.booleans())
    def holds(sent: bytes, is_stream: bool) -> None:
        answer = Answer(is_raw=True, pieces=[sent], path="/v1/completions")
        reply = asked(made, "/v1/completions", answer, is_stream=is_stream)
        made.judge(sent)
        assert reply.status != 500 or b"the engine answered" in reply.body, (sent, reply.raw)

    spend(holds)
