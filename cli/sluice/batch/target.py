"""*rim*: the endpoint of a batch: one that runs already, or an engine that is started for it."""

import argparse
import asyncio
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
from sluice_frontend.batches.run import IN_FLIGHT

from sluice.measure.endpoint import EndpointError, LiveCap, find_live, named_live, open_session
from sluice.processes import LEAVES_S, die_with_parent, end, free_ports, spawn

from .send import answers

FOREIGN = 256
"""Requests under way where no cap is told."""
CONNECT_S = 10.0
ASK_AGAIN_S = 0.2
WAIT_S = 2.0
"""Seconds until an API that is not there yet is looked for again."""


class Target:
    """An API, and how many requests may be under way in it."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        live: LiveCap | None,
        concurrency: int | None,
        *,
        is_background: bool,
    ) -> None:
        self.session, self.url = session, url
        self._live, self._is_background = live, is_background
        self._most, self._halvings, self._halved_s = concurrency or FOREIGN, 0, 0.0

    @property
    def limit(self) -> int:
        """Requests under way at most."""
        return max(1, self._most >> self._halvings)

    async def read_cap(self) -> None:
        """Follow the engine's own cap, which may change at any time; else keep what is known.
        Background requests may pass it."""
        if self._live is not None and self._is_background and self._live.ceiling:
            self._most = IN_FLIGHT * self._live.ceiling
        elif self._live is not None:
            with suppress(EndpointError, aiohttp.ClientError, TimeoutError):
                self._most = IN_FLIGHT * await self._live.cap()

    def slow_down(self, sent_s: float) -> None:
        """Halve the limit, once for all requests that were sent under the former one."""
        if sent_s > self._halved_s:
            self._halvings, self._halved_s = self._halvings + 1, time.monotonic()


@asynccontextmanager
async def opened(args: argparse.Namespace, key: str) -> AsyncIterator[Target]:
    """The endpoint that the flags name, ready; its engine ends on leaving. Raises EndpointError."""
    async with open_session(args.api_key_file, args.timeout, CONNECT_S, key) as api:
        if args.url:
            while not await answers(api, args.url):
                if args.report_port is None:
                    raise EndpointError(f"{args.url} does not answer")
                await asyncio.sleep(WAIT_S)
            async with _bounded(api, args, args.url, args.admin_url) as target:
                yield target
            return
        url, admin_url = (f"http://127.0.0.1:{port}" for port in free_ports(2))
        # It holds the memory, and so ends with this process.
        engine = await spawn(_line(args, url, admin_url), prepare=die_with_parent)
        try:
            await _loaded(engine, api, url)
            async with _bounded(api, args, url, admin_url) as target:
                yield target
        finally:
            await end(engine, LEAVES_S)


@asynccontextmanager
async def _bounded(
    api: aiohttp.ClientSession, args: argparse.Namespace, url: str, admin_url: str | None
) -> AsyncIterator[Target]:
    """The API at `url` with its limit: as asked, as its admin port tells, or else `FOREIGN`."""
    live = None
    async with open_session(args.admin_token_file, CONNECT_S, CONNECT_S) as admin:
        if args.concurrency is None and admin_url:
            live = await named_live(admin, admin_url, None)
        elif args.concurrency is None:
            with suppress(EndpointError):  # nobody asked for it
                live = await find_live(api, admin, url, None)
        target = Target(api, url, live, args.concurrency, is_background=args.background)
        await target.read_cap()
        yield target


def _line(args: argparse.Namespace, *urls: str) -> list[str]:
    """The command line of `sluice serve`; the user's flags come last and win."""
    port, admin_port = (url.rpartition(":")[2] for url in urls)
    given = {
        "port": port,
        "admin-port": admin_port,
        "api-key-file": args.api_key_file,
        "admin-token-file": args.admin_token_file,
        "served-model-name": args.served_model_name,
    }
    engine = [f"--engine={args.engine}"] if args.engine else []
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    begins = [sys.executable, "-m", "sluice", "serve", *engine, args.model]
    return [*begins, "--host=127.0.0.1", *flags, *args.flags]


async def _loaded(engine: Process, api: aiohttp.ClientSession, url: str) -> None:
    """Wait until the engine answers; raises EndpointError if it ends."""
    while engine.returncode is None:
        with suppress(aiohttp.ClientError):
            async with api.get(f"{url}/readyz") as answer:
                if answer.ok:
                    return
        await asyncio.sleep(ASK_AGAIN_S)
    raise EndpointError(f"the engine ended with {engine.returncode} before it was ready")
