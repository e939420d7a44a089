"""*Rim*: requests in to the queue, answers out with the engine's own bytes."""

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace

import aiohttp
from sluice_core.bounded import Numbers
from sluice_core.errors import NotReady, SluiceError
from sluice_core.work import is_background
from sluice_frontend.http.beside import Beside
from sluice_frontend.http.bodies import Bodies, too_many
from sluice_frontend.http.clients import CLIENT
from sluice_frontend.http.guards import Inflight
from sluice_frontend.serving.admission import MAX_ON_THEIR_WAY, Admission
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .config import GateConfig
from .engine.upstream import Upstream
from .queue.backend import GateBackend
from .queue.flight import Flight
from .relay import Answer, Relay, while_read
from .request.asked import Asked, Door, read
from .request.estimate import TokenSize
from .request.ollama import check_route
from .request.operations import READING, takes_place

AWAY = "the engine behind this gate does not answer"


class Proxy:
    """An ASGI application: requests that bring work take places, others pass beside them.

    `model`: the one that the engine serves, once it is known.
    """

    def __init__(
        self,
        config: GateConfig,
        admission: Admission,
        backend: GateBackend,
        upstream: Upstream,
        unreadable: Counter[str],
    ) -> None:
        """`unreadable` counts the numbers of the engine that are left out, by source."""
        self._admission, self._backend, self._upstream = admission, backend, upstream
        self._bodies = Bodies(config.server, takes_encoded=True)
        engine, server = config.engine.engine, config.server
        self._door = Door(engine, server.served_model_name, server.max_body_bytes)
        self._size, self._beside = TokenSize(), Beside(memory_bytes=server.reading_bytes)
        self._relay = Relay(backend, self._size, Numbers("usage", unreadable))
        self._passing = Inflight()

    def close(self) -> None:
        """End the process that reads large bodies."""
        self._beside.close()

    def serves(self, model: str | None) -> None:
        """Take `model` as the one that the engine serves."""
        self._door = replace(self._door, model=model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(self._upstream, scope, send)
        has_work = takes_place(scope["method"], scope["path"])
        client = scope["state"][CLIENT]
        try:
            if self._door.engine == "ollama":
                check_route(scope["method"], scope["path"])
            async with AsyncExitStack() as held:
                if not has_work:
                    held.enter_context(self._passing.open(client, MAX_ON_THEIR_WAY))
                memory = await held.enter_async_context(AsyncExitStack())
                own = self._admission.refusal_of(Headers(scope=scope))
                refusal = own if has_work else too_many
                body = self._bodies.read(Request(scope, receive), refusal)
                answer.hold(await memory.enter_async_context(body), memory)
                await (self._work(answer, receive) if has_work else self._pass_on(answer, receive))
        except ClientDisconnect:
            return
        except SluiceError as error:
            await answer.fail(error, receive)

    async def _read(self, scope: Scope, body: bytes) -> Asked:
        headers = Headers(scope=scope)
        joined = {name: ", ".join(headers.getlist(name)) for name in headers}
        return await self._beside.result(len(body), read, self._door, scope["path"], body, joined)

    # -- without a place

    async def _pass_on(self, answer: Answer, receive: Receive) -> None:
        scope = answer.scope
        if self._door.engine == "ollama" and scope["method"] not in READING:
            await self._read(scope, answer.body)

        async def serve() -> None:
            try:
                async with answer.asked() as reply:
                    await self._relay.passed(answer, reply)
            except aiohttp.ClientError as error:
                raise self._upstream.died(error) from error

        if not self._upstream.is_up:
            raise NotReady(AWAY, retry_after_s=1)
        await while_read(None, receive, serve())

    # -- with places

    async def _work(self, answer: Answer, receive: Receive) -> None:
        flight = await self._open(answer)
        try:
            await while_read(flight.stop, receive, self._serve(flight, answer))
        except SluiceError as error:
            self._backend.leave(flight, error)
            raise
        finally:
            self._backend.leave(flight)

    async def _open(self, answer: Answer) -> Flight:
        arrival_s, is_behind = time.monotonic(), is_background(Headers(scope=answer.scope))
        self._check_up(is_behind)
        asked = await self._read(answer.scope, answer.body)
        answer.body, answer.keeps_body = asked.body or answer.body, is_behind
        work = asked.work(self._size, answer.scope["state"][CLIENT])
        self._check_up(is_behind)
        self._admission.admit(work, arrival_s)
        return self._backend.open(asked, work, arrival_s)

    def _check_up(self, is_background: bool) -> None:
        """Raise NotReady while the engine is away."""
        self._admission.check_open(is_background=is_background)
        if self._backend.is_away:
            away = NotReady(AWAY, retry_after_s=1)
            raise self._admission.refused(away, is_background=is_background)

    async def _serve(self, flight: Flight, answer: Answer) -> None:
        await flight.turn
        if not flight.work.is_background:
            await self._ask(flight, answer)
            return
        while not await self._is_asked(flight, answer):
            self._backend.requeue(flight)
            await flight.turn

    async def _is_asked(self, flight: Flight, answer: Answer) -> bool:
        """Serve a background flight; False if it was recalled before its answer began."""
        asking = asyncio.create_task(self._ask(flight, answer))
        recalled = asyncio.create_task(flight.recall.wait())
        try:
            await asyncio.wait((asking, recalled), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and not flight.has_head:
                return False
            await asking
            return True
        finally:
            for task in (asking, recalled):
                task.cancel()
            await asyncio.gather(asking, recalled, return_exceptions=True)

    async def _ask(self, flight: Flight, answer: Answer) -> None:
        try:
            async with answer.asked() as reply:
                try:
                    await self._relay.answered(flight, answer, reply)
                finally:
                    if not reply.content.at_eof():
                        reply.close()  # the engine stops at once
        except aiohttp.ClientError as error:
            raise self._upstream.died(error) from error
