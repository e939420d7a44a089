"""*Rim*: a made-up engine in a process of its own, whose requests say how long it is silent.

It speaks as much of vLLM, llama.cpp and Ollama as a gate
asks for. Fields of a body: `silent_s` before the first token (None: for ever), `num` tokens,
`pings` meanwhile, `bytes` of each token. Its counter moves when an answer ends.
With `--single` it answers nobody else while it is silent, as a server of one thread.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

PING_S = 0.1


class Engine:
    """Its routes. `is_there`: Ollama's model, which a POST to /made-up/model deletes and makes."""

    def __init__(self, *, is_single: bool) -> None:
        self._turn = asyncio.Lock() if is_single else None
        self._num_tokens = 0
        self._is_there = True

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("/health", "/v1/models", "/api/version"):
            app.router.add_get(path, self._well)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/made-up/model", self._change)
        for path in ("/api/show", "/api/generate"):
            app.router.add_post(path, self._model)
        return app

    async def _well(self, request: web.Request) -> web.Response:
        if self._turn is not None:
            async with self._turn:
                pass
        return web.json_response({"data": [{"id": "m"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        counters = ("vllm:generation_tokens_total", "llamacpp:tokens_predicted_total")
        return web.Response(text="".join(f"{name} {self._num_tokens}\n" for name in counters))

    async def _change(self, request: web.Request) -> web.Response:
        self._is_there = (await request.json())["is_there"]
        return web.json_response({})

    async def _model(self, request: web.Request) -> web.Response:
        if self._is_there:
            return web.json_response({"details": {}})
        return web.json_response({"error": "model 'm' not found"}, status=404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if asked.get("stream"):
            await reply.prepare(request)
        async for event in self._events(asked):
            if asked.get("stream"):
                await reply.write(event)
        self._num_tokens += int(asked["num"])
        return reply if asked.get("stream") else web.json_response({"usage": {}})

    async def _events(self, asked: dict[str, Any]) -> AsyncIterator[bytes]:
        silent_s = asked["silent_s"]
        silence = asyncio.create_task(asyncio.sleep(1e6 if silent_s is None else silent_s))
        if self._turn is not None:
            async with self._turn:
                await silence
        while not silence.done():
            await asyncio.wait({silence}, timeout=PING_S if asked.get("pings") else None)
            if not silence.done():
                yield b": ping\n\n"
        token = {"choices": [{"index": 0, "text": "a" * asked.get("bytes", 1)}]}
        for _ in range(asked["num"]):
            yield b"data: " + json.dumps(token).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


@contextmanager
def running_engine(port: int, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """The engine at `port` of loopback, killed on leaving, also while it is stopped."""
    command = [sys.executable, __file__, str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "it does not listen"
            yield process
        finally:
            process.kill()


async def _serve(port: int, *, is_single: bool) -> None:
    runner = web.AppRunner(Engine(is_single=is_single).app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--single", action="store_true")
    given = parser.parse_args()
    asyncio.run(_serve(given.port, is_single=given.single))
