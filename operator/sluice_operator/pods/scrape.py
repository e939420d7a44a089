"""Evidence and configuration of the own pods. One that misbehaves is named, and never fatal.

Every answer has a deadline and a size cap, redirects are not followed, and decoding is strict: NaN,
negative counts and missing fields are refused by the contract's types.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from sys import getsizeof
from typing import Any, TypeVar

import httpx
import msgspec
from sluice_core.contract import (
    TICK_RING,
    TICK_SECONDS,
    Evidence,
    RuntimeConfig,
    RuntimePatch,
    Tick,
    decode,
    encode,
)

from ..children.pod import ADMIN_PORT
from ..cluster.address import in_url
from ..metrics import Metrics
from ..tuner.constants import BURST_MEMORY_S
from ..tuner.evidence import clock_shift
from .fair_limits import MAX_PROVEN, MAX_UNPROVEN, Shares, level

T = TypeVar("T")
_PROVEN = "sluice.proven"
DEADLINE_S = 2.0
MAX_BODY_BYTES = 8 << 20
"""A full ring of a pod with 300 short requests/s is 4 MiB, and 6 where each tick's lengths differ a
hundredfold."""
MAX_CONFIG_BYTES = 64 << 10
"""Of a configuration, which takes 400."""
MAX_NEWS_BYTES = 256 << 10
MAX_TICK_BYTES = 32 << 10
"""Of an answer with the ticks since the last look, and what each of these adds; 7 KiB are the most
that was seen of one."""
MAX_POD_BYTES = 60 << 20
"""Of the ticks held of one pod: a full ring takes 16 MiB at 30 requests/s and 40 at 300; the oldest
ticks beyond it are let go. Any image may stand for the worker's."""
_TICK_BYTES, _NUMBER_BYTES = 1024, 32
"""Of a tick without its sketches, and of each number in these that Python does not share."""
_SHARED_NUMBERS = range(-5, 257)
MAX_GONE = 16
"""Pods that are gone and still held: of a rollout that loops, the newest."""
_UNASKED_BYTES = 1 << 20
"""That an object may hold more before it asks whether there is room."""
_PATIENCE = 3
"""Answers in a row that are late, too long or none of the contract, until a pod is passed over at
looks: first at one, then at three, then at seven."""
_MAX_PASSED_OVER = 7
_COSTLY = frozenset({"Timeout", "TooLarge", "Malformed"})
"""What keeps from others what they could have had meanwhile."""


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

    `evidence` keeps at most TICK_RING ticks, those of earlier boots as well: what they served
    belongs to the promise. `seen_s`: when it was last read. `sizes`: bytes of each of its ticks.
    """

    evidence: Evidence | None = None
    config: RuntimeConfig | None = None
    seen_s: float | None = None
    problem: str | None = None
    sizes: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """What its ticks take."""
        return sum(self.sizes)

    @property
    def ticks(self) -> list[Tick]:
        """Those of its evidence."""
        return self.evidence.ticks if self.evidence else []

    def within(self, num_bytes: int) -> "Scrape":
        """It without its oldest ticks, as far as all of them take more than that; the newest stays,
        as it tells what to ask for next."""
        first, left = len(self.sizes), num_bytes
        while first and self.sizes[first - 1] <= left:
            first -= 1
            left -= self.sizes[first]
        first = min(first, len(self.sizes) - 1)
        if self.evidence is None or not first:
            return self
        evidence = msgspec.structs.replace(self.evidence, ticks=self.ticks[first:])
        return replace(self, evidence=evidence, sizes=self.sizes[first:])


def merge(held: Evidence | None, fresh: Evidence) -> Evidence:
    """`fresh` with the ticks already held before it, also those of another boot."""
    first = fresh.ticks[0].seq if fresh.ticks else None
    before = [
        tick
        for tick in (held.ticks if held else [])
        if tick.boot_id != fresh.boot_id or first is None or tick.seq < first
    ]
    return msgspec.structs.replace(fresh, ticks=(before + fresh.ticks)[-TICK_RING:])


def sizes_of(ticks: list[Tick], held: Scrape) -> tuple[int, ...]:
    """Bytes of each of `ticks`; those that are held were measured when they came."""
    known = dict(zip(map(id, held.ticks), held.sizes, strict=True))
    return tuple(known.get(id(tick)) or _size_of(tick) for tick in ticks)


def _size_of(tick: Tick) -> int:
    sketches = tick.ttft.sketch, tick.itl.sketch, tick.e2e.sketch
    numbers = chain.from_iterable(chain(one, one.values()) for one in sketches)
    num_own = sum(number not in _SHARED_NUMBERS for number in numbers)
    return _TICK_BYTES + sum(map(getsizeof, sketches)) + _NUMBER_BYTES * num_own


def last_seq(held: Evidence | None) -> int | None:
    """The newest tick held of the present boot, for `after`."""
    ticks: list[Tick] = held.ticks if held else []
    is_present = bool(held and ticks and ticks[-1].boot_id == held.boot_id)
    return ticks[-1].seq if is_present else None


@dataclass(frozen=True, slots=True)
class _Patience:
    """`num_failed`: costly failures of one pod in a row. `num_to_pass`: looks without it now.
    `is_proven`: it answered when it was last asked."""

    num_failed: int = 0
    num_to_pass: int = 0
    is_proven: bool = False

    @property
    def is_lost(self) -> bool:
        """Whether it is passed over."""
        return self.num_failed >= _PATIENCE

    def after(self, reason: str) -> "_Patience":
        """What it is once it has failed for `reason`."""
        if reason == "Busy":  # with others
            return self
        if reason not in _COSTLY:
            return _Patience()
        num_failed = min(self.num_failed, _PATIENCE + _MAX_PASSED_OVER) + 1
        num_to_pass = 2 ** max(num_failed - _PATIENCE + 1, 0) - 1
        return _Patience(num_failed, min(num_to_pass, _MAX_PASSED_OVER))


class Scraper:
    """The pods' admin ports of one object. Holds what each pod said, for as long as it counts, and
    for as much of it as there is room."""

    def __init__(self, client: httpx.AsyncClient, metrics: Metrics, shares: Shares) -> None:
        self._client, self._metrics, self._shares = client, metrics, shares
        self._held: dict[str, Scrape] = {}
        self._num_bytes = self._granted_bytes = 0
        self._patience: dict[str, _Patience] = {}
        self._is_closed = False

    def close(self) -> None:
        """What it holds goes with the pass that is under way."""
        self._is_closed = True
        self._shares.room.leave(self)

    def knows(self, uid: str) -> bool:
        """Whether that pod has been asked before."""
        return uid in self._held

    async def scrape(
        self, targets: tuple[Target, ...], token: str, now: float, window_s: float = 0.0
    ) -> Mapping[str, Scrape]:
        """Ask all `targets` at once; by pod uid. Pods that are gone are in it with their ticks of
        the last `window_s`, or for as long as bursts are remembered: their misses do not leave with
        them. One that costs much in vain is passed over now and then."""
        uids = [target.uid for target in targets]
        self._patience = {uid: self._patience.get(uid, _Patience()) for uid in uids}
        await asyncio.gather(*(self._scrape_one(t, token, now) for t in targets))
        fresh = {uid: self._held[uid] for uid in uids}
        since_s = now - max(window_s, BURST_MEMORY_S)
        gone = [(u, _since(held, since_s, now)) for u, held in self._held.items() if u not in fresh]
        self._held = dict([one for one in gone if one[1].evidence][-MAX_GONE:]) | fresh
        self._num_bytes = sum(held.num_bytes for held in self._held.values())
        self._fit()
        return self._held

    async def patch(self, target: Target, token: str, patch: RuntimePatch) -> RuntimeConfig:
        """Send `patch`; the pod's effective configuration. ScrapeError if it is refused."""
        if self._patience.get(target.uid, _Patience()).is_lost:
            raise ScrapeError("Timeout", "it has not answered lately")
        call = _Call("/v1/runtime_config", MAX_CONFIG_BYTES, "PATCH", encode(patch))
        config = _decoded(await self._ask(target, token, call), RuntimeConfig)
        held = self._held.get(target.uid, Scrape())
        self._held[target.uid] = replace(held, config=config)
        return config

    async def _scrape_one(self, target: Target, token: str, now: float) -> None:
        """Ask one pod, unless it is passed over; what is held of it is then as it was."""
        held = self._held.setdefault(target.uid, Scrape())
        patience = self._patience[target.uid]
        if patience.num_to_pass:
            self._patience[target.uid] = replace(patience, num_to_pass=patience.num_to_pass - 1)
            return
        try:
            call = _Call("/v1/runtime_config", MAX_CONFIG_BYTES)
            config = _decoded(await self._ask(target, token, call), RuntimeConfig)
            is_same = held.evidence is not None and held.evidence.boot_id == config.boot_id
            after = last_seq(held.evidence) if is_same else None
            path = "/v1/evidence" if after is None else f"/v1/evidence?after={after}"
            call = _Call(path, _most_bytes(held, now))
            fresh = _decoded(await self._ask(target, token, call), Evidence)
            self._keep(target.uid, fresh, config, now)
        except ScrapeError as e:
            self._metrics.scrape_failures.labels(e.reason).inc()
            self._held[target.uid] = replace(self._held[target.uid], problem=str(e))
            self._patience[target.uid] = patience.after(e.reason)
        else:
            self._patience[target.uid] = _Patience(is_proven=True)

    def _keep(self, uid: str, fresh: Evidence, config: RuntimeConfig, now: float) -> None:
        """Hold what a pod has just said, at once within all bounds."""
        held = self._held[uid]
        evidence = merge(held.evidence, fresh)
        scrape = Scrape(evidence, config, now, None, sizes_of(evidence.ticks, held))
        self._held[uid] = scrape.within(MAX_POD_BYTES)
        self._num_bytes += self._held[uid].num_bytes - held.num_bytes
        if self._num_bytes > self._granted_bytes + _UNASKED_BYTES:
            self._fit()

    def _fit(self) -> None:
        """Let go of what there is no room for: of the pods with the most, their oldest ticks."""
        if self._is_closed:
            return
        self._granted_bytes = self._shares.room.share(self, self._num_bytes)
        if self._granted_bytes < self._num_bytes:
            sizes = {uid: held.num_bytes for uid, held in self._held.items()}
            most = level(sizes.values(), self._granted_bytes)
            for uid, size in sizes.items():
                if size > most:
                    self._held[uid] = self._held[uid].within(most)
            self._num_bytes = sum(held.num_bytes for held in self._held.values())

    async def _ask(self, target: Target, token: str, call: "_Call") -> bytes:
        """What a pod answers, in its turn. Those that answered at the last look do not wait for
        others, and share no connections with them."""
        is_proven = self._patience.get(target.uid, _Patience()).is_proven
        exchanges = self._shares.proven if is_proven else self._shares.unproven
        try:
            async with exchanges.turn(self, call.most), _deadline():
                return await self._send(target, token, call, is_proven=is_proven)
        except TimeoutError as e:  # not the answer's
            raise ScrapeError("Busy", "no turn yet: the answers of others take long") from e

    async def _send(self, target: Target, token: str, call: "_Call", *, is_proven: bool) -> bytes:
        # identity: a compressed answer could be small on the wire and huge in memory.
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "identity"}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        given: dict[str, Any] = {"headers": headers, "content": call.body}
        lane = {_PROVEN: is_proven}
        try:
            async with self._client.stream(
                call.verb, target.url(call.path), **given, extensions=lane
            ) as response:
                answer = await _capped(response, call.most)
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


class _Lanes(httpx.AsyncBaseTransport):
    """Connections of pods that answered at the last look, and of all others: httpcore looks at each
    of a pool for each request, the square of their number."""

    def __init__(self) -> None:
        self._proven, self._unproven = (
            httpx.AsyncHTTPTransport(
                trust_env=False,
                limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            )
            for most in (MAX_PROVEN, MAX_UNPROVEN)
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """What httpx calls."""
        lane = self._proven if request.extensions[_PROVEN] else self._unproven
        return await lane.handle_async_request(request)

    async def aclose(self) -> None:
        """All connections are closed."""
        await self._proven.aclose()
        await self._unproven.aclose()


def create_client() -> httpx.AsyncClient:
    """A client for pods only: no proxy from the environment, no redirects."""
    return httpx.AsyncClient(
        trust_env=False, follow_redirects=False, transport=_Lanes(), timeout=DEADLINE_S
    )


def _most_bytes(held: Scrape, now: float) -> int:
    """Of one answer: a whole ring at first, then what may have come since, in any boot."""
    if held.seen_s is None:
        return MAX_BODY_BYTES
    num_ticks = int(max(0.0, now - held.seen_s) / TICK_SECONDS) + 2
    return min(MAX_NEWS_BYTES + MAX_TICK_BYTES * num_ticks, MAX_BODY_BYTES)


def _since(held: Scrape, time_s: float, now: float) -> Scrape:
    """What a pod that is not asked any more did from then on; without evidence if nothing."""
    if not held.evidence or not held.ticks:
        return Scrape()
    shift_s = clock_shift(held.ticks[-1].t_s, held.seen_s, now)
    sized = zip(held.ticks, held.sizes, strict=True)
    kept = [(tick, size) for tick, size in sized if tick.t_s + shift_s >= time_s]
    if not kept:
        return Scrape()
    evidence = msgspec.structs.replace(held.evidence, ticks=[tick for tick, _ in kept])
    return replace(held, evidence=evidence, config=None, sizes=tuple(size for _, size in kept))


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
