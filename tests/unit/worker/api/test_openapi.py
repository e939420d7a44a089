"""The OpenAPI document shows every route, and each refusal that its parameters can meet."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.guards import PROBE_PATHS
from sluice_frontend.openai.chat import CHAT_NEUTRAL
from sluice_frontend.openai.protocol import NEUTRAL
from sluice_frontend.process.app import probe_routes
from sluice_worker.api.openapi import document
from sluice_worker.api.operations import OPERATIONS
from sluice_worker.api.routes import own_routes
from sluice_worker.api.service import Service
from sluice_worker.base.config import EngineConfig, WorkerConfig
from unit.worker.api.tiny import write_checkpoint

LOCKED = document(OPERATIONS, version="1", has_keys=True, open_paths=PROBE_PATHS)


def test_the_document_shows_all_routes_and_no_other(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(write_checkpoint(tmp_path)))
    service = Service(WorkerConfig(engine, ServerConfig()))
    all_routes = (*own_routes(service), *probe_routes(service.runtime, bytes))
    served = {(route.method.lower(), route.path.replace(":path", "")) for route in all_routes}
    shown = {(method, path) for path, methods in LOCKED["paths"].items() for method in methods}
    assert shown == served
    assert served


def test_a_lock_is_shown_where_there_is_one() -> None:
    for path, methods in LOCKED["paths"].items():
        for operation in methods.values():
            assert ("security" in operation) == (path not in PROBE_PATHS)
            assert ("401" in operation["responses"]) == (path not in PROBE_PATHS)


def body_schema(path: str) -> dict[str, Any]:
    """The schema of a route's body, with what it refers to."""
    content = LOCKED["paths"][path]["post"]["requestBody"]["content"]["application/json"]
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
