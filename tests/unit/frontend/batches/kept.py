"""Files and batches of a server in this process, whose lines go to a function."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sluice_frontend.batches.routes import Batches
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.clients import CLIENT, SALT
from sluice_frontend.http.guards import ASKED_ID
from sluice_frontend.process.app import application
from sluice_frontend.serving.runtime import Runtime
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from unit.frontend.serving.test_runtime import Foreign, create_runtime, serves

ENDPOINT = "/v1/embeddings"
Says = Callable[[Any, Request], Awaitable[Response]]


async def well(body: Any, request: Request) -> Response:
    """Answer each line with its input."""
    usage = {"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    return JSONResponse({"input": body["input"], "usage": usage})


@dataclass
class Lines:
    """The application behind the guards: what it got, and what it says."""

    says: Says = well
    asked: list[str] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open = most_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.json()
        self.asked.append(body["input"])
        self.states.append(scope["state"])
        self.headers.append(dict(request.headers))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            answer = await self.says(body, request)
            await answer(scope, receive, send)
        finally:
            self.num_open -= 1


@dataclass
class Kept:
    """A client of a server that keeps batches. `salt`: of the key that it comes with."""

    client: httpx.AsyncClient
    runtime: Runtime
    root: Path
    salt: str = ""

    async def upload(self, data: bytes, **fields: str) -> httpx.Response:
        form = {"purpose": "batch", **fields}
        return await self.client.post("/v1/files", data=form, files={"file": ("in", data)})

    async def create(self, *inputs: str) -> str:
        """The id of a batch of these inputs."""
        file = (await self.upload(b"".join(map(line, inputs)))).json()
        asked = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        answer = await self.client.post("/v1/batches", json=asked)
        assert answer.status_code == 200, answer.text
        name: str = answer.json()["id"]
        return name

    async def batch(self, batch_id: str) -> Any:
        return (await self.client.get(f"/v1/batches/{batch_id}")).json()

    async def until(self, batch_id: str, *statuses: str) -> Any:
        """The batch, once it has one of these."""

        async def is_there() -> Any:
            found = await self.batch(batch_id)
            return found if found["status"] in statuses else None

        return await until(is_there)

    async def results(self, file_id: str) -> dict[str, Any]:
        """Lines of a file by their ids, each once."""
        text = (await self.client.get(f"/v1/files/{file_id}/content")).text
        found = [json.loads(each) for each in text.split("\n")[:-1]]
        by_id = {each["custom_id"]: each for each in found}
        assert len(by_id) == len(found)
        return by_id


def line(custom_id: str) -> bytes:
    body = {"model": "m", "input": custom_id}
    whole = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(whole).encode() + b"\n"


async def until(holds: Callable[[], Awaitable[Any]], limit_s: float = 20.0) -> Any:
    """What `holds` gives, once that is something."""
    end_s = time.monotonic() + limit_s
    while not (found := await holds()):
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def kept(root: Path, lines: Lines, *, runs: bool = True) -> AsyncIterator[Kept]:
    """A server that is ready, with a cap of 2. `runs`: it works on its batches."""
    engine = Foreign()
    runtime = create_runtime(ServerConfig(batch_dir=root, receive_timeout=1.0), engine)
    serves(runtime, engine)
    batches = Batches(runtime)
    batches.app = lines
    inner = application(batches.routes({ENDPOINT}))

    async def door(scope: Scope, receive: Receive, send: Send) -> None:
        state = {SALT: made.salt, CLIENT: "somebody", ASKED_ID: "r"}
        await inner({**scope, "state": state}, receive, send)

    transport = httpx.ASGITransport(door)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        made = Kept(client, runtime, root)
        running = asyncio.create_task(batches.run()) if runs else None
        try:
            yield made
        finally:
            if running is not None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
