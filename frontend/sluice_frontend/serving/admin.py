"""The admin port, by which the operator reads and changes a worker."""

from fastapi import FastAPI, Request
from sluice_core.bounded import count
from sluice_core.contract import RuntimePatch
from sluice_core.errors import RequestError
from starlette.responses import Response

from ..http.guards import PROBE_PATHS, answer, read_body
from ..openai.json_body import convert, parse_object
from .backend import Backend
from .runtime import Runtime

OPEN_PATHS = ("/metrics", *PROBE_PATHS)
"""Paths of the admin port that answer without a bearer."""
MAX_PATCH_BYTES = 64 << 10


def add_admin_routes(app: FastAPI, runtime: Runtime[Backend]) -> None:

    @app.get("/v1/runtime_config")
    async def runtime_config() -> Response:
        return answer(runtime.runtime_config())

    @app.patch("/v1/runtime_config")
    async def patch(request: Request) -> Response:
        timeout_s = runtime.config.receive_timeout
        body = await read_body(request, MAX_PATCH_BYTES, timeout_s)
        change = convert(parse_object(body), RuntimePatch)
        return answer(runtime.patch(change))

    @app.get("/v1/evidence")
    async def evidence(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if (seq := count(after)) is None:
            raise RequestError("after must be a whole number from 0 on", param="after")
        return answer(runtime.evidence(seq))

    @app.get("/v1/integrity")
    async def integrity() -> Response:
        problem = await runtime.backend.check_integrity()
        return answer({"problem": problem}, 500 if problem else 200)
