"""What the ports refuse, and what they say when something of their own is wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sluice_core.errors import RequestError
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.api.operations import BoundOperation, Operation
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.connection import LIFE
from sluice_frontend.process.app import application
from sluice_worker.api.app import admin_app
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from unit.worker.api.test_waiting_memory import READY, create_service


async def get(app: ASGIApp, path: str, *, raises: bool = True) -> httpx.Response:
    """The answer of `app` over a connection that has just been made."""

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        now_s = asyncio.get_running_loop().time()
        await app({**scope, "state": {LIFE: (now_s, 1e9)}}, receive, send)

    transport = httpx.ASGITransport(connected, raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        return await client.get(path)


@pytest.mark.parametrize("after", ["x", "", "-1", "1.5", "%C2%B2", "1" * 19])
async def test_evidence_after_what_is_no_number_is_refused_by_its_name(
    tmp_path: Path, after: str
) -> None:
    answer = await get(
        admin_app(create_service(tmp_path, ServerConfig())), f"/v1/evidence?after={after}"
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize(("problem", "status"), [(None, 200), ("a block is lost", 500)])
async def test_a_pool_whose_books_do_not_balance_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None, status: int
) -> None:
    async def check() -> str | None:
        return problem

    service = create_service(tmp_path, ServerConfig())
    monkeypatch.setattr(service.client, "check_integrity", check)
    answer = await get(admin_app(service), "/v1/integrity")
    assert (answer.status_code, answer.json()) == (status, {"problem": problem})


async def test_who_sends_no_bearer_is_told_that_one_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("canary")
    service = create_service(tmp_path / "model", ServerConfig(admin_token_file=tmp_path / "token"))
    answer = await get(admin_app(service), "/v1/evidence")
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


async def test_an_unexpected_error_is_one_sentence_to_the_client_and_whole_to_the_log() -> None:
    error = RuntimeError("the canary's prompt")

    async def broken(request: Request) -> Any:
        raise error

    app = application([BoundOperation(Operation("GET", "/broken", "It breaks."), broken)])
    answer = await get(app, "/broken", raises=False)
    assert (answer.status_code, answer.headers["content-type"]) == (500, "application/json")
    assert answer.json()["error"]["message"] == (
        "an internal error occurred; the server's log names it"
    )
    with pytest.raises(RuntimeError) as logged:
        await get(app, "/broken")
    assert logged.value is error


def test_more_answers_than_may_ever_run_and_wait_are_refused_for_good(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig(max_num_queued_reqs=2))
    asked = b'{"prompt": [1, 2, 3], "max_tokens": 1, "n": %d}' % (READY.ceiling + 3)
    with pytest.raises(RequestError, match=r"7 sequences .* may ever run \(4\)") as refused:
        asyncio.run(service.open(parse_completion(asked), 0.0))
    assert (refused.value.http_status, refused.value.param) == (400, "n")
    assert service.client.num_open == 0
