"""Evidence and configuration of the own pods. One that misbehaves is named, and never fatal.

Every answer has a deadline and a size cap, redirects are not followed, and decoding is strict: NaN,
negative counts and missing fields are refused by the contract's types.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx
import msgspec
from sluice_worker.contract import (
    TICK_RING,
    Evidence,
    RuntimeConfig,
    RuntimePatch,
    Tick,
    decode,
    encode,
)

from .address import in_url
from .metrics import Metrics
from .pod import ADMIN_PORT
from .tuner.constants import BURST_MEMORY_S
from .tuner.evidence import clock_shift

T = TypeVar("T")
DEADLINE_S = 2.0
MAX_BODY_BYTES = 8 << 20
"""A full ring of a pod with 300 short requests/s is 4 MiB, and 6 where each tick's lengths differ a
hundredfold."""
MAX_ENTRIES = 1 << 19
"""Of sketches, held of one pod: a full ring has 230,000 at 30 requests/s and 480,000 at 300; the
oldest ticks beyond it are let go. Any image may stand for the worker's: its own take 120 bytes."""
MAX_OPEN = 64
"""Exchanges of one object at once: pods that never answer hold a connection each for all of the
deadline, and all objects share `MAX_CONNECTIONS`."""
MAX_CONNECTIONS = 256
MAX_GONE = 16
"""Pods that are gone and still held: of a rollout that loops, the newest."""


class ScrapeError(Exception):
    """A pod did not answer as the contract says; `reason` is short and bounded, for a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Target:
    """One pod to ask."""

    uid: str
    ip: str
    port: int = ADMIN_PORT

    def url(self, path: str) -> str:
        """`path` at the admin port."""
        return f"http://{in_url(self.ip)}:{self.port}{path}"


@dataclass(frozen=True, slots=True)
class Scrape:
    """What is held of one pod. `problem`: why its last answer is missing, None if it is there.

    `evidence` keeps at most TICK_RING ticks and MAX_ENTRIES of their sketches, those of earlier
    boots as well: what they served belongs to the promise. `seen_s`: when it was last read.
    """

    evidence: Evidence | None = None
    config: RuntimeConfig | None = None
    seen_s: float | None = None
    problem: str | None = None


def merge(held: Evidence | None, fresh: Evidence) -> Evidence:
    """`fresh` with the ticks already held before it, also those of another boot."""
    first = fresh.ticks[0].seq if fresh.ticks else None
    before = [
        tick
        for tick in (held.ticks if held else [])
        if tick.boot_id != fresh.boot_id or first is None or tick.seq < first
    ]
    return msgspec.structs.replace(fresh, ticks=_newest(before + fresh.ticks))


def last_seq(held: Evidence | None) -> int | None:
    """The newest tick held of the present boot, for `after`."""
    ticks: list[Tick] = held.ticks if held else []
    is_present = bool(held and ticks and ticks[-1].boot_id == held.boot_id)
    return ticks[-1].seq if is_present else None


class Scraper:
    """The pods' admin ports of one object. Holds what each pod said, for as long as it counts."""

    def __init__(self, client: httpx.AsyncClient, metrics: Metrics) -> None:
        self._client, self._metrics = client, metrics
        self._held: dict[str, Scrape] = {}
        self._turns = asyncio.Semaphore(MAX_OPEN)

    def knows(self, uid: str) -> bool:
        """Whether that pod has been asked before."""
        return uid in self._held

    async def scrape(
        self, targets: tuple[Target, ...], token: str, now: float, window_s: float = 0.0
    ) -> Mapping[str, Scrape]:
        """Ask all `targets` at once; by pod uid. Pods that are gone are in it with their ticks of
        the last `window_s`, or for as long as bursts are remembered: their misses do not leave with
        them."""
        answers = await asyncio.gather(*(self._scrape_one(t, token, now) for t in targets))
        fresh = {target.uid: answer for target, answer in zip(targets, answers, strict=True)}
        since_s = now - max(window_s, BURST_MEMORY_S)
        gone = [(u, _since(held, since_s, now)) for u, held in self._held.items() if u not in fresh]
        self._held = dict([one for one in gone if one[1].evidence][-MAX_GONE:]) | fresh
        return self._held

    async def patch(self, target: Target, token: str, patch: RuntimePatch) -> RuntimeConfig:
        """Send `patch`; the pod's effective configuration. ScrapeError if it is refused."""
        async with self._turns, _deadline():
            body = await self._call("PATCH", target, "/v1/runtime_config", token, encode(patch))
        config = _decoded(body, RuntimeConfig)
        held = self._held.get(target.uid, Scrape())
        self._held[target.uid] = replace(held, config=config)
        return config

    async def _scrape_one(self, target: Target, token: str, now: float) -> Scrape:
        held = self._held.get(target.uid, Scrape())
        try:
            async with self._turns, _deadline():
                config = _decoded(
                    await self._call("GET", target, "/v1/runtime_config", token), RuntimeConfig
                )
                evidence = await self._evidence(target, token, held, config.boot_id)
        except ScrapeError as e:
            self._metrics.scrape_failures.labels(e.reason).inc()
            return replace(held, problem=str(e))
        return Scrape(evidence, config, now, None)

    async def _evidence(self, target: Target, token: str, held: Scrape, boot_id: str) -> Evidence:
        same_boot = held.evidence is not None and held.evidence.boot_id == boot_id
        after = last_seq(held.evidence) if same_boot else None
        query = "" if after is None else f"?after={after}"
        fresh = _decoded(await self._call("GET", target, f"/v1/evidence{query}", token), Evidence)
        return merge(held.evidence, fresh)

    async def _call(
        self, verb: str, target: Target, path: str, token: str, body: bytes | None = None
    ) -> bytes:
        # identity: a compressed answer could be small on the wire and huge in memory.
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            async with self._client.stream(
                verb, target.url(path), headers=headers, content=body
            ) as response:
                answer = await _capped(response)
        except httpx.HTTPError as e:
            raise ScrapeError("Unreachable", f"{path}: {type(e).__name__}") from e
        if response.status_code != 200:
            raise ScrapeError("Refused", f"{path} answered {response.status_code}")
        return answer


def create_client() -> httpx.AsyncClient:
    """A client for pods only: no proxy from the environment, no redirects."""
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=128)
    return httpx.AsyncClient(
        trust_env=False, follow_redirects=False, limits=limits, timeout=DEADLINE_S
    )


def _newest(ticks: list[Tick]) -> list[Tick]:
    """As many as may be held."""
    kept: list[Tick] = []
    num_entries = 0
    for tick in reversed(ticks[-TICK_RING:]):
        num_entries += sum(len(part.sketch) for part in (tick.ttft, tick.itl, tick.e2e))
        if num_entries > MAX_ENTRIES:
            break
        kept.append(tick)
    return kept[::-1]


def _since(held: Scrape, time_s: float, now: float) -> Scrape:
    """What a pod that is not asked any more did from then on; without evidence if nothing."""
    if not held.evidence or not held.evidence.ticks:
        return Scrape()
    ticks = held.evidence.ticks
    shift_s = clock_shift(ticks[-1].t_s, held.seen_s, now)
    ticks = [tick for tick in ticks if tick.t_s + shift_s >= time_s]
    if not ticks:
        return Scrape()
    evidence = msgspec.structs.replace(held.evidence, ticks=ticks)
    return replace(held, evidence=evidence, config=None)


async def _capped(response: httpx.Response) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ScrapeError("TooLarge", f"an answer of over {MAX_BODY_BYTES >> 20} MiB")
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
