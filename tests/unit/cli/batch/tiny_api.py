"""A tiny HTTP API on loopback, in a thread: it answers each request as a function says."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web


class Asked(NamedTuple):
    """One request. `data`: the body's bytes; `open`: requests under way, with this one."""

    path: str
    data: bytes
    headers: dict[str, str]
    open: int

    @property
    def body(self) -> Any:
        """The body's JSON."""
        return json.loads(self.data)


class Reply(NamedTuple):
    """An answer; `status` 0 closes the connection instead."""

    status: int = 200
    data: bytes = b'{"ok": true}'
    headers: dict[str, str] = {}
    content_type: str = "application/json"


Says = Callable[[Asked], Reply]


def well(asked: Asked) -> Reply:
    """Answer each request alike."""
    return Reply()


class TinyApi:
    """Its URL, the requests that it got, and what it says to them.

    While `gate` is clear, requests stay under way. `models` is the answer of /v1/models.
    """

    def __init__(self, says: Says, port: int = 0) -> None:
        self._port = port
        self.says, self.asked = says, list[Asked]()
        self.models = Reply(data=b'{"data": [{"id": "tiny"}]}')
        self.url, self.open = "", 0
        self.gate: asyncio.Event
        self.loop: asyncio.AbstractEventLoop
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "TinyApi":
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Answer nothing any more."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._over.set)
            self._thread.join(30)

    def hold(self) -> None:
        """Keep requests under way from now on."""
        self.loop.call_soon_threadsafe(self.gate.clear)

    def release(self) -> None:
        """Answer what is under way, and the rest."""
        self.loop.call_soon_threadsafe(self.gate.set)

    async def _serve(self) -> None:
        self.loop, self.gate = asyncio.get_running_loop(), asyncio.Event()
        self.gate.set()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        self.gate.set()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return _response(self.models)

    async def _answer(self, request: web.Request) -> web.Response:
        data = await request.read()
        self.open += 1
        try:
            asked = Asked(request.path, data, dict(request.headers), self.open)
            self.asked.append(asked)
            await self.gate.wait()
            reply = self.says(asked)
        finally:
            self.open -= 1
        if not reply.status:
            assert request.transport is not None
            request.transport.abort()
        return _response(reply)


def _response(reply: Reply) -> web.Response:
    return web.Response(
        status=reply.status or 500,
        body=reply.data,
        headers=reply.headers,
        content_type=reply.content_type,
    )


@contextmanager
def tiny_api(says: Says = well, port: int = 0) -> Iterator[TinyApi]:
    """A running API, on any port unless one is given."""
    with TinyApi(says, port) as api:
        yield api


def line(custom_id: str, url: str = "/v1/embeddings", **body: Any) -> str:
    """One line of an input."""
    body = body or {"model": "tiny", "input": custom_id}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}) + "\n"


def write_input(path: Path, num: int) -> Path:
    """An input of lines with the ids 0, 1, 2, ..."""
    path.write_text("".join(line(str(i)) for i in range(num)))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    """The lines of an output; each has its end."""
    text = path.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(each) for each in text.split("\n")[:-1]]
