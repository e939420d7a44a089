"""The OpenAPI document shows every route, and each refusal that its parameters can meet."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from sluice_frontend.api import probes
from sluice_frontend.api.chat import CHAT_NEUTRAL
from sluice_frontend.api.generate import NEUTRAL
from sluice_frontend.api.operations import all_operations
from sluice_frontend.api.pooling import classify, embed
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.connection import LIFE
from sluice_frontend.http.guards import PROBE_PATHS, Inflight
from sluice_worker.api.app import api_app
from sluice_worker.api.openapi import document
from sluice_worker.tasks import all_served
from starlette.types import Receive, Scope, Send
from unit.worker.api.test_waiting_memory import create_service

OPERATIONS = [operation for operation in all_operations() if operation.bodies]
PROBES = (probes.HEALTH, probes.READYZ, probes.METRICS, probes.MODEL)
LOCKED = document([*OPERATIONS, *PROBES], version="1", has_keys=True, open_paths=PROBE_PATHS)


async def test_the_document_shows_every_task_and_what_it_shows_is_answered(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig(batch_dir=tmp_path))
    app = api_app(service, all_served(service), Inflight())

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "state": {LIFE: (0.0, 1e9)}}, receive, send)

    transport = httpx.ASGITransport(connected)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        shown = (await client.get("/openapi.json")).json()["paths"]
        others = {each.path for each in (*embed.OPERATIONS, *classify.OPERATIONS)}
        assert {operation.path for operation in OPERATIONS} - others < shown.keys()
        assert not others & shown.keys()
        for path, method in [(at, method) for at, methods in shown.items() for method in methods]:
            target = path.replace("{model}", service.config.model_name)
            answer = await client.request(method, target, content=b"{}")
            nobody = 404 if "_id}" in path else 200
            assert answer.status_code in (200, 400, 503, nobody), target


def test_a_lock_is_shown_where_there_is_one() -> None:
    for path, methods in LOCKED["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path not in PROBE_PATHS)
            assert ("401" in operation["responses"]) == (path not in PROBE_PATHS)


def body_schema(path: str) -> dict[str, Any]:
    """The schema of a route's body, with what it refers to."""
    (content,) = LOCKED["paths"][path]["post"]["requestBody"]["content"].values()
    return {**content["schema"], "components": LOCKED["components"]}


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.bodies], ids=lambda o: o.path)
def test_examples_fit_their_schema_and_a_neutral_field_only_its_values(operation: Any) -> None:
    check = Draft202012Validator(body_schema(operation.path))
    check.validate(operation.example)
    for name, values in operation.neutral.items():
        for value in values:
            check.validate({**operation.example, name: value})
        if "/v1/" in operation.path:
            assert not check.is_valid({**operation.example, name: "surely not neutral"})


def test_every_parameter_that_is_not_built_is_shown() -> None:
    schemas = LOCKED["components"]["schemas"]
    assert set(NEUTRAL) <= set(schemas["CompletionBody"]["properties"])
    chat = {*schemas["ChatFields"]["properties"], *schemas["ConversationFields"]["properties"]}
    assert set(CHAT_NEUTRAL) <= chat
