"""*Rim*: a made-up engine in a process of its own, which records all that reaches it.

    PYTHONPATH=tests .venv/bin/python -m strangers.engine

It prints its two ports: of the engine, and of the control. `PUT /answers` sets what it answers,
`GET /seen` returns what it received, `DELETE /seen` forgets that. The last `Answer` that fits wins.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct
from strangers.sequences import path_of, sequences

MAX_SEEN = 20_000
MAX_KEPT_BYTES = 64 << 10
PART_BYTES = 256 << 10
LOOKS = ("/health", "/v1/models", "/metrics", "/props", "/server_info", "/api/version", "/api/ps")
"""Paths at which a gate looks by itself."""


class Answer(Struct):
    """What is answered to requests of `path` ("" for all), after `hold_s` of silence.

    `pieces` are sent `repeat` times, `gap_s` apart; `num_fill` bytes of filler follow the first of
    them. `is_raw`: the pieces are the whole answer, with its status line. `hangs`: none ever comes.
    """

    path: str = ""
    status: int = 200
    headers: list[tuple[str, str]] = []
    pieces: list[bytes] = []
    hold_s: float = 0.0
    gap_s: float = 0.0
    repeat: int = 1
    num_fill: int = 0
    is_raw: bool = False
    hangs: bool = False


class Seen(Struct):
    """A request that reached the engine. `body`: its first bytes, `num_bytes` in all."""

    method: str
    target: bytes
    headers: list[tuple[str, str]]
    body: bytes
    num_bytes: int
    sequences: int

    @property
    def path(self) -> str:
        return path_of(self.target)

    @property
    def is_look(self) -> bool:
        """True if a gate asks this by itself; a stranger's request names itself."""
        if any(name == "x-stranger" for name, _ in self.headers):
            return False
        loads = self.method == "POST" and self.path == "/api/generate"  # Ollama's model
        return loads or (self.method == "GET" and self.path in LOOKS)

    def header(self, name: str) -> str | None:
        """The first header of this name."""
        return next((value for each, value in self.headers if each == name), None)


class Record(Struct):
    """All that was seen. `most`: sequences at once; `most_beside`: of at least two requests."""

    requests: list[Seen]
    most: int
    most_beside: int
    num_requests: int


@dataclass(slots=True)
class Engine:
    """The state of one made-up engine."""

    answers: list[Answer] = field(default_factory=list)
    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=MAX_SEEN))
    open: dict[int, int] = field(default_factory=dict)
    most: int = 0
    most_beside: int = 0
    num_requests: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of a connection, and close it."""
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            if (request := await read_request(reader)) is not None:
                await self._answer(request, reader, writer)
        writer.close()

    async def _answer(
        self, asked: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.seen.append(asked)
        self.num_requests += 1
        with self._running(asked):
            answer = self._chosen(asked)
            answering = asyncio.create_task(send(answer, writer))
            leaving = asyncio.create_task(reader.read(1))  # the end of the connection
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    @contextmanager
    def _running(self, asked: Seen) -> Iterator[None]:
        if asked.sequences:
            self.open[id(asked)] = asked.sequences
            total = sum(self.open.values())
            self.most = max(self.most, total)
            if len(self.open) > 1:
                self.most_beside = max(self.most_beside, total)
        try:
            yield
        finally:
            self.open.pop(id(asked), None)

    def _chosen(self, asked: Seen) -> Answer:
        for answer in reversed(self.answers):
            if answer.path == asked.path or (not answer.path and not asked.is_look):
                return answer
        return usual(asked)

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of the test, one after the other."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while (request := await read_request(reader, most=None)) is not None:
                body = self._controlled(request)
                head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
                writer.write(head + body)
                await writer.drain()
        writer.close()

    def _controlled(self, request: Seen) -> bytes:
        if request.method == "PUT":
            self.answers = msgspec.json.decode(request.body, type=list[Answer])
        elif request.method == "DELETE":
            self.seen.clear()
            self.most = self.most_beside = self.num_requests = 0
        else:
            record = Record(list(self.seen), self.most, self.most_beside, self.num_requests)
            return msgspec.json.encode(record)
        return b"{}"


async def read_request(
    reader: asyncio.StreamReader, most: int | None = MAX_KEPT_BYTES
) -> Seen | None:
    """The next request; its body is read to the end, and its first `most` bytes are kept."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.split(b" ", 2)
    pairs = [line.decode("latin-1").split(":", 1) for line in lines]
    headers = [(name.lower(), value.strip()) for name, value in pairs]
    body = bytearray()
    async for part in _body(reader, dict(headers)):
        body += part
    kept = bytes(body if most is None else body[:most])
    number = sequences(method.decode("latin-1"), target, bytes(body))
    return Seen(method.decode("latin-1"), target, headers, kept, len(body), number)


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await reader.readline()).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    elif length := int(headers.get("content-length", 0)):
        yield await reader.readexactly(length)


async def send(answer: Answer, writer: asyncio.StreamWriter) -> None:
    """Write the whole of an answer, at the pace at which it is read."""
    if answer.hangs:
        await asyncio.Event().wait()
    await asyncio.sleep(answer.hold_s)
    if not answer.is_raw:
        lines = [f"HTTP/1.1 {answer.status} X", "connection: close"]
        lines += [f"{name}: {value}" for name, value in answer.headers]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    for part in _parts(answer):
        writer.write(part)
        await writer.drain()
        if answer.gap_s:
            await asyncio.sleep(answer.gap_s)
    writer.write_eof()


def _parts(answer: Answer) -> Iterable[bytes]:
    filler = b"x" * PART_BYTES
    for number in range(answer.repeat):
        for index, piece in enumerate(answer.pieces):
            yield piece
            if index == 0 and number == 0 and answer.num_fill:
                yield from (filler for _ in range(answer.num_fill // PART_BYTES))


def whole(body: object, **more: object) -> Answer:
    """JSON in one piece."""
    text = json.dumps(body).encode()
    length = [("content-type", "application/json"), ("content-length", str(len(text)))]
    return msgspec.structs.replace(Answer(headers=length, pieces=[text]), **more)


def stream(pieces: list[bytes], kind: str = "text/event-stream", **more: object) -> Answer:
    """Pieces as they come, to the end of the connection."""
    return msgspec.structs.replace(Answer(headers=[("content-type", kind)], pieces=pieces), **more)


def event(body: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
TOKEN = event({"choices": [{"index": 0, "text": "a", "delta": {"content": "a"}}]})
DONE = b"data: [DONE]\n\n"


def usual(asked: Seen) -> Answer:
    """What it answers where nothing else was set."""
    if asked.path == "/v1/models":
        return whole({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
    if asked.path == "/api/ps":
        return whole({"models": [{"name": "tiny:latest", "model": "tiny:latest"}]})
    if asked.path == "/metrics":
        return stream([b"vllm:num_requests_waiting 0\n"], "text/plain")
    if b'"stream": true' in asked.body:
        return stream([TOKEN] * 4 + [event({"choices": [], "usage": USAGE}), DONE])
    return whole({"choices": [{"index": 0, "text": "aa"}], "usage": USAGE, "done": True})


@asynccontextmanager
async def listening(engine: Engine) -> AsyncIterator[dict[str, int]]:
    """The two ports of an engine, served inside the block."""
    api = await asyncio.start_server(engine.serve, "127.0.0.1", 0, backlog=4096, limit=1 << 20)
    control = await asyncio.start_server(engine.control, "127.0.0.1", 0, limit=1 << 20)
    async with api, control:
        ports = [server.sockets[0].getsockname()[1] for server in (api, control)]
        yield {"port": ports[0], "control_port": ports[1]}


async def main() -> None:
    """Serve until the standard input ends."""
    async with listening(Engine()) as ports:
        print(json.dumps(ports), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
