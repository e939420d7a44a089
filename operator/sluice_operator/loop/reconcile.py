"""One task per object: observe -> plan -> apply, woken by events, else by the clock.

Level-triggered: a pass starts from the present state. It does not matter what woke it, how often,
or where the last one was killed. Memory of earlier passes only saves reads.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from ..children import runtime
from ..children.api_keys import ApiKeys
from ..children.drift import manifest_hash
from ..children.manifests import MANAGED_BY, MANAGED_BY_LABEL, WATCHED, is_ours
from ..children.runtime import Runtime
from ..cluster.child_store import ChildStore
from ..cluster.client import Cluster, ClusterError, Ref
from ..cluster.failures import Failures
from ..cluster.observed import Object, Pod, pod_of, version
from ..cluster.roster import Roster
from ..metrics import Metrics
from ..model.fit import judge
from ..model.reader import ModelReader
from ..plan import rival
from ..plan.observed import Observed
from ..plan.plan import Plan, plan
from ..plan.rival import Rivalry
from ..pods.scrape import MAX_OPEN, Scrape, ScrapeError, Scraper, ScrapeTarget
from ..reasons import Reason
from ..settings import Settings
from ..spec.service import KIND, InferenceService, SpecError, parse
from ..status import compose, events
from ..status.events import Notice
from ..status.write_limiter import WriteTurns
from ..status.writer import StatusWriter
from ..tuner.replicas import wanting_none
from . import ownership
from .children import SWEEP_RESYNCS, Children

_log = logging.getLogger(__name__)
_MIN_SPACING_S = 0.5
"""Seconds between two passes, so that a fight with another writer over a field stays cheap."""
_MAX_BACKOFF_S = 60.0
_MAX_DOUBLINGS = 10
"""Doublings of a back-off: more than either takes, and far from the largest float."""
_SERVING_BACKOFF_S = 10.0
"""Longest back-off in seconds while pods serve: else they are read every two seconds."""
_NOT_READ = frozenset({"labels", "annotations", "managedFields"})


@dataclass(frozen=True, slots=True)
class Dependencies:
    """All that the reconcilers of one operator share."""

    settings: Settings
    cluster: Cluster
    client: httpx.AsyncClient
    metrics: Metrics
    store: ChildStore
    turns: WriteTurns = field(default_factory=lambda: WriteTurns(time.monotonic))
    exchanges: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPEN))
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        ours = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
        labels = {KIND: "", **dict.fromkeys(("Pod", *WATCHED), ours)}
        every_s = SWEEP_RESYNCS * self.settings.resync_s
        is_one = not self.settings.namespaces
        roster = Roster(self.cluster, labels, every_s, is_one=is_one)
        object.__setattr__(self, "roster", roster)


@dataclass(slots=True)
class _Memory:
    """The memory of one reconciler; all of it can be lost at any time.

    `pods`: as last reported, by uid. `told`: by reason, the key of the last event. `rivalry`: of
    others who write the replicas.
    """

    runtime: Runtime | None = None
    pods: Mapping[str, Pod] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    rivalry: Rivalry = Rivalry()


class Reconciler:
    """Looks after one object until its task is cancelled."""

    def __init__(self, dependencies: Dependencies, namespace: str, name: str) -> None:
        self._dependencies, self._namespace, self._name = dependencies, namespace, name
        self._key = (namespace, name)
        self._forget()
        self._body: Object = {}
        self._serves = False
        self._wake = asyncio.Event()

    @property
    def uid(self) -> str:
        """The uid of the object that was seen last."""
        return str(self._body.get("metadata", {}).get("uid", ""))

    def see(self, body: Object) -> None:
        """The object as of a watch event. A change of its status alone does not wake us."""
        before = self._body
        if version(body) <= version(before):
            return
        if _asked(body) != _asked(before):
            self.wake()
        if body["metadata"]["uid"] != before.get("metadata", {}).get("uid"):
            self._model.stop()
            self._forget()  # another object of the same name
        self._body = {**body, "metadata": _own_metadata(body)}

    def _forget(self) -> None:
        dependencies, self._memory = self._dependencies, _Memory()
        self._model = ModelReader(dependencies.cluster, dependencies.settings)
        self._scraper = Scraper(dependencies.client, dependencies.metrics, dependencies.exchanges)
        self._status = StatusWriter(dependencies.cluster, dependencies.turns)
        cluster, every_s = dependencies.cluster, dependencies.settings.resync_s
        roster, store = dependencies.roster, dependencies.store
        self._children = Children(cluster, roster, store, self._key, every_s)
        self._failures = Failures(cluster, self._namespace, self._children.pods_label, every_s)
        self._keys = ApiKeys(cluster)

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Run pass after pass, until the object is found to be gone."""
        try:
            await self._passes()
        finally:
            self._model.stop()

    async def _passes(self) -> None:
        failures = 0
        while True:
            self._wake.clear()
            started_s = time.monotonic()
            pause_s = await self._counted_pass()
            if pause_s == math.inf:
                return
            failures = 0 if pause_s is not None else failures + 1
            await asyncio.sleep(_MIN_SPACING_S)
            if pause_s is None:  # events do not cut it short, or they would defeat the back-off
                most_s = _SERVING_BACKOFF_S if self._serves else _MAX_BACKOFF_S
                backoff_s = min(2.0 ** min(failures, _MAX_DOUBLINGS), most_s)
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(started_s + pause_s - time.monotonic()):
                        await self._wake.wait()

    async def _counted_pass(self) -> float | None:
        """Seconds until the next pass, or None if this one failed."""
        passes = self._dependencies.metrics.passes
        try:
            with self._dependencies.metrics.pass_seconds.time():
                pause_s = await self.reconcile()
        except ClusterError as e:
            _log.warning("%s/%s: %s: %s", self._namespace, self._name, e.reason, e)
            passes.labels("error").inc()
        except Exception:
            # Our bug: it must be seen, and must not take the other objects down with it.
            _log.exception("%s/%s: a pass failed", self._namespace, self._name)
            passes.labels("bug").inc()
        else:
            passes.labels("ok").inc()
            return pause_s
        return None

    async def reconcile(self) -> float:
        """One pass; seconds until the next, infinite if the object is gone and the watch missed it.
        Raises ClusterError if the API server refuses."""
        await self._children.list_pods()
        now, body = time.time(), self._body
        self._serves = any(pod.serving for pod in self._pods(now))
        meta, previous = body["metadata"], self._status.unwritten or body.get("status") or {}
        if meta.get("deletionTimestamp"):
            return _MAX_BACKOFF_S
        if not await self._is_to_care(now):
            return self._dependencies.settings.resync_s
        last = {**previous, "observedGeneration": meta.get("generation", 0)}
        try:
            service = parse(body)
        except SpecError as e:
            wanted = compose.fail(last, previous, Reason.INVALID_SPEC, str(e), now)
            await self._tell(meta, events.transitions(previous, wanted), now)
            await self._write_status(wanted)
            return self._dependencies.settings.resync_s
        if service.unknown:
            await self._tell(meta, [events.left_out(service.unknown, service.generation)], now)
        try:
            if not await self._is_there():
                return math.inf
            observed = await self._observe(service, previous, now)
        except ClusterError as e:
            await self._tell_refusal(last, previous, e, now)
            raise
        planned = plan(service, observed, self._dependencies.settings, now)
        wait_s = await self._execute(planned, previous, now)
        self._memory.pods = planned.pods
        # One pass per tick is enough, also while the status waits for its turn.
        return min(planned.requeue_s, max(wait_s, self._dependencies.settings.tick_s))

    async def _is_to_care(self, now: float) -> bool:
        """True if the object is this installation's; otherwise an event reports that it is not."""
        memory, meta, me = (
            self._memory,
            self._body["metadata"],
            self._dependencies.settings.instance,
        )
        ref = Ref("ConfigMap", self._namespace, runtime.runtime_name(self._name))
        owner = ownership.owner_of(meta["uid"], await self._children.find(ref))
        if owner in ("", me):
            return True
        memory.runtime = None
        await self._tell(meta, [ownership.refusal(owner, me, ref, now)], now)
        return False

    # Observe

    async def _observe(self, service: InferenceService, previous: Object, now: float) -> Observed:
        memory, children, pods = self._memory, self._children, self._pods(now)
        serves = any(pod.serving for pod in pods)
        is_served = partial(children.are_of_model, service) if serves else None
        found = await self._model.look(service, is_served, time.monotonic())
        fit = judge(service.spec, found)
        live = await children.look(service, fits=fit.status != "False")
        held = live.get("ConfigMap")
        if held and is_ours(service, held):
            self._take(held)
        wanted = memory.runtime.replicas if memory.runtime else None
        memory.rivalry = rival.after(
            memory.rivalry, live.get("Deployment"), wanted, service.generation, now
        )
        return Observed(
            live=live,
            pods=pods,
            scrapes=await self._scrape(service, pods, now),
            fit=fit,
            token=children.token,
            previous=previous,
            runtime=memory.runtime,
            accepted=dict(children.accepted),
            deleted=self._dependencies.store.lost(self._key, self.uid),
            unsaved_s=time.monotonic() - children.saved_s,
            failed=await self._failures.newest(
                pods, self._dependencies.store.num_gone(self._key), now
            ),
            keys_problem=await self._keys.problem(service, time.monotonic(), children.every_s),
            former=memory.pods,
            rival=memory.rivalry.writer,
        )

    def _take(self, held: Object) -> None:
        """Continue from the stored state if this process has none, or another one has written: two
        would undo each other's writes. A person's edit keeps our hash, and is undone."""
        memory = self._memory
        if memory.runtime is not None and manifest_hash(held) == self._children.saved:
            return
        stored = runtime.parse(held.get("data") or {})
        if memory.runtime is None or (stored and stored.epoch >= memory.runtime.epoch):
            # It is unknown if other replicas were wanted all the while since.
            memory.runtime = stored and replace(stored, past=wanting_none(stored.past))

    async def _is_there(self) -> bool:
        """True unless the object itself is found to be gone; checked as often as its children."""
        await self._children.sweep()
        there = await self._dependencies.roster.listed(KIND, self._namespace, time.monotonic())
        return not there.lacks(self._body)

    def _pods(self, now: float) -> tuple[Pod, ...]:
        pods = (pod_of(body, now) for body in self._dependencies.store.pods(self._key))
        return tuple(sorted(pods, key=lambda pod: pod.name))

    async def _scrape(
        self, service: InferenceService, pods: tuple[Pod, ...], now: float
    ) -> Mapping[str, Scrape]:
        if not self._children.token:  # nothing of ours is there yet
            return {}
        known = self._scraper.knows
        asked = (p for p in pods if p.serving or p.unready_s or known(p.uid))
        targets = tuple(_target(pod) for pod in asked if pod.ip)
        keep_s = service.spec.slo.window_s
        return await self._scraper.scrape(targets, self._children.token, now, keep_s)

    # Execute

    async def _execute(self, planned: Plan, previous: Object, now: float) -> float:
        """Seconds until the status may be written, if that waits for its turn."""
        meta, unread = self._body["metadata"], self._children.unread
        wanted = [m for m in planned.apply if m["kind"] not in unread]  # it may be somebody else's
        try:
            # A refused child must not hold up the decision from the serving pods.
            same = await self._children.apply([m for m in wanted if m["kind"] == "ConfigMap"])
            self._memory.runtime = planned.runtime
            for notice in planned.decided:
                self._dependencies.metrics.decisions.labels(notice.reason).inc()
            await self._send(planned)
            await self._tell(meta, planned.decided, now)
            same |= await self._children.apply([m for m in wanted if m["kind"] != "ConfigMap"])
            for refused in unread.values():
                raise refused
        except ClusterError as e:
            await self._tell_refusal(planned.status, previous, e, now)
            raise
        restored = [notice for kind, notice in planned.restored.items() if kind not in same]
        await self._tell(meta, [*restored, *planned.noticed], now)
        return await self._write_status(planned.status)

    async def _tell_refusal(
        self, known: dict[str, Any], previous: Object, refused: ClusterError, now: float
    ) -> None:
        """Report in the status `known` what is refused, if waiting may not be enough."""
        if 400 <= refused.status <= 500 and refused.status not in (409, 429):  # 500: webhook down
            why = Reason.APPLY_FAILED
            failed = compose.fail(known, previous, why, str(refused), now)
            await self._tell(self._body["metadata"], events.transitions(previous, failed), now)
            await self._write_status(failed)

    async def _send(self, planned: Plan) -> None:
        """A pod that cannot be reached gets its configuration again in the next pass."""
        answers = await asyncio.gather(
            *(
                self._scraper.patch(_target(item.pod), self._children.token, item.patch)
                for item in planned.patches
            ),
            return_exceptions=True,
        )
        for item, answer in zip(planned.patches, answers, strict=True):
            if isinstance(answer, ScrapeError):
                self._dependencies.metrics.scrape_failures.labels(answer.reason).inc()
                _log.warning(
                    "%s/%s: pod %s: %s", self._namespace, self._name, item.pod.name, answer
                )
            elif isinstance(answer, BaseException):
                raise answer

    async def _tell(self, meta: Object, notices: Iterable[Notice], now: float) -> None:
        for notice in notices:
            if self._memory.told.get(notice.reason) == notice.key:
                continue
            self._memory.told[notice.reason] = notice.key
            _log.info("%s/%s: %s: %s", self._namespace, self._name, notice.reason, notice.message)
            try:
                await self._dependencies.cluster.create_once(events.manifest(meta, notice, now))
            except ClusterError as e:  # a missing event is no reason to stop serving
                _log.warning("%s/%s: no event: %s", self._namespace, self._name, e)

    async def _write_status(self, wanted: dict[str, Any]) -> float:
        """Seconds until it may be written, if it waits for its turn, else infinite."""
        body, wait_s = await self._status.write(self._body, wanted)
        self.see(body)  # it may bring a spec that this pass has not seen
        return wait_s


def _own_metadata(body: Object) -> Object:
    """The metadata without fields that may be large and are not read."""
    return {key: value for key, value in body["metadata"].items() if key not in _NOT_READ}


def _asked(body: Object) -> tuple[Any, ...]:
    """The parts of an object that a person writes, without the bookkeeping of other writes."""
    meta = body.get("metadata", {})
    return meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp")


def _target(pod: Pod) -> ScrapeTarget:
    return ScrapeTarget(pod.uid, pod.ip)
