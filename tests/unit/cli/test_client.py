"""A client's tries, against a server that breaks off."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from sluice.client import Outcome, request

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = '{"choices":[],"usage":{"completion_tokens":8}}'
EVENT, END = b"9\r\ndata: {}\n\r\n", b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def outcome(handlers: list[Handler]) -> tuple[Outcome, int]:
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
                "prompt": "x" * 900_000
            }  # more than the socket takes while nobody reads
            return await request(session, url, body), made


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


async def test_an_answer_that_breaks_off_is_cut_and_not_asked_for_twice() -> None:
    told, made = await outcome([breaks, answers])
    assert (told.result, told.retries, made) == ("cut", 0, 1)


@pytest.mark.parametrize(
    ("events", "result", "num_tokens", "num_gaps"),
    [
        (['{"choices":[{"text":"abcd"}]}'] * 2 + [USAGE], "ok", 8, 1),
        (['{"choices":[{"text":"a"}],"usage":null}'] * 3, "ok", 3, 2),
        ([], "cut", 0, 0),
        (['{"error": cut'], "failed", 1, 0),
    ],
)  # fmt: skip
async def test_tokens_are_those_that_the_usage_tells(
    events: list[str], result: str, num_tokens: int, num_gaps: int
) -> None:
    async def streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        text = b"".join(b"data: %s\n\n" % event.encode() for event in events) + b"data: [DONE]\n\n"
        writer.write(HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text))
        await writer.drain()

    found, _ = await outcome([streams])
    assert (found.result, found.num_tokens, len(found.gaps_s)) == (result, num_tokens, num_gaps)
