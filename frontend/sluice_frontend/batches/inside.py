"""*rim*: lines of a batch through this server's own application, without a connection."""

import asyncio
import logging
import uuid
from contextlib import suppress

from sluice_core.bounded import number
from sluice_core.errors import SluiceError
from sluice_core.work import BACKGROUND, CLASS_HEADER
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from ..api.operations import JSON
from ..api.sse import error_body
from ..http.clients import CLIENT, SALT
from ..http.guards import ASKED_ID
from ..http.turns import Turns
from .item import TOO_MANY, Result, answered
from .run import delay_s

log = logging.getLogger(__name__)
BACKOFF_S = 1.0
MOST_DOUBLINGS = 4
"""Waits before retries grow to 16 seconds, or are longer if the server asks for that."""
FULL = (TOO_MANY, 503)
"""Statuses of a server that has no room now. Others from 500 on are of the request itself."""
MOST_FAILURES = 3
"""Tries of a request that fails by itself."""


class Inside:
    """Sends lines as the client that made the batch: `salt` of its key, and `client`, whose share
    of the engine they take. `app` stands behind the guards."""

    def __init__(self, app: ASGIApp, salt: str, client: str) -> None:
        self._app, self._salt, self._client = app, salt, client
        self._stopped, self._left, self._turns = asyncio.Event(), asyncio.Event(), Turns()

    def stop(self) -> None:
        """Try nothing again; requests under way go on."""
        self._stopped.set()

    def leave(self) -> None:
        """Leave the requests under way, as a client that disconnects."""
        self._stopped.set()
        self._left.set()

    async def send(self, custom_id: str, route: str, body: bytes) -> Result | None:
        """The result of one line; None if it has none when this was stopped.

        A server without room is asked again for as long as the batch lives.
        """
        retries = num_failed = 0
        while not self._stopped.is_set():
            await self._turns.take()  # streams go on between many that begin
            answer = await self._asked(route, body)
            if answer is None:
                break
            num_failed += answer.status not in FULL
            if answer.status < 500 and answer.status != TOO_MANY or num_failed == MOST_FAILURES:
                return answered(custom_id, answer.status, answer.request_id, bytes(answer.body))
            least_s = delay_s(answer.retry_after_s, 0, BACKOFF_S)
            wait_s = max(least_s, delay_s(None, min(retries, MOST_DOUBLINGS), BACKOFF_S))
            retries += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), wait_s)
        return None

    async def _asked(self, route: str, body: bytes) -> "_Answer | None":
        """The answer to one try; None if it was left."""
        answer = _Answer(body, self._left, self._turns)
        scope = _scope(route, len(body))
        scope["state"] = {SALT: self._salt, CLIENT: self._client, ASKED_ID: answer.request_id}
        try:
            await self._app(scope, answer.receive, answer.send)
        except Exception:  # of whatever a line makes of the server, only its own result may suffer
            log.exception("a line of a batch failed", extra={"request_id": answer.request_id})
        if self._left.is_set():
            return None
        if not answer.is_whole:
            answer.fail()
        return answer


class _Answer:
    """One request in ASGI, and what comes of it."""

    def __init__(self, asked: bytes, left: asyncio.Event, turns: Turns) -> None:
        self._asked, self._left, self._turns = asked, left, turns
        self._is_asked = self.is_whole = False
        self.request_id = uuid.uuid4().hex
        self.status, self.body = 0, bytearray()
        self.retry_after_s: float | None = None

    async def receive(self) -> Message:
        """The whole body, then the end of the client once it leaves."""
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": self._asked, "more_body": False}
        await self._left.wait()
        await self._turns.take()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Take in a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = Headers(raw=list(message.get("headers", ())))
            self.retry_after_s = number(headers.get("retry-after"))
        else:
            self.body += message.get("body", b"")
            self.is_whole = not message.get("more_body", False)

    def fail(self) -> None:
        """Be the answer of a server that broke off."""
        self.status = 500
        self.body = bytearray(error_body(SluiceError("an internal error occurred; see the log")))


def _scope(route: str, num_bytes: int) -> Scope:
    """A request as uvicorn would tell it."""
    headers = {
        "content-type": JSON,
        "content-length": str(num_bytes),
        CLASS_HEADER: BACKGROUND,
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": route,
        "raw_path": route.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
    }
