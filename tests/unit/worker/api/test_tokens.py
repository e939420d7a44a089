"""Texts that are tokenised: how long one may be, and how long its turn lasts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.clients import CLIENT
from sluice_frontend.process.app import application
from sluice_frontend.serving.admission import MAX_ON_THEIR_WAY
from sluice_worker.api.service import Service
from sluice_worker.tasks import tokenize as module
from sluice_worker.tasks.tokenize import CHARS_PER_TOKEN
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from unit.worker.api.test_waiting_memory import READY, create_service

MOST = READY.max_model_len


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return create_service(tmp_path, ServerConfig())


@pytest.fixture
def app(service: Service) -> ASGIApp:
    app = application(module.served(service))

    async def for_a_client(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {CLIENT: "one"}}, receive, send)

    return for_a_client


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": " " * (CHARS_PER_TOKEN * MOST + 1)}, "prompt"),
        ("/tokenize", {"prompt": "z" * (MOST + 1)}, "prompt"),
        ("/tokenize", chat(" " * (CHARS_PER_TOKEN * MOST + 1)), "messages"),
        ("/tokenize", chat("z" * (MOST + 1)), "messages"),
        ("/detokenize", {"tokens": [5] * (MOST + 1)}, "tokens"),
    ],
    ids=["characters", "tokens", "characters of a chat", "tokens of a chat", "ids"],
)
async def test_a_text_over_the_limit_is_refused(
    app: ASGIApp, path: str, body: dict[str, Any], param: str
) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert "send it in parts" in error["message"]


async def test_a_text_of_a_whole_window_is_tokenised(app: ASGIApp) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answer = (await client.post("/tokenize", json={"prompt": "z" * MOST})).json()
        assert answer["count"] == MOST
        told = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert told.json() == {"prompt": "z" * MOST}


async def test_a_turn_lasts_until_the_reply_was_read(app: ASGIApp) -> None:
    """Else any number of replies could be held by clients that read nothing."""
    may_read = asyncio.Event()

    async def ask(answers: asyncio.Queue[int]) -> None:
        messages = [{"type": "http.request", "body": json.dumps({"prompt": "x"}).encode()}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answers.put_nowait(message["status"])
            elif not message["more_body"]:
                await may_read.wait()

        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": []}
        await app({**scope, "query_string": b"", "raw_path": b"/tokenize"}, receive, send)

    answers = asyncio.Queue[int]()
    tasks = [asyncio.create_task(ask(answers)) for _ in range(MAX_ON_THEIR_WAY)]
    async with asyncio.timeout(30):
        told = [await answers.get() for _ in tasks]
        tasks.append(asyncio.create_task(ask(answers)))
        told.append(await answers.get())
        may_read.set()
        await asyncio.gather(*tasks, ask(answers))
    assert [*told, await answers.get()] == [200] * MAX_ON_THEIR_WAY + [429, 200]
