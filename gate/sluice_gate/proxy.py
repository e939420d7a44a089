"""*Rim*: requests in to the queue, answers out with the engine's own bytes.

Bodies go to the engine as they came, and answers to the client as the engine wrote them.
"""

import time

import aiohttp
from sluice_core.errors import NotReady, SluiceError
from sluice_frontend.http.bodies import Bodies, too_many
from sluice_frontend.serving.admission import Admission
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .asked import TokenSize, read
from .backend import GateBackend
from .config import GateConfig
from .flight import Flight
from .relay import Answer, Relay, while_read
from .upstream import Upstream

AWAY = "the engine behind this gate does not answer"
FREE_METHODS = ("GET", "HEAD", "OPTIONS")
FREE_PATHS = ("/tokenize", "/detokenize", "/apply-template", "/api/show")
"""Paths that bring the engine's batch no work, also when they are posted to."""


class Proxy:
    """An ASGI application: requests that bring work take places, others pass beside them."""

    def __init__(
        self, config: GateConfig, admission: Admission, backend: GateBackend, upstream: Upstream
    ) -> None:
        self._engine, self._admission = config.engine.engine, admission
        self._backend, self._upstream = backend, upstream
        self._bodies = Bodies(config.server)
        self._size = TokenSize()
        self._relay = Relay(backend, self._size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(self._upstream, scope, send)
        is_free = scope["method"] in FREE_METHODS or scope["path"] in FREE_PATHS
        refusal = too_many if is_free else self._admission.refuse_body
        try:
            async with self._bodies.read(Request(scope, receive), refusal) as body:
                if is_free:
                    await self._pass_on(answer, body, receive)
                else:
                    await self._work(answer, body, receive)
        except ClientDisconnect:
            return
        except SluiceError as error:
            await answer.fail(error, receive)

    # -- without a place

    async def _pass_on(self, answer: "Answer", body: bytes, receive: Receive) -> None:
        async def serve() -> None:
            try:
                async with answer.asked(body) as reply:
                    await self._relay.passed(answer, reply)
            except aiohttp.ClientError as error:
                raise self._upstream.died(error) from error

        if not self._upstream.is_up:
            raise NotReady(AWAY, retry_after_s=1)
        await while_read(None, receive, serve())

    # -- with places

    async def _work(self, answer: "Answer", body: bytes, receive: Receive) -> None:
        flight = self._open(answer.scope["path"], body, Headers(scope=answer.scope))
        try:
            await while_read(flight.stop, receive, self._serve(flight, answer, body))
        except SluiceError as error:
            self._backend.leave(flight, error)
            raise
        finally:
            self._backend.leave(flight)

    def _open(self, path: str, body: bytes, headers: Headers) -> Flight:
        arrival_s = time.monotonic()
        ceiling = self._admission.check_open().ceiling
        if self._backend.is_away:
            raise self._admission.refused(NotReady(AWAY, retry_after_s=1))
        asked = read(path, body, headers, self._engine)
        work = asked.work(self._size, client="")
        self._admission.admit_sized(work, ceiling, arrival_s)
        return self._backend.open(asked, work, arrival_s)

    async def _serve(self, flight: Flight, answer: "Answer", body: bytes) -> None:
        await flight.turn
        try:
            async with answer.asked(body) as reply:
                try:
                    await self._relay.answered(flight, answer, reply)
                finally:
                    if not reply.content.at_eof():
                        reply.close()  # the engine stops at once
        except aiohttp.ClientError as error:
            raise self._upstream.died(error) from error
