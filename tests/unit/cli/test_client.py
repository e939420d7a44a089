"""A client's tries, against a server that breaks off."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any, ClassVar

import aiohttp
import pytest
from sluice.measure.client import Outcome, Shape, read_stream, request

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = '{"choices":[],"usage":{"completion_tokens":8}}'
WHOLE = USAGE.encode()
EVENT, END = b"9\r\ndata: {}\n\r\n", b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def outcome(
    handlers: list[Handler], due_s: float | None = None, *, stream: bool = True
) -> tuple[Outcome, int]:
    """Of one request; each connection meets the next of `handlers`. And the connections made."""
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        handler, made = handlers[min(made, len(handlers) - 1)], made + 1
        await handler(reader, writer)
        writer.transport.abort()

    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    async with await asyncio.start_server(serve, sock=sock):
        port = sock.getsockname()[1]
        async with aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{port}/v1/completions"
            body: dict[str, object] = {
                "prompt": "x" * 900_000,  # more than the socket takes while nobody reads
                "stream": stream,
            }
            return await request(session, url, body, due_s=due_s), made


async def resets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes while the request is being written."""
    await reader.read(100)


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Closes once the request is there, as a server does whose last words crossed it."""
    await read_request(reader)
    writer.close()
    await writer.wait_closed()


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(HEAD + EVENT + END)
    await writer.drain()


async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Breaks off after a first token."""
    await read_request(reader)
    writer.write(HEAD + EVENT)
    await writer.drain()


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))


@pytest.mark.parametrize("gone", [resets, closes])
async def test_a_connection_that_closes_before_any_answer_is_tried_again(gone: Handler) -> None:
    told, made = await outcome([gone, answers])
    assert (told.result, told.retries, made) == ("ok", 1, 2)
    assert told.detail.startswith(("ClientOSError", "ServerDisconnectedError")), told.detail


@pytest.mark.parametrize(
    ("length", "result", "num_tokens"), [(len(WHOLE), "ok", 8), (len(WHOLE) + 1, "cut", 0)]
)
async def test_an_answer_in_one_piece_is_ok_once_all_of_it_is_there(
    length: int, result: str, num_tokens: int
) -> None:
    async def replies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Content-Length: %d\r\n\r\n" % length + WHOLE)
        await writer.drain()

    found, _ = await outcome([replies], stream=False)
    assert (found.result, found.num_tokens) == (result, num_tokens)


async def test_an_answer_that_breaks_off_is_cut_and_not_asked_for_twice() -> None:
    told, made = await outcome([breaks, answers])
    assert (told.result, told.retries, made) == ("cut", 0, 1)


@pytest.mark.parametrize(
    ("events", "result", "num_tokens"),
    [
        (['{"choices":[{"text":"abcd"}]}'] * 2 + [USAGE], "ok", 8),
        (['{"choices":[{"text":"a"}],"usage":null}'] * 3, "ok", 3),
        ([], "cut", 0),
        (['{"error": cut'], "failed", 1),
    ],
)  # fmt: skip
async def test_tokens_are_those_that_the_usage_tells(
    events: list[str], result: str, num_tokens: int
) -> None:
    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        text = b"".join(b"data: %s\n\n" % event.encode() for event in events) + b"data: [DONE]\n\n"
        writer.write(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text))
        await writer.drain()

    found, _ = await outcome([streams])
    assert (found.result, found.num_tokens, found.gaps_s) == (result, num_tokens, ())
    assert found.mean_gap_s == 0.0, "all of it was read at once"


async def test_a_page_of_another_charset_than_it_says_is_one_failed_request() -> None:
    async def refuses(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = b"HTTP/1.1 500 Oops\r\nContent-Type: text/html; charset=utf-8\r\n"
        writer.write(head + b"Content-Length: 5\r\n\r\nErr\xe9r")
        await writer.drain()

    found, _ = await outcome([refuses])
    assert (found.result, found.detail) == ("failed", "HTTP 500: Err\N{REPLACEMENT CHARACTER}r")


class Reads:
    """An answer of which these bytes are read, each at once."""

    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, *reads: bytes) -> None:
        self._reads = reads

    @property
    def content(self) -> "Reads":
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        for read in self._reads:
            yield read


async def told_by(*reads: bytes) -> Outcome:
    response: Any = Reads(*reads)
    return await read_stream(response, 0.0)


EVENT_OF_ONE = b'data: {"choices":[{"text":"a"}]}\n\n'


async def test_tokens_that_come_at_once_have_no_gaps_between_them() -> None:
    step = EVENT_OF_ONE * 4
    found = await told_by(EVENT_OF_ONE, step, step, b"data: [DONE]\n\n")
    assert (found.result, found.num_tokens, len(found.gaps_s)) == ("ok", 9, 2)
    assert found.mean_gap_s == pytest.approx(sum(found.gaps_s) / 8)


@pytest.mark.parametrize("end", [b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]"])
async def test_an_end_is_one_however_it_is_written_and_wherever_reads_part(end: bytes) -> None:
    whole = EVENT_OF_ONE * 3 + end
    for size in (1, 7, len(EVENT_OF_ONE), len(whole)):
        found = await told_by(*(whole[at : at + size] for at in range(0, len(whole), size)))
        assert (found.result, found.num_tokens) == ("ok", 3)


async def test_a_line_of_any_length_is_read() -> None:
    whole = b'data: {"generated_text":"%s"}\n\n' % (b"a" * 1_000_000)
    found = await told_by(*(whole[at : at + 65536] for at in range(0, len(whole), 65536)))
    assert (found.result, found.num_tokens) == ("ok", 1)


async def test_the_clock_of_a_request_that_is_sent_late_runs_from_when_it_was_due() -> None:
    found, _ = await outcome([answers], due_s=time.monotonic() - 100)
    assert 100 <= found.ttft_s <= found.total_s


def test_prompts_of_words_have_as_many_words_as_prompts_of_ids_have_tokens() -> None:
    ids, words = (Shape((5, 9), (4, 4), 1000, "m", words=words) for words in (False, True))
    for seed in range(20):
        told = ids.body(Random(seed))["prompt"]
        said = words.body(Random(seed))["prompt"]
        assert isinstance(told, list)
        assert isinstance(said, str)
        assert len(said.split()) == len(told)
