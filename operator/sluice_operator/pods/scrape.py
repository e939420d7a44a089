"""Evidence and configuration of the own pods. A misbehaving pod is named, and never fatal.

Any image may stand for the worker's. So exchanges have a limit for all objects and one for each
object, a deadline and a byte cap. Redirects are not followed. Decoding is strict: NaN, negative
counts and missing fields are refused by the contract's types.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import httpx
import msgspec
from sluice_core.contract import (
    TICK_RING,
    BatchReport,
    Evidence,
    RuntimeConfig,
    RuntimePatch,
    Tick,
    decode,
    encode,
)
from sluice_core.words import clean, in_url

from ..children.pod import ADMIN_PORT
from ..metrics import Metrics
from ..tuner.constants import BURST_MEMORY_S
from ..tuner.evidence import clock_shift

T = TypeVar("T")
DEADLINE_S, CONNECT_S = 2.0, 1.5
MAX_OPEN = 64
"""Exchanges at once with the pods of all objects."""
MAX_OPEN_OF_OBJECT = 8
"""Exchanges at once with the pods of one object. Others wait for deadlines only if eight or more
objects have pods that never answer."""
MAX_BODY_BYTES = 8 << 20
"""Most bytes of an answer. A full ring of a pod with 300 short requests/s is 4 MiB, and 6 MiB if
each tick's lengths differ a hundredfold."""
MAX_CONFIG_BYTES = 64 << 10
"""Most bytes of a configuration, which takes 400."""
MAX_KEPT_BYTES = 128 << 20
"""Most bytes of one object's ticks, in equal parts for its pods. A pod's full ring takes 16 MiB at
30 requests/s and 40 at 300. The oldest ticks beyond it are dropped."""
_TICK_BYTES, _ENTRY_BYTES = 1024, 104
"""Bytes of a tick without its sketches, and of each entry in these: a slot and two integers."""
MAX_GONE = 16
"""Pods that are gone and still held: in a rollout that loops, the newest."""


class ScrapeError(Exception):
    """A pod did not answer as the contract says; `reason` is short and bounded, for a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(clean(message))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """One pod to ask."""

    uid: str
    ip: str
    port: int = ADMIN_PORT

    def url(self, path: str) -> str:
        """The URL of `path` at the admin port."""
        return f"http://{in_url(self.ip)}:{self.port}{path}"


@dataclass(frozen=True, slots=True)
class Scrape:
    """The held evidence of one pod. `problem`: why its last answer is missing, None if it is there.

    `evidence` keeps at most TICK_RING ticks, also those of earlier boots: what they served belongs
    to the promise. `seen_s`: when it was last read.
    """

    evidence: Evidence | None = None
    config: RuntimeConfig | None = None
    seen_s: float | None = None
    problem: str | None = None

    @property
    def ticks(self) -> list[Tick]:
        """The ticks of its evidence."""
        return self.evidence.ticks if self.evidence else []

    def within(self, num_bytes: int) -> "Scrape":
        """This scrape without the oldest ticks that do not fit. The newest stays, as it tells what
        to ask for next."""
        first, left = len(self.ticks), num_bytes
        while first and (size := bytes_of(self.ticks[first - 1])) <= left:
            first -= 1
            left -= size
        first = min(first, len(self.ticks) - 1)
        if self.evidence is None or first <= 0:
            return self
        evidence = msgspec.structs.replace(self.evidence, ticks=self.ticks[first:])
        return replace(self, evidence=evidence)


def bytes_of(tick: Tick) -> int:
    """Approximate memory of `tick` in bytes."""
    sketches = tick.ttft.sketch, tick.itl.sketch, tick.e2e.sketch
    num_entries = sum(map(len, sketches)) + len(tick.failed)
    return _TICK_BYTES + _ENTRY_BYTES * num_entries


def merge(held: Evidence | None, fresh: Evidence) -> Evidence:
    """`fresh` preceded by the ticks already held, also those of another boot."""
    first = fresh.ticks[0].seq if fresh.ticks else None
    before = [
        tick
        for tick in (held.ticks if held else [])
        if tick.boot_id != fresh.boot_id or first is None or tick.seq < first
    ]
    return msgspec.structs.replace(fresh, ticks=(before + fresh.ticks)[-TICK_RING:])


def last_seq(held: Evidence | None) -> int | None:
    """The newest tick held of the present boot, for the query's `after`."""
    ticks: list[Tick] = held.ticks if held else []
    is_present = bool(held and ticks and ticks[-1].boot_id == held.boot_id)
    return ticks[-1].seq if is_present else None


class Scraper:
    """The pods' admin ports of one object. Holds each pod's evidence for as long as it counts.

    `exchanges`: places for exchanges, which all objects share.
    """

    def __init__(
        self, client: httpx.AsyncClient, metrics: Metrics, exchanges: asyncio.Semaphore
    ) -> None:
        self._client, self._metrics, self._exchanges = client, metrics, exchanges
        self._own = asyncio.Semaphore(MAX_OPEN_OF_OBJECT)
        self._held: dict[str, Scrape] = {}

    def knows(self, uid: str) -> bool:
        """True if that pod has been asked before."""
        return uid in self._held

    async def scrape(
        self, targets: tuple[ScrapeTarget, ...], token: str, now: float, window_s: float = 0.0
    ) -> Mapping[str, Scrape]:
        """Ask all `targets` at once; the result is by pod uid. Pods that are gone stay in it,
        because their misses still count. They keep the ticks of `window_s`, or of the burst memory
        if that is longer."""
        for target in targets:
            self._held.setdefault(target.uid, Scrape())
        await asyncio.gather(*(self._scrape_one(t, token, now) for t in targets))
        fresh = {target.uid: self._held[target.uid] for target in targets}
        since_s = now - max(window_s, BURST_MEMORY_S)
        gone = {
            uid: _since(held, since_s, now).within(self._most_bytes)
            for uid, held in self._held.items()
            if uid not in fresh
        }
        self._held = dict([one for one in gone.items() if one[1].evidence][-MAX_GONE:]) | fresh
        return self._held

    async def patch(self, target: ScrapeTarget, token: str, patch: RuntimePatch) -> RuntimeConfig:
        """Send `patch`; returns the pod's effective configuration. ScrapeError if it is refused."""
        call = _Call("/v1/runtime_config", MAX_CONFIG_BYTES, "PATCH", encode(patch))
        config = _decoded(await self._ask(target, token, call), RuntimeConfig)
        held = self._held.get(target.uid, Scrape())
        self._held[target.uid] = replace(held, config=config)
        return config

    async def report(self, target: ScrapeTarget) -> BatchReport:
        """How far a run of `sluice batch` is. Raises ScrapeError."""
        answer = await self._ask(target, "", _Call("/", MAX_CONFIG_BYTES))
        return _decoded(answer, BatchReport)

    async def _scrape_one(self, target: ScrapeTarget, token: str, now: float) -> None:
        held = self._held[target.uid]
        try:
            call = _Call("/v1/runtime_config", MAX_CONFIG_BYTES)
            config = _decoded(await self._ask(target, token, call), RuntimeConfig)
            is_same = held.evidence is not None and held.evidence.boot_id == config.boot_id
            after = last_seq(held.evidence) if is_same else None
            path = "/v1/evidence" if after is None else f"/v1/evidence?after={after}"
            fresh = _decoded(await self._ask(target, token, _Call(path, MAX_BODY_BYTES)), Evidence)
        except ScrapeError as e:
            self._metrics.scrape_failures.labels(e.reason).inc()
            scrape = replace(held, problem=str(e))
        else:
            scrape = Scrape(merge(held.evidence, fresh), config, now)
        self._held[target.uid] = scrape.within(self._most_bytes)

    @property
    def _most_bytes(self) -> int:
        """Most bytes that may be kept of one pod."""
        return MAX_KEPT_BYTES // max(len(self._held), 1)

    async def _ask(self, target: ScrapeTarget, token: str, call: "_Call") -> bytes:
        async with self._own, self._exchanges, _deadline():
            return await self._send(target, token, call)

    async def _send(self, target: ScrapeTarget, token: str, call: "_Call") -> bytes:
        # identity: a compressed answer could be small on the wire and huge in memory.
        headers = {"Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        given: dict[str, Any] = {"headers": headers, "content": call.body}
        try:
            async with self._client.stream(call.verb, target.url(call.path), **given) as response:
                answer = await _capped(response, call.most)
        except httpx.ConnectTimeout as e:
            said = f"no connection to port {target.port} within {CONNECT_S:g} s"
            why = "as where no NetworkPolicy lets the operator in"
            raise ScrapeError("Timeout", f"{said}, {why}") from e
        except httpx.TimeoutException as e:
            raise ScrapeError("Timeout", f"{call.path}: {type(e).__name__}") from e
        except httpx.HTTPError as e:
            raise ScrapeError("Unreachable", f"{call.path}: {type(e).__name__}") from e
        if response.status_code != 200:
            raise ScrapeError("Refused", f"{call.path} answered {response.status_code}")
        return answer


@dataclass(frozen=True, slots=True)
class _Call:
    """One request. `most`: bytes of its answer."""

    path: str
    most: int
    verb: str = "GET"
    body: bytes | None = None


def create_client() -> httpx.AsyncClient:
    """A client for pods only: no proxy from the environment, no redirects."""
    limits = httpx.Limits(max_connections=MAX_OPEN, max_keepalive_connections=MAX_OPEN)
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        limits=limits,
        timeout=httpx.Timeout(DEADLINE_S, connect=CONNECT_S),
    )


def _since(held: Scrape, time_s: float, now: float) -> Scrape:
    """Evidence of a gone pod since `time_s`; an empty Scrape if there is none."""
    if not held.evidence or not held.ticks:
        return Scrape()
    shift_s = clock_shift(held.ticks[-1].t_s, held.seen_s, now)
    ticks = [tick for tick in held.ticks if tick.t_s + shift_s >= time_s]
    if not ticks:
        return Scrape()
    evidence = msgspec.structs.replace(held.evidence, ticks=ticks)
    return replace(held, evidence=evidence, config=None)


async def _capped(response: httpx.Response, most: int) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > most:
            raise ScrapeError("TooLarge", f"an answer of over {most >> 10} KiB")
        parts.append(part)
    return b"".join(parts)


@asynccontextmanager
async def _deadline() -> AsyncIterator[None]:
    """The whole exchange ends in time: httpx's own timeout is per read, so a drip never ends."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    except TimeoutError as e:
        raise ScrapeError("Timeout", f"no answer within {DEADLINE_S:g} s") from e


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decode(body, kind)
    except (ValueError, RecursionError) as e:  # bad UTF-8 and deep nesting too
        raise ScrapeError("Malformed", f"not a valid {kind.__name__}: {str(e)[:200]}") from e
