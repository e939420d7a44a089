"""Connections that end are watched as those that go on: who reads nothing more is cut."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import h11
import pytest
import uvloop
from sluice_worker.config import ServerConfig
from sluice_worker.server.connection import (
    MIN_CHUNK_BYTES,
    NUM_CHUNKS,
    Connection,
    Incoming,
    connection_class,
)
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

WRITE_S = 0.3
ANSWER = bytes(32 << 20)
"""More than the buffers of both sockets hold."""


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """One large answer."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": ANSWER})


@asynccontextmanager
async def asked(
    header: str,
    high: int | None = None,
    *,
    app: ASGIApp = answers,
    receive_s: float = 60.0,
    head: str = "GET / HTTP/1.1\r\nHost: x\r\n",
) -> AsyncIterator[tuple[socket.socket, list[str]]]:
    """A client that has asked and read nothing, and the deadlines that it missed.

    `high`: bytes from which on the server's transport says that nobody reads. Leaving waits until
    the server has let go of the connection.
    """
    missed: list[str] = []
    bound = connection_class(
        ServerConfig(receive_timeout=receive_s, write_timeout=WRITE_S, connection_max_age=60.0),
        missed.append,
    )
    config = Config(app, http=bound, lifespan="off", log_config=None, timeout_keep_alive=1)
    state, gone, loop = ServerState(), asyncio.Event(), asyncio.get_running_loop()

    class Told(bound):  # type: ignore[valid-type, misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            transport.set_write_buffer_limits(high=high)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            gone.set()

    def connect() -> Connection:
        connection: Connection = Told(config, state, {})
        return connection

    server = await loop.create_server(connect, "127.0.0.1", 0)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.setblocking(False)
        await loop.sock_connect(client, server.sockets[0].getsockname())
        await loop.sock_sendall(client, f"{head}{header}\r\n".encode())
        try:
            yield client, missed
            await asyncio.wait_for(gone.wait(), 5)
        finally:
            for connection in state.connections:
                connection.transport.abort()  # or the loop would not close
            server.close()
            await server.wait_closed()


CLOSE = "Connection: close\r\n"
POST = "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n"
GET_LAST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("header", "high"),
    [(CLOSE, None), (CLOSE, len(ANSWER)), ("", len(ANSWER))],
    ids=["a large rest", "a rest under the high-water mark", "after the keep-alive time"],
)
def test_who_reads_nothing_of_a_last_answer_is_cut(header: str, high: int | None) -> None:
    async def stall() -> list[str]:
        async with asked(header, high) as (_, missed):
            pass
        return missed

    assert uvloop.run(stall()) == ["write"]


def test_a_slow_reader_of_a_last_answer_gets_all_of_it() -> None:
    async def read() -> tuple[int, list[str]]:
        loop, size = asyncio.get_running_loop(), 0
        async with asked(CLOSE) as (client, missed):
            began_s = loop.time()
            while data := await loop.sock_recv(client, 1 << 20):
                size += len(data)
                ahead_s = began_s + 3 * WRITE_S * size / len(ANSWER) - loop.time()
                await asyncio.sleep(max(0.0, ahead_s))
        return size, missed

    size, missed = uvloop.run(read())
    assert size > len(ANSWER)
    assert missed == []


async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer that reads nothing of its request."""
    await send(
        {"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


class Waits:
    """Nothing is answered until the client has left."""

    def __init__(self) -> None:
        self.has_begun, self.has_seen_it_leave = asyncio.Event(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        asyncio.get_running_loop().call_soon(self.has_begun.set)
        assert (await receive())["type"] == "http.disconnect"
        self.has_seen_it_leave = True


def test_an_answer_before_the_body_is_whole_leaves_no_deadline_behind() -> None:
    async def post() -> tuple[list[bytes], list[str]]:
        loop, heads = asyncio.get_running_loop(), []
        async with asked("", app=refuses, receive_s=0.2, head=POST) as (client, missed):
            heads.append(await loop.sock_recv(client, 12))
            await loop.sock_recv(client, 1024)
            await loop.sock_sendall(client, b"abcd")
            await asyncio.sleep(0.5)  # more than twice the deadline
            await loop.sock_sendall(client, GET_LAST)
            heads.append(await loop.sock_recv(client, 12))
        return heads, missed

    assert uvloop.run(post()) == ([b"HTTP/1.1 401"] * 2, [])


@pytest.mark.parametrize("behind", [b"\r\n", GET_LAST])
def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_behind_its_request(
    behind: bytes,
) -> None:
    async def leave() -> bool:
        loop, app = asyncio.get_running_loop(), Waits()
        async with asked("", app=app) as (client, _):
            await app.has_begun.wait()
            await loop.sock_sendall(client, behind)
            await asyncio.sleep(0.05)  # it is read
            client.shutdown(socket.SHUT_RDWR)
        return app.has_seen_it_leave

    assert uvloop.run(leave())


def taken(sizes: list[int], header: str = "Transfer-Encoding: chunked") -> int:
    """How much is taken of a body in chunks of these sizes, after another one on a connection."""
    incoming, num_bytes = Incoming(h11.SERVER), 0
    incoming.receive_data(f"POST / HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
    incoming.next_event()
    for size in sizes:
        body = bytes(size)
        is_chunked = "chunked" in header
        incoming.receive_data(b"%x\r\n%s\r\n" % (size, body) if is_chunked else body)
        event = incoming.next_event()
        assert isinstance(event, h11.Data)
        num_bytes += len(event.data)
    return num_bytes


@pytest.mark.parametrize("sizes", [[1], [MIN_CHUNK_BYTES - 1], [1 << 16] * NUM_CHUNKS + [1]])
def test_a_body_in_tiny_chunks_is_ended(sizes: list[int]) -> None:
    sizes = sizes[:-1] + sizes[-1:] * NUM_CHUNKS
    with pytest.raises(h11.RemoteProtocolError, match="smaller than 64 bytes on average"):
        taken(sizes)
    assert taken(sizes[:-1]) == sum(sizes[:-1])


@pytest.mark.parametrize(
    ("size", "header"),
    [(MIN_CHUNK_BYTES, "Transfer-Encoding: chunked"), (1, f"Content-Length: {3 * NUM_CHUNKS}")],
)
def test_other_bodies_are_taken_whole(size: int, header: str) -> None:
    assert taken([size] * 3 * NUM_CHUNKS, header) == size * 3 * NUM_CHUNKS


def test_who_offers_http_2_is_answered_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> bytes:
        async with asked("Connection: Upgrade, close\r\nUpgrade: h2c\r\n") as (client, _):
            return await asyncio.get_running_loop().sock_recv(client, 12)

    assert uvloop.run(ask()) == b"HTTP/1.1 200"
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"]
