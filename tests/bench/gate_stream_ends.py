"""*Rim*: the two ends of `bench.gate_stream`, a process each: a made-up engine, and its clients.

    python -m bench.gate_stream_ends engine --step-ms 20
    python -m bench.gate_stream_ends clients --port 8000 --streams 64

The engine prints its port. It has one batch, as real ones: each step brings a token to every open
stream. Clients say when all streams have begun, and how many tokens came whenever they are asked.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import cast

import uvloop
from sluice.numbers import count

CHUNK = {
    "id": "chatcmpl-5f0c1b7e9d8a4c6fb2a1",
    "object": "chat.completion.chunk",
    "created": 1790000000,
    "model": "m",
    "choices": [
        {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
    ],
}
EVENT = b"data: %s\n\n" % json.dumps(CHUNK).encode()
PIECE = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
MODELS = b'{"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}'
BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
MARK = b"data: "
AT_ONCE = 8
"""Tokens in each write of an engine that does not wait, so that it is faster than the gate."""


class Batch:
    """The engine's open streams, and those whose gate does not read."""

    def __init__(self) -> None:
        self.streams: set[EngineEnd] = set()
        self.has_room = asyncio.Event()

    async def run(self, step_s: float) -> None:
        """Send each stream a token every `step_s`; with 0 as fast as they are read."""
        loop = asyncio.get_running_loop()
        due_s, piece = loop.time(), PIECE if step_s else AT_ONCE * PIECE
        while True:
            for stream in list(self.streams):
                if step_s or not stream.is_full:
                    stream.transport.write(piece)
            due_s += step_s
            await asyncio.sleep(due_s - loop.time() if step_s else 0)
            if not step_s and all(stream.is_full for stream in self.streams):
                self.has_room.clear()
                await self.has_room.wait()


class EngineEnd(asyncio.Protocol):
    """One connection to the engine."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """A request comes in one or two pieces; only its first one has the method."""
        if data.startswith(b"GET "):
            status = b"200 OK" if b"/v1/models" in data[:40] else b"404 Not Found"
            self.transport.write(
                b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (status, len(MODELS), MODELS)
            )
        elif data.startswith(b"POST "):
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._batch.streams.add(self)
            self._batch.has_room.set()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._batch.has_room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._batch.streams.discard(self)


class ClientEnd(asyncio.Protocol):
    """One stream as its client sees it."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.tokens = 0
        self.is_cut = False
        self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: gate\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
        )

    def data_received(self, data: bytes) -> None:
        seen = self._last + data
        if tokens := seen.count(MARK):
            self.tokens += tokens
            self.begun.set()
        self._last = seen[1 - len(MARK) :]  # a mark may be cut in two

    def connection_lost(self, error: Exception | None) -> None:
        self.is_cut = True


async def engine(step_s: float) -> None:
    """Serve until killed."""
    loop, batch = asyncio.get_running_loop(), Batch()
    server = await loop.create_server(lambda: EngineEnd(batch), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await batch.run(step_s)


async def clients(port: int, num_streams: int) -> None:
    """Answer each line on standard input with the tokens so far, once all streams have begun."""
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(ClientEnd, "127.0.0.1", port) for _ in range(num_streams)]
    ends = [end for _, end in made]
    await asyncio.gather(*(end.begun.wait() for end in ends))
    print("begun", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        told = {
            "tokens": sum(end.tokens for end in ends),
            "s": loop.time(),
            "cut": sum(end.is_cut for end in ends),
        }
        print(json.dumps(told), flush=True)


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m bench.gate_stream_ends`."""
    parser = argparse.ArgumentParser(prog="python -m bench.gate_stream_ends", description=__doc__)
    parser.add_argument("end", choices=("engine", "clients"))
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--port", type=count)
    parser.add_argument("--streams", type=count)
    given = parser.parse_args(argv)
    is_engine = given.end == "engine"
    uvloop.run(engine(given.step_ms / 1e3) if is_engine else clients(given.port, given.streams))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
