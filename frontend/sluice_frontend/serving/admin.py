"""The admin port, by which the operator reads and changes a worker."""

from sluice_core.bounded import count
from sluice_core.contract import RuntimePatch
from sluice_core.errors import RequestError
from starlette.requests import Request
from starlette.responses import Response

from ..api.json_body import convert, parse_object
from ..http.guards import PROBE_PATHS, answer, read_body
from .runtime import Runtime

OPEN_PATHS = ("/metrics", *PROBE_PATHS)
"""Paths of the admin port that answer without a bearer."""
MAX_PATCH_BYTES = 64 << 10


class AdminPort:
    """The handlers of the admin port's own routes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def runtime_config(self, request: Request) -> Response:
        """Show the limits in force."""
        return answer(self._runtime.runtime_config())

    async def patch(self, request: Request) -> Response:
        """Change limits and show them."""
        timeout_s = self._runtime.config.receive_timeout
        body = await read_body(request, MAX_PATCH_BYTES, timeout_s)
        change = convert(parse_object(body), RuntimePatch)
        return answer(self._runtime.patch(change))

    async def evidence(self, request: Request) -> Response:
        """Show the closed ticks behind the one that `after` names."""
        after = request.query_params.get("after", "0")
        if (seq := count(after)) is None:
            raise RequestError("after must be a whole number from 0 on", param="after")
        return answer(self._runtime.evidence(seq))

    async def integrity(self, request: Request) -> Response:
        """Check the engine's books."""
        problem = await self._runtime.backend.check_integrity()
        return answer({"problem": problem}, 500 if problem else 200)
