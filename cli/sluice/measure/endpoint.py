"""A server under test: how to put a cap in force on it, and how to read its counters."""

import argparse
import asyncio
import json
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from sluice_core.bounded import MAX_COUNT, MAX_TOKENS, count, number
from sluice_core.contract import RuntimeConfig, RuntimePatch, Slo, decode, encode
from sluice_core.words import clean, in_url

from sluice.measure.curve import StepCosts

ADMIN_PORT = 8001
RUNTIME_CONFIG = "/v1/runtime_config"
LIVE = "changed live in the running server, through its admin port"
TOLD = ", which is told the targets as well, as an operator would"
UNREADABLE = AttributeError, LookupError, RecursionError, TypeError, ValueError
"""Errors that reading a malformed list of models raises."""
CLIENT_SIDE = (
    "a limit of this client on its own open requests: the server was left as it is and keeps its "
    "own max_num_seqs, so what waits, waits here, and a cap over the server's own shows nothing new"
)


class EndpointError(Exception):
    """The server cannot be measured as asked; the message says why, perhaps in its words."""

    def __init__(self, message: str) -> None:
        super().__init__(clean(message))


def base_url(text: str) -> str:
    """The URL of an API without a route, and without the /v1 that OpenAI's clients are given:
    argparse's `type=`."""
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL like http://localhost:8000")
    if "@" in parts.netloc:
        raise argparse.ArgumentTypeError("the URL holds a password, and results name their URL")
    if "?" in text or "#" in text:
        told = f"{text!r} has a query or a fragment, behind which no route can be put"
        raise argparse.ArgumentTypeError(told)
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def open_session(
    bearers: Path | None, timeout_s: float, connect_s: float | None = None, key: str = ""
) -> aiohttp.ClientSession:
    """Connections that send the first bearer token of a file, or else `key`; raises
    EndpointError."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=connect_s),
        headers=_headers(bearers, key),
    )


def _headers(path: Path | None, key: str) -> dict[str, str]:
    if path is None:
        return {"Authorization": f"Bearer {key}"} if key else {}
    try:
        bearers = path.read_text().split()
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no text"
        raise EndpointError(f"{path} cannot be read: {why}") from e
    if not bearers:
        raise EndpointError(f"{path} is empty: it is to hold a bearer")
    return {"Authorization": f"Bearer {bearers[0]}"}


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """Counters of /metrics, under vLLM's names: tokens generated and engine steps since the start.

    `process_s`: start times of the processes that report one, in seconds of the epoch; they
    identify the processes. `costs`: the step model, which only our workers have.
    """

    tokens: float
    steps: float
    process_s: tuple[float, ...] = ()
    costs: StepCosts | None = None

    def batch_since(self, before: "ServerCounters | None") -> tuple[float | None, float | None]:
        """Steps, and tokens a step; None if `before` is of another process."""
        if before is None or before.process_s != self.process_s:
            return None, None
        steps, tokens = self.steps - before.steps, self.tokens - before.tokens
        if steps < 0 or tokens < 0:
            return None, None
        return steps, tokens / steps if steps else None


class LiveCap:
    """A worker of ours: it has a cap of its own, and each change of it opens an epoch.

    `slo`: targets for which it sizes its chunks of prefill meanwhile; None keeps its own.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, found: RuntimeConfig, slo: Slo | None = None
    ) -> None:
        self._session, self._url, self._found, self._slo = session, url, found, slo
        self.how = LIVE if slo is None else LIVE + TOLD
        self._epoch = found.epoch
        self._sent: dict[int, int] = {}
        self.ceiling: int | None = found.ceiling

    async def cap(self) -> int:
        """The cap in force; raises EndpointError, or aiohttp's error if nothing answers."""
        return (await read_config(self._session, self._url)).cap

    async def use(self, cap: int) -> None:
        """Open the next epoch with `cap`."""
        await self._patch(cap, self._slo)

    async def _patch(self, cap: int, slo: Slo | None) -> None:
        self._epoch += 1
        self._sent[self._epoch] = cap  # perhaps in force though no answer is ever read
        body = encode(RuntimePatch(epoch=self._epoch, cap=cap, slo=slo))
        async with self._session.patch(self._url + RUNTIME_CONFIG, data=body) as response:
            if response.status != 200:
                why = (await response.content.read(300)).decode(errors="replace")
                raise EndpointError(f"cap {cap} was refused: {why}")

    async def check(self) -> None:
        """Warn: an operator restores its own cap within seconds, which spoils the measurement."""
        if (await read_config(self._session, self._url)).epoch != self._epoch:
            raise EndpointError(
                "somebody else (an operator?) changed the cap meanwhile; measure a worker of your "
                "own, or give --client-side"
            )

    def slot(self) -> None:
        """Hold nothing: requests wait in the server."""

    async def counters(self) -> ServerCounters | None:
        """Counters of the admin port, which need no token."""
        return await scrape(self._session, self._url, self._found.max_num_batched_tokens)

    async def restore(self) -> int | None:
        """Restore the former cap and targets, unless somebody else has set others by now. Returns
        the restored cap."""
        now = await read_config(self._session, self._url)
        if self._sent.get(now.epoch) != now.cap:
            return None
        await self._patch(self._found.cap, self._found.slo)
        return self._found.cap


class ClientLimit:
    """Any other server: at most `cap` requests of ours are open at a time."""

    how = CLIENT_SIDE
    ceiling: int | None = None

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self._slots = asyncio.Semaphore(1)

    async def use(self, cap: int) -> None:
        """Takes effect from the next wave on."""
        self._slots = asyncio.Semaphore(cap)

    async def check(self) -> None:
        """Check nothing: nobody else can change it."""

    def slot(self) -> AbstractAsyncContextManager[Any]:
        return self._slots

    async def counters(self) -> ServerCounters | None:
        """Counters beside the API, at vLLM's place."""
        return await scrape(self._session, self._url)

    async def restore(self) -> None:
        """Restore nothing."""


Cap = LiveCap | ClientLimit
"""A way to put a cap in force. `how`: one clause for the reader; `ceiling`: None if unknown."""


async def read_config(session: aiohttp.ClientSession, url: str) -> RuntimeConfig:
    """The configuration in force; raises EndpointError, or aiohttp's error if nothing answers."""
    async with session.get(url + RUNTIME_CONFIG) as response:
        if response.status == 401:
            raise EndpointError(f"{url} wants its bearer: --admin-token-file")
        response.raise_for_status()
        return decode(await response.read(), RuntimeConfig)


async def named_live(admin: aiohttp.ClientSession, url: str, slo: Slo | None) -> LiveCap:
    """The admin port at `url`; raises EndpointError if none answers."""
    try:
        return LiveCap(admin, url, await read_config(admin, url), slo)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as e:
        raise EndpointError(f"no admin port answers at {url}: {e}") from e


async def find_live(
    api: aiohttp.ClientSession, admin: aiohttp.ClientSession, url: str, slo: Slo | None
) -> LiveCap | None:
    """The usual admin port on the host of `url`, if it belongs to the process that serves `url`."""
    parts = urlsplit(url)
    at = f"{parts.scheme}://{in_url(parts.hostname or '')}:{ADMIN_PORT}"
    served, found = await _processes(api, url), await _processes(admin, at)
    if not served or served != found:
        return None
    return await named_live(admin, at, slo)


def read_counters(text: str, chunk: int | None = None) -> ServerCounters | None:
    """The page's counters, None if it lacks them. `chunk`: the most prompt tokens of a step;
    without it the costs are unknown."""
    tokens = _values(text, "vllm:generation_tokens_total")
    steps = _values(text, "vllm:iteration_tokens_total_count")
    if not tokens or not steps:
        return None
    costs = {
        name: sum(_values(text, "sluice_step_model", f'coefficient="{name}"')) for name in "abcd"
    }
    known = StepCosts(**costs, chunk=chunk) if chunk and any(costs.values()) else None
    return ServerCounters(sum(tokens), sum(steps), _processes_of(text), known)


def _processes_of(text: str) -> tuple[float, ...]:
    return tuple(sorted(_values(text, "process_start_time_seconds")))


def _values(text: str, name: str, label: str = "") -> list[float]:
    """Samples that are no number, as NaN, are left out."""
    found = (
        number(line.rpartition(" ")[2], MAX_COUNT)
        for line in text.splitlines()
        if line.startswith((name + "{", name + " ")) and label in line
    )
    return [value for value in found if value is not None]


async def scrape(
    session: aiohttp.ClientSession, url: str, chunk: int | None = None
) -> ServerCounters | None:
    """The counters at `url`/metrics, None if there are none."""
    return read_counters(await _metrics(session, url), chunk)


async def _processes(session: aiohttp.ClientSession, url: str) -> tuple[float, ...]:
    """The start times of the processes behind `url`, of a gate and its engine; none if unknown."""
    return _processes_of(await _metrics(session, url))


async def _metrics(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/metrics") as response:
            return (await response.read()).decode(errors="replace") if response.ok else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`window`: in tokens, None if not reported."""

    name: str
    window: int | None


async def served_model(
    session: aiohttp.ClientSession, url: str, name: str | None = None
) -> ServedModel:
    """The first model that `url` lists, or the one of that `name`, even if it is not listed.

    Raises EndpointError if there is none.
    """
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status == 401:
                raise EndpointError(f"{url} wants its bearer: --api-key-file")
            response.raise_for_status()
            cards = [_served(card) for card in json.loads(await response.read())["data"]]
        listed = {card.name: card for card in reversed(cards)}
        return cards[0] if name is None else listed[name]
    except (aiohttp.ClientError, TimeoutError, *UNREADABLE) as e:
        if name is not None:
            return ServedModel(name, None)
        raise EndpointError(f"{url}/v1/models lists no model: {type(e).__name__}: {e}") from e


def _served(card: Any) -> ServedModel:
    return ServedModel(clean(str(card["id"])), count(card.get("max_model_len"), MAX_TOKENS))
