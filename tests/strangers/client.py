"""*Rim*: a stranger's HTTP client: it sends the bytes that it is given, and reads what comes."""

import asyncio
import json
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

READ_BYTES = 1 << 18
LIMIT_S = 30.0
KEEP_BYTES = 1 << 20
"""Of an answer's bytes the first so many are kept."""


@dataclass(slots=True)
class Reply:
    """What came. `status` 0: no answer in time. `first_s`, `took_s`: to the first byte of the body
    and to the end. `raw`: the first bytes, `num_bytes` in all."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""
    num_bytes: int = 0
    first_s: float = 0.0
    took_s: float = 0.0
    is_whole: bool = False

    @property
    def body(self) -> bytes:
        """Its first bytes, without the framing."""
        body = self.raw.partition(b"\r\n\r\n")[2]
        return _joined(body) if "chunked" in self.headers.get("transfer-encoding", "") else body

    def text(self, most: int = 200) -> str:
        """The beginning of its body."""
        return self.body[:most].decode("utf-8", "replace")


def _joined(body: bytes) -> bytes:
    joined = bytearray()
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size.split(b";")[0] or b"0", 16)
        joined += rest[:length]
        body = rest[length + 2 :]
    return bytes(joined)


def request(
    method: str, target: str, body: bytes | object = b"", headers: Iterable[str] = ()
) -> bytes:
    """A request's bytes. A body that is not bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {target} HTTP/1.1", "x-stranger: 1", "connection: close", *headers]
    names = {line.partition(":")[0].lower() for line in lines[1:]}
    if "host" not in names:
        lines.append("host: localhost")
    if "content-type" not in names and data:
        lines.append("content-type: application/json")
    if data:
        lines.append(f"content-length: {len(data)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + data


async def ask(
    address: tuple[str, int],
    sent: bytes,
    *,
    limit_s: float = LIMIT_S,
    source: str = "127.0.0.1",
    keep: int = KEEP_BYTES,
) -> Reply:
    """The answer to the bytes of one request, sent from the address `source`."""
    reply, start_s = Reply(), time.monotonic()
    with suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
        async with asyncio.timeout(limit_s):
            reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
            try:
                await asyncio.gather(_send(writer, sent), _read(reader, reply, start_s, keep))
            finally:
                writer.close()
    reply.took_s = time.monotonic() - start_s
    return reply


async def _send(writer: asyncio.StreamWriter, sent: bytes) -> None:
    with suppress(ConnectionError):  # the answer may come before all was read
        writer.write(sent)
        await writer.drain()


async def _read(reader: asyncio.StreamReader, reply: Reply, start_s: float, keep: int) -> None:
    raw = bytearray()
    try:
        while data := await reader.read(READ_BYTES):
            reply.num_bytes += len(data)
            raw += data[: max(0, keep - len(raw))]
            if not reply.status and b"\r\n\r\n" in raw:
                _take_head(reply, bytes(raw))
            if not reply.first_s and reply.status and len(raw.partition(b"\r\n\r\n")[2]):
                reply.first_s = time.monotonic() - start_s
        reply.is_whole = True
    finally:
        reply.raw = bytes(raw)
        if not reply.status and raw.startswith(b"HTTP/"):
            _take_head(reply, reply.raw)


def _take_head(reply: Reply, raw: bytes) -> None:
    first, *lines = raw.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    reply.status = int(first.split(" ", 2)[1])
    for line in lines:
        name, _, value = line.partition(":")
        reply.headers[name.lower()] = value.strip()


def stall(address: tuple[str, int], sent: bytes, source: str = "127.0.0.1") -> socket.socket | None:
    """A connection that sends a request and reads nothing of its answer; None if it is refused."""
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.settimeout(LIMIT_S)
        made.bind((source, 0))
        made.connect(address)
        made.sendall(sent)
    except OSError:
        made.close()
        return None
    return made
