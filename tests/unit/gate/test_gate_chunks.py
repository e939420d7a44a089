"""Tokens, choices and usage in streams as the engines send them, cut at any byte."""

import json
import tracemalloc
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.bounded import MAX_TOKENS, Numbers
from sluice_gate.count.chunks import MAX_AT_ONCE, MAX_EVENT_BYTES, Chunks, Framing, UsageScan


def sse(*events: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


DONE = b"data: [DONE]\n\n"


def text(token: str, index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "text": token, "logprobs": None, "finish_reason": None} | more
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "choices": [choice]}


def chat(delta: dict[str, Any], index: int = 0, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    both = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"usage": both | {"total_tokens": prompt + completion}}


def told(prompt: int, completion: int) -> dict[str, Any]:
    return {"id": "x", "choices": []} | usage(prompt, completion)


CHAT = (
    sse(chat({"role": "assistant", "content": ""}))
    + b": keep-alive\n\n"
    + sse(*(chat({"content": piece}) for piece in ("Hel", "lo", "\u00e9")))
    + sse(chat({}, finish_reason="stop"), told(9, 3))
    + DONE
)
COMPLETIONS_OF_TWO = (
    sse(text("a", 0), text("b", 1), text("c", 1), text("d", 0), text("", 1, finish_reason="stop"))
    + sse(text("e", 0, finish_reason="length"), told(4, 5))
    + DONE
)
CONTINUOUS = (
    sse(chat({"role": "assistant", "content": ""}) | usage(7, 0))
    + sse(chat({"content": "x"}) | usage(7, 1), chat({"content": "yz"}, 1) | usage(7, 3))
    + sse(chat({"content": "held back"}) | usage(7, 4))
    + sse(chat({"content": ""}, 1, finish_reason="stop") | usage(7, 4), told(7, 8))
    + DONE
)
TOKEN_IDS = sse(
    text("a", token_ids=[1], prompt_token_ids=[1, 2]),
    text("bc", token_ids=[2, 3]),
    text("", token_ids=[4], finish_reason="stop"),
)
RESPONSE_EVENTS: list[dict[str, Any]] = [
    {"type": "response.created", "response": {"id": "r", "usage": None}},
    {"type": "response.output_item.added", "item": {"type": "message"}},
    {"type": "response.reasoning_text.delta", "delta": "hm"},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.output_text.done", "text": "a"},
    {
        "type": "response.completed",
        "response": {"id": "r", "usage": {"input_tokens": 5, "output_tokens": 2}},
    },
]
RESPONSES = b"".join(
    b"event: %s\n%s" % (event["type"].encode(), sse(event)) for event in RESPONSE_EVENTS
)


def ndjson(*events: object) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


COUNTS = {"prompt_eval_count": 6, "eval_count": 3, "eval_duration": 10**9}
OLLAMA_GENERATE = ndjson(
    {"model": "m", "response": "a", "done": False},
    {"model": "m", "response": "", "thinking": "hm", "done": False},
    {"model": "m", "response": "", "done": True, "done_reason": "stop", "context": [1]} | COUNTS,
)
OLLAMA_CHAT = ndjson(
    {"message": {"role": "assistant", "content": "a"}, "done": False},
    {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False},
    {"message": {"role": "assistant", "content": "", "tool_calls": [{}]}, "done": False},
    {"message": {"role": "assistant", "content": ""}, "done": True} | COUNTS,
)


def tgi(index: int, token: str, **last: Any) -> dict[str, Any]:
    told = {"id": index, "text": token, "logprob": -0.1, "special": token == ""}
    return {"index": index, "token": told, "generated_text": None, "details": None} | last


DETAILS = {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 8}
TGI = sse(tgi(1, "a"), tgi(2, "b"), tgi(3, "", generated_text="ab", details=DETAILS))


def sglang(index: int, prompt: int, completion: int) -> dict[str, Any]:
    meta = {"id": "x", "finish_reason": None, "prompt_tokens": prompt}
    return {"text": "all", "index": index, "meta_info": meta | {"completion_tokens": completion}}


SGLANG = sse(sglang(0, 5, 1), sglang(1, 5, 2), sglang(0, 5, 3)) + DONE


def messages(*events: dict[str, Any]) -> bytes:
    return b"".join(b"event: %s\n%s" % (event["type"].encode(), sse(event)) for event in events)


def piece(kind: str, text: str) -> dict[str, Any]:
    return {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": f"{kind}_delta"} | {kind: text},
    }


BEGUN = {
    "id": "msg",
    "type": "message",
    "content": [],
    "usage": {"input_tokens": 9, "output_tokens": 1},
}
MESSAGES = messages(
    {"type": "message_start", "message": BEGUN},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    piece("thinking", "hm"),
    piece("text", "a"),
    piece("input_json", '{"a"'),
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
)


def completion(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "content": text, "tokens": [], "stop": False, "id_slot": 0} | more


ENDED: dict[str, Any] = {"stop": True, "tokens_predicted": 4, "tokens_evaluated": 8}
LLAMACPP = sse(
    completion("", tokens_predicted=0, prompt_progress={"total": 8}),
    completion("a", tokens_predicted=1, tokens_evaluated=8),
    completion("bc", tokens_predicted=3, tokens_evaluated=8),
    completion("", generation_settings={"stop": []}, timings={"predicted_n": 4}, **ENDED),
)
OLD_LLAMACPP = sse(completion("a"), completion("b"), completion("", **ENDED))
TRANSCRIPT = (
    sse(
        {"object": "transcription.chunk", "choices": [{"delta": {"content": " a"}}]},
        {"object": "transcription.chunk", "choices": [{"delta": {"content": " b"}}]},
    )
    + DONE
)
SPEECH = sse(
    {"type": "speech.audio.delta", "audio": "AAAA"},
    {"type": "speech.audio.done", "usage": {"input_tokens": 4, "output_tokens": 1}},
)
LARGE = "x" * (MAX_EVENT_BYTES + 1)
LARGE_CHAT = (
    sse(chat({"content": "a"}), chat({"content": LARGE}), chat({"content": "b"}))
    + b": %s\n\n" % LARGE.encode()
    + sse(told(9, 3))
    + DONE
)
LARGE_SGLANG = sse(sglang(0, 5, 1), {"text": LARGE} | sglang(0, 5, 4) | {"text": LARGE}) + DONE
LARGE_END = sse(
    *RESPONSE_EVENTS[:4],
    {
        "type": "response.completed",
        "response": {"output": LARGE, "usage": {"input_tokens": 5, "output_tokens": 3}},
    },
)

STREAMS: list[tuple[Framing, bytes, list[int], tuple[int, int] | None, bool, bool]] = [
    ("sse", CHAT, [0, 0, 0], (9, 3), False, True),
    ("sse", CHAT.replace(b"\n", b"\r\n"), [0, 0, 0], (9, 3), False, True),
    ("sse", CHAT.replace(b"data: ", b"data:"), [0, 0, 0], (9, 3), False, True),
    ("sse", COMPLETIONS_OF_TWO, [0, 1, 1, 0, 0], (4, 5), False, True),
    ("sse", CONTINUOUS, [0, 1, 1, 1, 0, 0, 0, 1], (7, 8), True, True),
    ("sse", TOKEN_IDS, [0, 0, 0, 0], None, True, False),
    ("sse", RESPONSES, [0, 0], (5, 2), False, True),
    ("ndjson", OLLAMA_GENERATE, [0, 0], (6, 3), False, True),
    ("ndjson", OLLAMA_CHAT, [0, 0, 0], (6, 3), False, True),
    ("sse", TGI, [0, 0, 0], (8, 3), True, True),
    ("sse", SGLANG, [0, 1, 1, 0, 0], (5, 5), True, True),
    ("sse", MESSAGES, [0, 0, 0], (9, 3), False, True),
    ("sse", LLAMACPP, [0, 0, 0, 0], (8, 4), True, True),
    ("sse", OLD_LLAMACPP, [0, 0], (8, 4), False, True),
    ("sse", TRANSCRIPT, [0, 0], None, False, True),
    ("sse", SPEECH, [0], (4, 1), False, True),
    ("sse", LARGE_CHAT, [0, 0, 0], (9, 3), False, True),
    ("sse", LARGE_SGLANG, [0, 0, 0, 0], (5, 4), True, True),
    ("sse", LARGE_END, [0, 0, 0], (5, 3), False, True),
]
kinds = ["chat", "crlf", "no space", "two", "continuous", "ids", "responses"]
kinds += ["generate", "ollama chat", "tgi", "sglang", "messages", "llama.cpp", "old llama.cpp"]
kinds += ["transcript", "speech", "large event", "large sglang", "large end"]


@pytest.mark.parametrize(
    ("framing", "stream", "indexes", "told", "is_exact", "is_done"), STREAMS, ids=kinds
)
def test_a_stream_brings_its_tokens_and_its_usage(
    framing: Framing,
    stream: bytes,
    indexes: list[int],
    told: tuple[int, int] | None,
    is_exact: bool,
    is_done: bool,
) -> None:
    chunks = Chunks(framing)
    assert chunks.feed(stream) == Counter(indexes)
    assert chunks.usage == told
    assert chunks.is_exact is is_exact
    assert chunks.is_done is is_done
    assert chunks.error is None


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 1 << 20), max_size=20))
def test_where_the_network_cuts_a_stream_changes_nothing(
    stream: tuple[Framing, bytes, list[int], tuple[int, int] | None, bool, bool], cuts: list[int]
) -> None:
    framing, data, indexes, told, is_exact, is_done = stream
    chunks, got = Chunks(framing), Counter[int]()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in zip(edges, edges[1:], strict=False):
        got.update(chunks.feed(data[start:end]))
    assert got == Counter(indexes)
    assert (chunks.usage, chunks.is_exact, chunks.is_done) == (told, is_exact, is_done)


def test_a_token_counts_once_its_event_has_ended() -> None:
    chunks = Chunks("sse")
    event = sse(chat({"content": "x"}))
    assert [chunks.feed(event[i : i + 1]) for i in range(len(event))].count({0: 1}) == 1
    assert chunks.feed(event[:-2]) == {}
    assert chunks.feed(event[-2:]) == {0: 1}


def test_a_token_whose_characters_are_not_whole_counts() -> None:
    """An emoji is several tokens: vLLM sends an event with an empty text for each but the last."""
    chunks = Chunks("sse")
    assert chunks.feed(sse(chat({"content": ""}), chat({"content": "\U0001f600"}))) == {0: 2}
    assert chunks.feed(sse(text(""), text("\U0001f600"))) == {0: 2}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "refusal"])
def test_reasoning_is_tokens(name: str) -> None:
    assert Chunks("sse").feed(sse(chat({"role": "assistant", name: "hm"}))) == {0: 1}


def test_a_tool_call_is_tokens() -> None:
    call = {"index": 0, "function": {"arguments": "{"}}
    assert Chunks("sse").feed(sse(chat({"tool_calls": [call]}))) == {0: 1}


def test_the_whole_usage_in_the_last_event_is_not_its_own() -> None:
    """llama.cpp's completions tell it so, with the finish reason."""
    chunks = Chunks("sse")
    stream = sse(text("a"), text("b"), text("", finish_reason="stop") | usage(6, 2)) + DONE
    assert chunks.feed(stream) == {0: 2}
    assert chunks.usage == (6, 2)
    assert not chunks.is_exact


@pytest.mark.parametrize("line", [b'{"x": {"message": "m"}}', b"{", b"[1]", b'"x"', b"", b"\xff"])
def test_what_is_no_event_of_a_dialect_brings_nothing(line: bytes) -> None:
    for chunks in (Chunks("sse"), Chunks("ndjson")):
        assert chunks.feed(b"data: " + line + b"\n\n" + line + b"\n") == {}
        assert not chunks.is_done
        assert chunks.usage is None


@given(st.sampled_from(["sse", "ndjson"]), st.binary(max_size=200))
def test_no_bytes_break_a_stream(framing: Framing, data: bytes) -> None:
    assert sum(Chunks(framing).feed(b"data: " + data + b"\n").values()) >= 0


ENDS = (
    b"[DONE]",
    b'"stop"',
    b'"length"',
    b'generated_text": "',
    b'"done": true',
    b"completed",
    b"message_stop",
    b'"stop": true',
    b".done",
)
"""Words by which each of the streams tells that it, or one of its choices, has ended."""


@pytest.mark.parametrize("stream", STREAMS, ids=kinds)
def test_a_stream_is_cut_until_its_engine_has_ended_it(
    stream: tuple[Framing, bytes, list[int], tuple[int, int] | None, bool, bool],
) -> None:
    framing, data, *_ = stream
    lines = data.split(b"\n")
    first_end = next(i for i, line in enumerate(lines) if any(end in line for end in ENDS))
    for num in (0, *range(1, first_end + 1)):
        chunks = Chunks(framing)
        chunks.feed(b"\n".join(lines[:num]))
        chunks.close()
        assert chunks.is_cut, num
    whole = Chunks(framing)
    whole.feed(data.rstrip(b"\n"))
    whole.close()
    assert not whole.is_cut
    assert whole.error is None


def test_a_stream_of_which_only_one_choice_has_ended_is_cut() -> None:
    chunks = Chunks("sse")
    chunks.feed(sse(text("a", 0), text("b", 1), text("", 1, finish_reason="stop")))
    assert chunks.is_cut
    chunks.feed(sse(text("", 0, finish_reason="length")))
    assert not chunks.is_cut


@pytest.mark.parametrize(
    ("framing", "stream"),
    [("sse", sse({"text": "a"})), ("sse", b"data: a"), ("ndjson", b'{"text": "a"}')],
)
def test_a_stream_that_nobody_reads_here_is_never_cut(framing: Framing, stream: bytes) -> None:
    chunks = Chunks(framing)
    chunks.feed(stream)
    chunks.close()
    assert not chunks.is_cut


@pytest.mark.parametrize(
    ("framing", "event", "status"),
    [
        ("sse", {"error": {"message": "m", "type": "InternalServerError", "code": 500}}, 500),
        ("sse", {"error": {"message": "m", "code": 503}}, 503),
        ("sse", {"error": {"message": "m", "code": 400}}, 400),
        ("sse", {"error": {"message": "m", "code": "server_error"}}, 500),
        ("sse", {"error": "m", "error_type": "generation"}, 500),
        ("sse", {"type": "error", "message": "m"}, 500),
        ("sse", {"type": "response.failed", "response": {"error": {"code": "x"}}}, 500),
        ("sse", {"type": "error", "error": {"type": "api_error"}}, 500),
        ("sse", text("", finish_reason="abort"), 500),
        ("ndjson", {"error": "an error was encountered while running the model"}, 500),
    ],
)
def test_an_error_in_a_stream_is_told_with_its_status(
    framing: Framing, event: dict[str, Any], status: int
) -> None:
    """Also where the usual end follows, as vLLM sends it."""
    chunks = Chunks(framing)
    chunks.feed(sse(event) + DONE if framing == "sse" else ndjson(event))
    chunks.close()
    assert chunks.error == status


def test_no_event_of_a_sound_stream_is_an_error() -> None:
    nothing: tuple[object, ...] = (None, "", {})
    for error in nothing:
        chunks = Chunks("sse")
        chunks.feed(sse(text("a") | {"error": error}, text("", finish_reason="stop")))
        assert chunks.error is None


@pytest.mark.parametrize("number", [2**62, -(2**62), -5])
def test_numbers_of_an_engine_are_bounded(number: int) -> None:
    for event in (
        chat({"content": "x"}, index=number) | usage(number, number),
        sglang(number, number, number),
        completion("x", index=number, tokens_predicted=number, tokens_evaluated=number),
        {"message": {"content": "x"}, "done": True, "eval_count": number},
        told(number, number),
    ):
        chunks = Chunks("sse")
        assert 0 <= sum(chunks.feed(sse(event)).values()) <= MAX_AT_ONCE
        assert chunks.usage is None or all(0 <= each <= MAX_TOKENS for each in chunks.usage)


@pytest.mark.parametrize("size", [1 << 10, 1 << 14, 1 << 16])
def test_an_event_of_any_length_is_not_kept(size: int) -> None:
    """16 MiB in one line, in pieces as the network brings them."""
    chunks, piece = Chunks("sse"), b"1,".ljust(size, b"1")
    chunks.feed(b'data: {"choices": [{"text": "a", "token_ids": [')
    tracemalloc.start()
    for _ in range((16 << 20) // size):
        assert chunks.feed(piece) == {}
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 8 * MAX_EVENT_BYTES
    assert chunks.feed(b'1]}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n') == {0: 1}
    assert chunks.usage == (3, 2)
    assert chunks.feed(sse(chat({"content": "x"}))) == {0: 1}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"choices": [{"text": "a"}]} | usage(3, 2), (3, 2)),
        (
            {"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 3, "total_tokens": 3}},
            (3, 0),
        ),
        ({"results": [], "usage": {"total_tokens": 3}}, (3, 0)),
        ({"output": [], "usage": {"input_tokens": 3, "output_tokens": 2}}, (3, 2)),
        ({"response": "a", "done": True, "prompt_eval_count": 3, "eval_count": 2}, (3, 2)),
        ({"response": "a", "done": True, "eval_count": 2}, (0, 2)),
        ({"embeddings": [[0.1]], "prompt_eval_count": 3}, (3, 0)),
        (
            {"generated_text": "a", "details": {"generated_tokens": 2, "prefill": [{}, {}, {}]}},
            (0, 2),
        ),
        ({"text": "a", "meta_info": {"prompt_tokens": 3, "completion_tokens": 2}}, (3, 2)),
        ({"generated_text": "a"}, None),
        ({"error": {"message": "m"}}, None),
        ([[0.1, 0.2]], None),
        ({"usage": None}, None),
        ({"usage": {"prompt_tokens": "three"}}, None),
    ],
)
def test_usage_of_an_answer_in_one_piece(answer: object, told: tuple[int, int] | None) -> None:
    numbers = UsageScan()
    numbers.feed(json.dumps(answer).encode())
    assert numbers.usage == told


@given(
    st.sampled_from(["front", "middle", "end"]),
    st.integers(0, 300),
    st.lists(st.integers(0, 40_000), max_size=20),
)
def test_usage_is_found_wherever_it_stands_and_the_network_cuts(
    where: str, spaces: int, cuts: list[int]
) -> None:
    large = {
        "prompt_logprobs": [{"1": {"logprob": -0.5, "decoded_token": '"total_tokens": 7'}}] * 200
    }
    said = {"choices": [{"text": 'a "prompt_tokens": 9, "completion_tokens": 9}' * 9}]}
    parts = {
        "front": usage(123, 45) | said | large,
        "middle": said | usage(123, 45) | large,
        "end": large | said | usage(123, 45),
    }
    data, numbers = json.dumps(parts[where]).encode() + b" " * spaces, UsageScan()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in zip(edges, edges[1:], strict=False):
        numbers.feed(data[start:end])
    assert numbers.usage == (123, 45)


@pytest.mark.parametrize("body", [b"", b"{", b"<html>", b"\xff\xfe", b"[" * 100_000, b'"' * 9999])
def test_an_answer_that_is_no_object_tells_nothing(body: bytes) -> None:
    numbers = UsageScan()
    numbers.feed(body)
    assert numbers.usage is None


NO_COUNTS = ["4611686018427387904", "-5", "1e18", "0.5", '"x"', "[]", "true"]


@pytest.mark.parametrize("value", NO_COUNTS)
def test_a_number_that_is_no_count_is_left_out_of_a_usage(value: str) -> None:
    left_out = Counter[str]()
    body = f'{{"usage": {{"prompt_tokens": 3, "completion_tokens": {value}}}}}'.encode()
    scan = UsageScan(Numbers("usage", left_out))
    scan.feed(body)
    assert scan.usage == (3, 0)
    assert left_out == {"usage": 1}


@pytest.mark.parametrize("value", NO_COUNTS)
def test_an_event_with_a_hostile_usage_still_brings_its_token(value: str) -> None:
    chunks = Chunks("sse")
    usage = f'"usage": {{"completion_tokens": {value}}}'
    event = f'{{"choices": [{{"index": {value}, "text": "a"}}], {usage}}}'
    assert chunks.feed(f"data: {event}\n\n".encode()) == {0: 1}


def test_tokens_that_are_claimed_and_not_sent_take_no_memory() -> None:
    chunks = Chunks("sse")
    for claimed in (1, 1 << 30):
        usage = f'"usage": {{"completion_tokens": {claimed}}}'
        event = f'data: {{"choices": [{{"index": 0, "text": "a"}}], {usage}}}\n\n'
        assert sum(chunks.feed(event.encode()).values()) <= MAX_AT_ONCE
