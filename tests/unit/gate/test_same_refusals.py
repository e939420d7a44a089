"""A worker and a gate refuse the same work with the same words."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, gate_of
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.connection import LIFE
from sluice_frontend.http.guards import Inflight
from sluice_worker.api.app import api_app
from sluice_worker.tasks import all_served
from starlette.types import Receive, Scope, Send
from unit.gate.recording import Engine, engine
from unit.worker.api.test_waiting_memory import create_service


@pytest.fixture(scope="module")
def made() -> Iterator[Engine]:
    with engine() as found:
        yield found


@pytest.fixture(scope="module")
def gate(made: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with gate_of(made.url, tmp_path_factory.mktemp("gate")) as found:
        yield found


async def answer_of_worker(tmp_path: Path, body: bytes, headers: dict[str, str]) -> httpx.Response:
    """What a worker with an idle engine answers."""
    service = create_service(tmp_path, ServerConfig())
    app = api_app(service, all_served(service), Inflight())

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {LIFE: (0.0, 1e9)}}, receive, send)

    transport = httpx.ASGITransport(connected)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.post("/v1/completions", content=body, headers=headers)


def told(answer: httpx.Response) -> dict[str, Any]:
    """The refusal with its status, and without the milliseconds that were measured."""
    error = answer.json()["error"]
    error["message"] = re.sub(r"about \d+ ms", "about N ms", error["message"])
    return {"status": answer.status_code, **error}


@pytest.mark.parametrize(
    ("fields", "headers", "status"),
    [
        ({"priority": 3}, {}, 400),
        ({"slo_ttft_ms": 1e-6}, {}, 429),
        ({"slo_ttft_ms": 5.0}, {"x-slo-ttft-ms": "6"}, 400),
        ({}, {"x-slo-ttft-ms": "soon"}, 400),
        ({}, {"x-slo-tpot-ms": "0"}, 400),
        ({}, {"x-slo-class": "batch"}, 400),
    ],
)
def test_both_refuse_with_the_same_words(
    gate: Worker, tmp_path: Path, fields: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode()
    mine = asyncio.run(answer_of_worker(tmp_path, body, headers))
    theirs = httpx.post(f"{gate.url}/v1/completions", content=body, headers=headers)
    assert told(mine) == told(theirs)
    assert mine.status_code == status
