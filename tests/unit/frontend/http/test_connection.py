"""Connections that end are watched as those that go on: who reads nothing more is cut."""

import asyncio
import contextlib
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import h11
import pytest
import uvloop
from sluice_frontend.config import ServerConfig
from sluice_frontend.http import connection as module
from sluice_frontend.http.clients import room_for
from sluice_frontend.http.connection import (
    MAX_HEADER_BYTES,
    MIN_CHUNK_BYTES,
    NUM_CHUNKS,
    Connection,
    Incoming,
    connection_class,
)
from sluice_frontend.http.guards import ReadReply
from sluice_frontend.process import server as process
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

WRITE_S = 0.5
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
        100,
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


async def read_slowly(intervals: int, most: int) -> tuple[int, list[str], bool]:
    """The answer, read evenly in so many of WRITE_S, at `most` bytes at once; how much came, the
    deadlines that were missed, and whether the connection was ended in order."""
    loop, size, is_whole = asyncio.get_running_loop(), 0, False
    async with asked(CLOSE) as (client, missed):
        with contextlib.suppress(ConnectionResetError):
            began_s = loop.time()
            while data := await loop.sock_recv(client, most):
                size += len(data)
                ahead_s = began_s + intervals * WRITE_S * size / len(ANSWER) - loop.time()
                await asyncio.sleep(max(0.0, ahead_s))
            is_whole = True
    return size, missed, is_whole


def test_a_slow_reader_of_a_last_answer_gets_all_of_it() -> None:
    size, missed, is_whole = uvloop.run(read_slowly(3, 1 << 20))
    assert is_whole
    assert size > len(ANSWER)
    assert missed == []


def test_who_reads_too_little_of_an_answer_at_a_time_is_cut() -> None:
    """Else a byte for each interval would keep it for ever."""
    size, missed, _ = uvloop.run(read_slowly(80, 1 << 18))
    assert size < len(ANSWER)
    assert missed == ["write"]


def test_a_reply_is_under_way_until_it_is_read() -> None:
    ended = asyncio.Event()

    async def replies(scope: Scope, receive: Receive, send: Send) -> None:
        await ReadReply(ANSWER)(scope, receive, send)
        ended.set()

    async def read() -> tuple[bool, int]:
        loop, size = asyncio.get_running_loop(), 0
        async with asked(CLOSE, app=replies) as (client, _):
            await loop.sock_recv(client, 12)
            await asyncio.sleep(0.1)
            was_over = ended.is_set()
            while data := await loop.sock_recv(client, 1 << 20):
                size += len(data)
            await asyncio.wait_for(ended.wait(), 5)
        return was_over, size

    was_over, size = uvloop.run(read())
    assert not was_over
    assert size > len(ANSWER)


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


async def listens(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers once the body is whole."""
    while (await receive()).get("more_body"):
        pass
    await refuses(scope, receive, send)


def test_headers_have_a_deadline_of_their_own_and_a_body_the_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HEADER_S", 0.2)

    async def send(head: str, app: ASGIApp, rest: bytes = b"") -> tuple[bytes, list[str]]:
        loop = asyncio.get_running_loop()
        async with asked("", app=app, head=head) as (client, missed):
            await asyncio.sleep(0.5)  # more than twice the deadline
            if rest:
                await loop.sock_sendall(client, rest)
            with contextlib.suppress(ConnectionError):
                return await loop.sock_recv(client, 12), missed
        return b"", missed

    closed = POST.replace("\r\n", "\r\nConnection: close\r\n", 1)
    assert uvloop.run(send("GET / HTTP/1.1\r\nHost", listens)) == (b"", ["receive"])
    for app, status in ((listens, b"HTTP/1.1 401"), (refuses, b"HTTP/1.1 401")):
        assert uvloop.run(send(closed, app, b"abcd")) == (status, [])


@asynccontextmanager
async def bounded(most: int, app: ASGIApp) -> AsyncIterator[tuple[ServerState, tuple[str, int]]]:
    """A port for at most so many connections, and its address."""
    config = Config(app, http="h11", lifespan="off", log_config=None)
    bound = connection_class(ServerConfig(), lambda reason: None, most)
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: bound(config, state, {}), "127.0.0.1", 0)
    try:
        yield state, server.sockets[0].getsockname()
    finally:
        for connection in list(state.connections):
            connection.transport.abort()
        server.close()
        await server.wait_closed()


class Clients(AsyncExitStack):
    """Sockets that are connected to one address."""

    async def connect(self, address: tuple[str, int], sent: bytes) -> socket.socket:
        loop, client = asyncio.get_running_loop(), self.enter_context(socket.socket())
        client.setblocking(False)
        await loop.sock_connect(client, address)
        await loop.sock_sendall(client, sent)
        await asyncio.sleep(0.02)  # it is accepted and read
        return client


async def told(client: socket.socket) -> bytes:
    """What it has been told; b"" if its connection was closed, b"?" if neither."""
    loop = asyncio.get_running_loop()
    try:
        return await asyncio.wait_for(loop.sock_recv(client, 12), 0.2)
    except ConnectionError:
        return b""
    except TimeoutError:
        return b"?"


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
UNENDING = b"GET / HTTP/1.1\r\nHost: " + b"x" * 20_000


def test_a_newcomer_takes_the_place_of_who_has_waited_longest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def crowd() -> tuple[list[bytes], list[bytes], int]:
        async with bounded(3, refuses) as (state, address), Clients() as clients:
            idle = await clients.connect(address, GET)
            held = [await clients.connect(address, UNENDING) for _ in range(2)]
            used = await told(idle)  # waits longest, as it was answered before the others came
            newcomers = []
            for _ in range(2):
                newcomers.append(await told(await clients.connect(address, GET)))
            while await told(idle) not in (b"", b"?"):
                pass
            left = [await told(client) for client in (idle, *held)]
            return [used, *newcomers], left, len(state.connections)

    answers, left, num_open = uvloop.run(crowd())
    assert answers == [b"HTTP/1.1 401"] * 3
    assert left == [b"", b"", b"?"]
    assert num_open == 3
    (line,) = [entry for entry in caplog.records if "limit" in entry.getMessage()]
    assert line.__dict__["max_connections"] == 3


def test_no_request_that_is_under_way_makes_room_for_a_newcomer() -> None:
    async def crowd() -> tuple[bytes, list[bytes]]:
        async with bounded(2, Waits()) as (_, address), Clients() as clients:
            busy = [await clients.connect(address, GET) for _ in range(2)]
            newest = await told(await clients.connect(address, GET))
            return newest, [await told(client) for client in busy]

    assert uvloop.run(crowd()) == (b"", [b"?", b"?"])


def test_headers_that_go_on_for_over_32_kib_are_refused() -> None:
    async def send(num_bytes: int) -> bytes:
        async with bounded(2, refuses) as (_, address), Clients() as clients:
            head = b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"x" * num_bytes
            return await told(await clients.connect(address, head))

    assert uvloop.run(send(MAX_HEADER_BYTES - 100)) == b"?"
    assert uvloop.run(send(MAX_HEADER_BYTES)) == b"HTTP/1.1 400"


def test_there_is_room_for_all_requests_and_files_for_all_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = process.max_connections(ServerConfig(max_num_queued_reqs=1000), 8)
    assert most == 8 + 1000 + 2 * 64 + process.MAX_IDLE
    limits = [256, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.__setitem__(0, new[0]))
    others = room_for(process.MAX_ADMIN) + process.OTHER_FILES + 9
    assert process._with_files(most, 9) == most
    assert limits[0] == room_for(most) + others
    limits[:] = [1024, 1024]
    assert room_for(process._with_files(most, 9)) in (1024 - others, 1024 - others - 1)
    limits[:] = [resource.RLIM_INFINITY] * 2
    assert process._with_files(most, 9) == most


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


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize(
    "headers",
    [[], [("content-length", "9")], [("transfer-encoding", "chunked")], [("x", "chunked")]],
)
def test_pieces_of_an_answer_are_framed_as_h11_does(
    headers: list[tuple[str, str]], method: bytes, version: bytes
) -> None:
    sent = []
    for kind in (h11.Connection, module.Incoming):
        connection = kind(h11.SERVER)
        connection.receive_data(b"%s / HTTP/%s\r\nhost: x\r\n\r\n" % (method, version))
        while connection.next_event() is not h11.PAUSED and connection.our_state is h11.IDLE:
            pass
        body = [b"", b"abc", b"", b"defghi"] if method == b"GET" else [b""]
        start = h11.Response(status_code=200, headers=headers)
        answer = [start, *(h11.Data(data=each) for each in body), h11.EndOfMessage()]
        sent.append(b"".join(connection.send(each) or b"" for each in answer))
    assert sent[0] == sent[1]


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


def test_who_dials_ahead_is_not_late_with_headers_before_their_first_byte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HEADER_S", 0.2)

    async def dial(sent: bytes) -> bytes:
        async with bounded(9, listens) as (_, address), Clients() as clients:
            client = await clients.connect(address, sent)
            await asyncio.sleep(0.4)  # twice as long as headers may take
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(client, GET[len(sent) :])
            return await told(client)

    assert uvloop.run(dial(b"")) == b"HTTP/1.1 401", "which this application answers"
    assert uvloop.run(dial(GET[:5])) == b""


@pytest.mark.parametrize(
    ("size", "header"),
    [(MIN_CHUNK_BYTES, "Transfer-Encoding: chunked"), (1, f"Content-Length: {3 * NUM_CHUNKS}")],
)
def test_other_bodies_are_taken_whole(size: int, header: str) -> None:
    assert taken([size] * 3 * NUM_CHUNKS, header) == size * 3 * NUM_CHUNKS


def test_a_request_with_two_lengths_is_the_last_of_its_connection() -> None:
    """Where a proxy before us has the body end by the other, what is behind is another client's."""
    lengths = "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n"
    hidden = "\r\n2\r\n{}\r\n0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n"

    async def ask() -> bytes:
        head = f"POST / HTTP/1.1\r\nHost: x\r\n{lengths}"
        answer, loop = b"", asyncio.get_running_loop()
        async with asked(hidden, head=head) as (client, _):
            while part := await loop.sock_recv(client, 1 << 16):
                answer += part
        return answer

    answer = uvloop.run(ask())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"contradict each other" in answer


def test_who_offers_http_2_is_answered_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> bytes:
        async with asked("Connection: Upgrade, close\r\nUpgrade: h2c\r\n") as (client, _):
            return await asyncio.get_running_loop().sock_recv(client, 12)

    assert uvloop.run(ask()) == b"HTTP/1.1 200"
    assert not [entry for entry in caplog.records if entry.levelname == "WARNING"]


async def connected(
    clients: Clients, source: str, to: tuple[str, int], sent: bytes
) -> socket.socket:
    """A client that comes from the address `source`, and has sent this."""
    loop, client = asyncio.get_running_loop(), clients.enter_context(socket.socket())
    client.setblocking(False)
    client.bind((source, 0))
    await loop.sock_connect(client, to)
    await loop.sock_sendall(client, sent)
    await asyncio.sleep(0.02)  # it is accepted and read
    return client


def test_beside_busy_connections_of_one_address_another_gets_in() -> None:
    async def crowd() -> tuple[list[bytes], list[bytes]]:
        async with bounded(20, Waits()) as (_, address), Clients() as clients:
            busy = [await connected(clients, "127.0.0.1", address, GET) for _ in range(22)]
            others = [await connected(clients, "127.0.0.2", address, GET) for _ in range(6)]
            return [await told(each) for each in busy], [await told(each) for each in others]

    busy, others = uvloop.run(crowd())
    assert busy == [b"?"] * 20 + [b""] * 2
    assert others == [b"?"] * 4 + [b""] * 2, "of the five that are kept, one is for a third"


def test_idle_connections_of_one_address_yield_to_those_of_another() -> None:
    async def crowd() -> Counter[str]:
        async with bounded(8, refuses) as (state, address), Clients() as clients:
            for source in ("127.0.0.1", "127.0.0.2"):
                for _ in range(8):
                    await connected(clients, source, address, GET)
            return Counter(one.address for one in state.connections if isinstance(one, Connection))

    held = uvloop.run(crowd())
    assert held.total() <= room_for(8)
    assert held["127.0.0.2"] >= 4, held
