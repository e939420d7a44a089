"""Large, broken and foreign answers on their way through a real gate: others do not wait for them.

The loop's own turns are watched from inside of the gate's process, in CPU time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from bench.gate_cost import resident_mib
from bench.peers.processes import cpu_seconds
from integration.gate_process import (
    Call,
    WatchedGate,
    ask,
    chunk,
    inner_gate,
    made_up_engine,
    watched_gate,
)
from sluice_gate.gate import Gate

HELD_MS = 20.0
"""Rule: nothing holds the loop for longer."""
MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAMED = b'{"prompt": "a", "stream": true}'
Answer = Callable[[Call], Awaitable[None]]


@asynccontextmanager
async def rig(answer: Answer, directory: Path, *flags: str) -> AsyncIterator[WatchedGate]:
    """A gate before an engine that answers so."""
    async with (
        made_up_engine(answer) as url,
        watched_gate(url, directory, *flags) as watched,
    ):
        yield watched


def parts(begin: bytes, unit: bytes, end: bytes, num_bytes: int) -> Iterator[bytes]:
    """A line of about so many bytes, in parts of 1 MiB and less."""
    yield begin
    large = unit * (MIB // len(unit))
    for _ in range(num_bytes // len(large)):
        yield large
    yield end


def streaming(*lines: Iterator[bytes], kind: bytes = b"text/event-stream") -> Answer:
    """An engine that sends these once."""

    async def answer(call: Call) -> None:
        await call.write(HEAD % kind)
        for line in lines:
            for part in filter(None, line):
                await call.write(chunk(part))
        await call.write(b"0\r\n\r\n")

    return answer


PICTURE = (b'data: {"type": "image", "choices": [{"text": "', b"A" * 4096, b'"}]}\n\n')
PROBABILITY = b'{"token": " a", "bytes": [32, 97], "logprob": -0.%d},' % 10**9
LOGPROBS = (b'data: {"choices": [{"logprobs": [', PROBABILITY, b'{}], "text": "a"}]}\n\n')
IDS = (b'data: {"choices": [{"text": "a", "token_ids": [', b"12345, ", b"1]}]}\n\n")
QUOTES = (b'data: {"', b'"' * 64, b'"}\n\n')
LARGE: dict[str, Callable[[], list[Iterator[bytes]]]] = {
    "a picture of 64 MiB": lambda: [parts(*PICTURE, 64 * MIB)],
    "log-probabilities of 64 MiB": lambda: [parts(*LOGPROBS, 64 * MIB)],
    "3e6 token ids": lambda: [parts(*IDS, 21 * MIB)],
    "quotes": lambda: [parts(*QUOTES, 16 * MIB)],
    "small events": lambda: [parts(b"", EVENT, b"", 8 * MIB)],
    "broken events": lambda: [parts(b"", b"data: {\n", b"\n", 4 * MIB)],
    "empty lines": lambda: [parts(b"", b"\n" * 64, b"", 4 * MIB)],
    "nested lists": lambda: [
        parts(b"", b'data: {"choices": ' + b"[" * 60_000 + b"\n", b"", 8 * MIB)
    ],
    "events just small enough": lambda: [
        parts(
            b"",
            b'data: {"choices": [{"text": "a", "token_ids": [%s1]}]}\n' % (b"1," * 32_000),
            b"",
            8 * MIB,
        )
    ],
}


@pytest.mark.parametrize("name", LARGE)
async def test_no_answer_holds_the_loop(name: str, tmp_path: Path) -> None:
    large = streaming(*LARGE[name](), iter([LAST, DONE]))

    async def answer(call: Call) -> None:
        await (large(call) if call.path == "/v1/completions" else call.stream(b"{}", kind="x/y"))

    async with rig(answer, tmp_path) as watched:
        await ask(watched.gate.url, "GET", "/other")  # what is imported late is there
        since_s, waits_s = time.monotonic(), list[float]()
        cpu_s = cpu_seconds(watched.gate.process.pid)
        asked = asyncio.create_task(ask(watched.gate.url, body=STREAMED, keep=False))
        while not asked.done():
            sent_s = time.monotonic()
            assert (await ask(watched.gate.url, "GET", "/other")).body == b"{}"
            waits_s.append(time.monotonic() - sent_s)
        seen = await asked
        cpu_s = cpu_seconds(watched.gate.process.pid) - cpu_s
        assert seen.is_whole
        assert seen.num_bytes > 3 * MIB
        assert watched.longest_ms(since_s) < HELD_MS
        assert cpu_s < 4.0


async def test_a_large_event_costs_by_its_length_and_its_first_bytes_come_at_once(
    tmp_path: Path,
) -> None:
    """Four times the bytes took sixteen times the CPU time."""
    first_came = asyncio.Event()
    sizes = iter((8 * MIB, 8 * MIB, 32 * MIB))

    async def answer(call: Call) -> None:
        await call.write(HEAD % b"text/event-stream")
        await call.write(chunk(LOGPROBS[0]))
        await first_came.wait()
        for part in parts(*LOGPROBS, next(sizes)):
            await call.write(chunk(part))
        await call.write(b"0\r\n\r\n")

    async with rig(answer, tmp_path) as watched:
        taken_s = []
        for _ in range(3):
            before_s = cpu_seconds(watched.gate.process.pid)
            seen = await ask(
                watched.gate.url, body=STREAMED, keep=False, on_bytes=lambda _: first_came.set()
            )
            assert seen.is_whole
            taken_s.append(cpu_seconds(watched.gate.process.pid) - before_s)
        _, small_s, large_s = taken_s
        assert large_s < 8 * max(small_s, 0.05)


@pytest.mark.parametrize("does_read", [True, False], ids=["read", "not read"])
async def test_16_answers_of_48_mib_take_little_memory(does_read: bool, tmp_path: Path) -> None:
    """Embeddings in one piece; a client that does not read makes the engine wait."""
    taken = [0]

    async def answer(call: Call) -> None:
        size = 48 * MIB
        await call.write(HEAD % b"application/json" if does_read else HEAD % b"x/y")
        for part in parts(b'{"data": [', b"0.12345678, ", b"0]}", size):
            await call.write(chunk(part))
            taken[0] += len(part)
        await call.write(b"0\r\n\r\n")

    async with rig(answer, tmp_path) as watched:
        pid, url = watched.gate.process.pid, watched.gate.url
        await ask(url, "GET", "/other", keep=False)
        before_mib, most_mib, since_s = resident_mib(pid), 0.0, time.monotonic()
        taken[0] = 0
        if does_read:
            asked = [asyncio.create_task(ask(url, keep=False)) for _ in range(16)]
            while not all(each.done() for each in asked):
                most_mib = max(most_mib, resident_mib(pid))
                await asyncio.sleep(0.02)
            assert all(each.result().is_whole for each in asked)
            assert {each.result().num_bytes // MIB for each in asked} <= {47, 48}
        else:
            readers = [_stalled(url) for _ in range(16)]
            last = -1
            while taken[0] != last:
                last = taken[0]
                await asyncio.sleep(0.5)
            most_mib = resident_mib(pid)
            assert taken[0] < 16 * 16 * MIB  # kernel and gate together
            for each in readers:
                each.close()
        assert most_mib - before_mib < 100
        assert watched.longest_ms(since_s) < HELD_MS


def _stalled(url: str, body: bytes = b'{"prompt": "a"}') -> socket.socket:
    """A client that sends its request and reads nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    made.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


async def test_a_whole_answer_frees_its_place_also_if_its_client_does_not_read(
    tmp_path: Path,
) -> None:
    body = b'{"text": "%s"}' % (b"x" * 200_000)

    async def answer(call: Call) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async with rig(answer, tmp_path, "--initial-num-seqs", "1") as watched:
        stalled = [_stalled(watched.gate.url) for _ in range(3)]
        assert (await ask(watched.gate.url)).body == body
        for each in stalled:
            each.close()


@asynccontextmanager
async def books(answer: Answer) -> AsyncIterator[tuple[Gate, str]]:
    """A gate in this process before an engine that answers so, and its URL."""
    async with made_up_engine(answer) as url, inner_gate(url) as (gate, gate_url):
        yield gate, gate_url


def _ends(gate: Gate) -> dict[str, int]:
    """How many sequences have ended so."""
    return {reason: num for reason, num in gate.runtime.stats.finished.items() if num}


CUT: dict[str, bytes] = {
    "in one piece": b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n" + b'{"choices": [',
    "in chunks": HEAD % b"application/json" + chunk(b'{"choices": ['),
    "between events": HEAD % b"text/event-stream" + chunk(EVENT),
    "in an event": HEAD % b"text/event-stream" + chunk(EVENT + EVENT[:-9]),
    "in a chunk": HEAD % b"text/event-stream" + chunk(EVENT)[:-9],
    "of no known length": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + EVENT,
    "by nonsense": HEAD % b"text/event-stream" + chunk(EVENT) + b"no chunk\r\n\r\n",
}


@pytest.mark.parametrize("name", CUT)
async def test_an_answer_that_the_engine_cuts_is_incomplete_and_failed(name: str) -> None:
    """Its client cannot take it for a whole one."""

    async def answer(call: Call) -> None:
        await call.write(CUT[name])

    async with books(answer) as (gate, url):
        seen = await ask(url, body=STREAMED)
        assert seen.status in (200, 503)
        is_told = b'"error":{"message":"the engine closed the connection' in seen.body
        assert is_told or not seen.is_whole
        assert _ends(gate) == {"error": 1}


async def test_an_answer_whose_chunks_break_later_ends_with_its_connection() -> None:
    """Its reader was forgotten, and kept its place for ever."""
    begun = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.write(HEAD % b"audio/mpeg" + chunk(b"abc"))
        await begun.wait()
        await call.write(b"3\r\nabcXYZ\r\n")

    async with books(answer) as (gate, url):
        seen = await ask(url, on_bytes=lambda _: begun.set())
        assert (seen.status, seen.is_whole) == (200, False)
        assert _ends(gate) == {"error": 1}


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\n", b"no HTTP at all\r\n\r\n"])
async def test_an_engine_that_dies_in_front_of_its_answer_is_a_503(begun: bytes) -> None:
    async def answer(call: Call) -> None:
        await call.write(begun)

    async with books(answer) as (gate, url):
        seen = await ask(url)
        assert (seen.status, seen.is_whole) == (503, True)
        assert _ends(gate) == {"error": 1}


@pytest.mark.parametrize("status", [101, 600, 999])
async def test_a_status_that_http_does_not_have_is_a_500(status: int) -> None:
    async def answer(call: Call) -> None:
        await call.write(b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status)

    async with books(answer) as (gate, url):
        for method in ("POST", "GET"):
            seen = await ask(url, method)
            assert (seen.status, seen.is_whole) == (500, True)


async def test_a_header_that_is_no_text_is_a_500() -> None:
    async def answer(call: Call) -> None:
        await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: a\vb\r\n\r\n")

    async with books(answer) as (_, url):
        seen = await ask(url)
        assert (seen.status, seen.is_whole) == (500, True)


async def test_an_error_among_events_is_a_failed_answer() -> None:
    error = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'

    async def answer(call: Call) -> None:
        await call.stream(EVENT, error, DONE)

    async with books(answer) as (gate, url):
        seen = await ask(url, body=STREAMED)
        assert seen.body == EVENT + error + DONE
        assert _ends(gate) == {"error": 1}


async def test_a_cut_stream_of_messages_ends_with_an_error_that_its_clients_read() -> None:
    """Those of Anthropic go by the name of the event."""

    async def answer(call: Call) -> None:
        if call.path == "/v1/messages":
            await call.write(HEAD % b"text/event-stream" + chunk(b'data: {"type": "ping"}\n'))

    async with books(answer) as (gate, url):
        asked = b'{"messages": [], "stream": true}'
        seen = await ask(url, path="/v1/messages", body=asked)
        _, name, data = seen.body.decode().rstrip().rsplit("\n", 2)
        assert name == "event: error"
        told = json.loads(data.removeprefix("data: "))
        assert (told["type"], told["error"]["type"]) == ("error", "api_error")
        seen = await ask(url, path="/v1/messages/count_tokens", body=asked)
        assert seen.status == 503
        assert json.loads(seen.body)["error"]["type"] == "api_error"


def _event(**fields: object) -> bytes:
    return b"data: %s\n\n" % json.dumps(fields).encode()


def _line(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


MESSAGES = [
    _event(type="message_start", message={"usage": {"input_tokens": 9}}),
    *(_event(type="content_block_delta", delta={"text": "a"}) for _ in range(4)),
    _event(type="message_delta", usage={"output_tokens": 4}),
    _event(type="message_stop"),
]
LLAMACPP = [
    *(_event(index=0, content="a", stop=False, tokens_predicted=num + 1) for num in range(4)),
    _event(index=0, content="", stop=True, tokens_predicted=4, tokens_evaluated=9),
]
OLLAMA = [
    *(_line(response="a", done=False) for _ in range(4)),
    _line(response="", done=True, prompt_eval_count=9, eval_count=4),
]
SGLANG = [
    *(
        _event(text="a", meta_info={"prompt_tokens": 9, "completion_tokens": num + 1})
        for num in range(4)
    ),
    DONE,
]
CHAT = [*(_event(choices=[{"delta": {"content": "a"}}]) for _ in range(4)), DONE]
KNOWN = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/completion": LLAMACPP,
    "/infill": LLAMACPP,
    "/api/generate": OLLAMA,
    "/generate": SGLANG,
    "/v1/audio/transcriptions": CHAT,
}


@pytest.mark.parametrize("path", KNOWN)
async def test_first_tokens_and_gaps_are_counted_on_every_stream(path: str) -> None:
    events, seen_bytes, more = KNOWN[path], [0], asyncio.Condition()

    async def answer(call: Call) -> None:
        """Each event comes once its client has the one before it, so all gaps are seen."""
        kind = b"application/x-ndjson" if path.startswith("/api/") else b"text/event-stream"
        await call.write(HEAD % kind)
        for at, each in enumerate(events):
            sent = len(b"".join(events[:at]))
            async with more:
                await more.wait_for(partial(has_seen, sent))
            await call.write(chunk(each))
        await call.write(b"0\r\n\r\n")

    def on_bytes(num: int) -> None:
        async def tell() -> None:
            async with more:
                seen_bytes[0] = num
                more.notify_all()

        telling.append(asyncio.create_task(tell()))

    def has_seen(num: int) -> bool:
        return seen_bytes[0] >= num

    telling: list[asyncio.Task[None]] = []
    async with books(answer) as (gate, url):
        asked = b'{"%s": "a", "stream": true}' % (b"messages" if "/v1/" in path else b"prompt")
        assert (await ask(url, path=path, body=asked, on_bytes=on_bytes)).is_whole
        tick = gate.runtime.recorder.ticks.open
        assert (tick.ttft.n, tick.itl.n, tick.generated_tokens, tick.finished) == (1, 3, 4, 1)


async def test_the_tokens_of_an_answer_in_one_piece_are_counted_wherever_its_usage_stands() -> None:
    usage = b'"usage": {"prompt_tokens": 3, "completion_tokens": 7}'
    large = b'"prompt_logprobs": ["%s"]' % (b"x" * MIB)

    async def answer(call: Call) -> None:
        await call.write(HEAD % b"application/json")
        for part in (b'{"choices": [], ', usage, b", ", large, b"}"):
            await call.write(chunk(part))
        await call.write(b"0\r\n\r\n")

    async with books(answer) as (gate, url):
        assert (await ask(url)).is_whole
        tick = gate.runtime.recorder.ticks.open
        assert (tick.ttft.n, tick.itl.n, tick.generated_tokens, tick.finished) == (0, 0, 7, 1)
