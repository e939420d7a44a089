"""*Rim*: a real gate, a made-up engine before which it stands, and clients that see raw bytes."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engines.clients import until
from integration.worker_process import ON_LOOPBACK, Worker, gate_of
from sluice_frontend.http.guards import Inflight
from sluice_frontend.process.app import admin_app
from sluice_frontend.process.server import listening as listening_ports
from sluice_gate.app import api_app, metrics_of
from sluice_gate.config import parse
from sluice_gate.gate import Gate

TESTS = Path(__file__).parents[1]
MODELS = b'{"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}'
LIMIT_S = 60.0
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class WatchedGate:
    """A gate whose event loop is watched from inside of its process."""

    gate: Worker
    held: Path

    def longest_ms(self, since_s: float) -> float:
        """The longest that one turn of its loop took since then (monotonic), in CPU time: so a busy
        machine changes nothing."""
        lines = [json.loads(line) for line in self.held.read_text().splitlines()]
        return max((line["ms"] for line in lines if line["at_s"] >= since_s), default=0.0)


@asynccontextmanager
async def watched_gate(upstream: str, directory: Path, *flags: str) -> AsyncIterator[WatchedGate]:
    """A gate that tells how long its loop was held, beside an engine in this loop."""
    held = directory / "held"
    module = ("integration.gate_watched", str(held))
    environ = {"PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
    made = gate_of(upstream, directory, *flags, module=module, environ=environ)
    with ExitStack() as stack:
        gate = await asyncio.to_thread(stack.enter_context, made)
        yield WatchedGate(gate, held)


@asynccontextmanager
async def inner_gate(upstream: str, *flags: str) -> AsyncIterator[tuple[Gate, str]]:
    """A gate in this process, for a look into its books, with its URL."""
    config = parse(["--upstream", upstream, *ON_LOOPBACK, *flags])
    async with listening_ports(config.server, config.model_name, 64) as ports:
        gate, end = Gate(config), asyncio.Event()
        ports.answer(
            api_app(gate, config.server, Inflight()),
            admin_app(gate.runtime, gate.admission.check_room, metrics_of(gate)),
            gate.runtime.stats.connection_cut,
        )
        running = asyncio.create_task(gate.run(end))
        await until(lambda: gate.upstream.is_up and ports.api.started)
        address = ports.api.servers[0].sockets[0].getsockname()
        try:
            yield gate, f"http://127.0.0.1:{address[1]}"
        finally:
            end.set()
            await running


@dataclass
class Call:
    """A request as the made-up engine got it, and the way back."""

    method: str
    path: str
    headers: dict[str, str]
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def gone(self) -> None:
        """Returns when the gate has closed the connection."""
        await self.reader.read()

    async def write(self, data: bytes) -> None:
        """Returns when most of it was taken."""
        self.writer.write(data)
        await self.writer.drain()

    async def stream(self, *pieces: bytes, kind: str = "text/event-stream") -> None:
        """A chunked answer, whole."""
        await self.write(b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n" % kind.encode())
        await self.write(b"transfer-encoding: chunked\r\n\r\n")
        for each in pieces:
            await self.write(chunk(each))
        await self.write(b"0\r\n\r\n")


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


Answers = Callable[[Call], Awaitable[None]]


@asynccontextmanager
async def made_up_engine(answers: Answers) -> AsyncIterator[str]:
    """An engine of any kind; its URL. `answers` gets all requests but those for its models."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.rstrip().split("\r\n")
            method, path, _ = line.split(" ")
            pairs = (each.split(":", 1) for each in lines)
            headers = {name.lower(): value.strip() for name, value in pairs}
            await reader.readexactly(int(headers.get("content-length", "0")))
            if path == "/v1/models":
                length = b"content-length: %d\r\n\r\n" % len(MODELS)
                writer.write(b"HTTP/1.1 200 OK\r\n" + length + MODELS)
            elif path == "/metrics":
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            else:
                await answers(Call(method, path, headers, writer, reader))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the gate has closed the connection
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@dataclass
class Seen:
    """An answer as its client sees it: status, headers in lower case, and the body so far, without
    the framing. `is_whole`: its end was told. `num_bytes`: of the body."""

    status: int = 0
    headers: list[tuple[str, bytes]] = field(default_factory=list)
    body: bytes = b""
    is_whole: bool = False
    num_bytes: int = 0
    first_s: float = 0.0

    def header(self, name: str) -> list[bytes]:
        """All values of a header."""
        return [value for each, value in self.headers if each == name]


OnBytes = Callable[[int], None]


async def ask(
    url: str,
    method: str = "POST",
    path: str = "/v1/completions",
    body: bytes = b'{"prompt": "a"}',
    on_bytes: OnBytes = lambda num: None,
    keep: bool = True,
) -> Seen:
    """One request on a connection of its own, read to its end within LIMIT_S.

    `on_bytes`: called with the body's bytes so far. Without `keep` the body is only counted.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=READ_BYTES)
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n"
    kind = "content-type: application/json\r\n"
    writer.write(f"{head}{kind}content-length: {len(body)}\r\n\r\n".encode() + body)
    try:
        async with asyncio.timeout(LIMIT_S):
            return await _read(reader, method, on_bytes, keep)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, method: str, on_bytes: OnBytes, keep: bool) -> Seen:
    seen = Seen()
    try:
        while not seen.status:
            await _read_head(reader, seen)
        async for data in _body(reader, method, seen):
            seen.first_s = seen.first_s or time.monotonic()
            seen.num_bytes += len(data)
            seen.body += data if keep else b""
            on_bytes(seen.num_bytes)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # cut: `is_whole` is False
    return seen


async def _read_head(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Status and headers; those of 1xx do not count."""
    line, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    status = int(line.split(b" ")[1])
    if status >= 200:
        seen.status = status
        pairs = (each.split(b":", 1) for each in lines)
        seen.headers = [(name.decode().lower(), value.strip()) for name, value in pairs]


async def _body(reader: asyncio.StreamReader, method: str, seen: Seen) -> AsyncIterator[bytes]:
    if method == "HEAD" or seen.status in (204, 304):
        pass
    elif seen.header("transfer-encoding"):
        while size := int(await reader.readuntil(b"\n"), 16):
            async for data in _exactly(reader, size + 2):
                yield data
        while (await reader.readuntil(b"\n")).strip():
            pass  # trailers
    elif length := seen.header("content-length"):
        async for data in _exactly(reader, int(length[0]), 0):
            yield data
    else:
        while data := await reader.read(READ_BYTES):
            yield data
    seen.is_whole = True


async def _exactly(
    reader: asyncio.StreamReader, num_bytes: int, num_end: int = 2
) -> AsyncIterator[bytes]:
    """So many bytes as they come, the last `num_end` of which are left out."""
    left = num_bytes - num_end
    while left:
        data = await reader.read(min(left, READ_BYTES))
        if not data:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(data)
        yield data
    await reader.readexactly(num_end)
