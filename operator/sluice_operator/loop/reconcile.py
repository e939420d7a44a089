"""One task per object: observe -> plan -> apply, woken by events, else by the clock.

Level-triggered: a pass starts from what is there, so it does not matter what woke it, how often, or
where the last one was killed. Memory of earlier passes only saves reads.
"""

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx

from ..children import drift, runtime
from ..children import manifests as children
from ..children.admin_token import token_of
from ..children.api_keys import ApiKeys
from ..children.runtime import Runtime
from ..cluster.child_store import ChildStore
from ..cluster.client import Cluster, ClusterError, Ref, ref_of
from ..cluster.failures import Failures
from ..cluster.observed import Object, Pod, has_ended, pod_of, version
from ..metrics import Metrics
from ..model.fit import Fit, judge
from ..model.reader import ModelReader
from ..pods.scrape import MAX_OPEN, Scrape, ScrapeError, Scraper, Target
from ..reasons import Reason
from ..settings import Settings
from ..spec.service import KIND, InferenceService, SpecError, parse
from ..status import compose, events
from ..status.events import Notice
from ..status.write_limiter import Turns
from ..status.writer import StatusWriter
from ..tuner.replicas import wanting_none
from . import ownership
from .plan import Observed, Plan, plan

_log = logging.getLogger(__name__)
_MIN_SPACING_S = 0.5
"""Between two passes, so that a fight over a field with somebody else stays cheap."""
_MAX_BACKOFF_S = 60.0
_MAX_DOUBLINGS = 10
"""More than either back-off takes, and far from the largest float."""
_SERVING_BACKOFF_S = 10.0
"""What one refused child costs pods that serve: a look in so many seconds instead of two."""
_WRITTEN_OVER: Mapping[str, Object] = {"Service": {}, "PodDisruptionBudget": {"minAvailable": None}}
"""Kinds whose spec is all ours, with what it must not have beside."""
_NOT_READ = frozenset({"labels", "annotations", "managedFields"})
_SWEEP_RESYNCS = 10
"""Five minutes by default between two looks for deletions that the watch has missed."""


@dataclass(frozen=True, slots=True)
class Context:
    """What all reconcilers of one operator share."""

    settings: Settings
    cluster: Cluster
    client: httpx.AsyncClient
    metrics: Metrics
    children: ChildStore
    turns: Turns = field(default_factory=lambda: Turns(time.monotonic))
    exchanges: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_OPEN))


@dataclass(slots=True)
class _Memory:
    """What one reconciler remembers; all of it can be lost at any time.

    `saved`: manifest hash of the ConfigMap that we wrote last; `accepted`: by kind,
    `drift.acceptance` of our last write; `unread`: by kind, why a child could not be read at the
    last pass; `pods`: as they were told of last, by uid; `refusal`: key of the last
    `OtherOperator`. Times are of `time.monotonic`, as nobody else reads them.
    """

    runtime: Runtime | None = None
    saved: str | None = None
    saved_s: float = -math.inf
    accepted: dict[str, str] = field(default_factory=dict)
    unread: dict[str, ClusterError] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)
    read_by_name_s: float = -math.inf
    swept_s: float = field(default_factory=time.monotonic)
    token: str = field(default="", repr=False)
    unknown: tuple[str, ...] = ()
    refusal: str = ""


class Reconciler:
    """Looks after one object until its task is cancelled."""

    def __init__(self, context: Context, namespace: str, name: str) -> None:
        self._context, self._namespace, self._name = context, namespace, name
        self._key, self._children = (namespace, name), context.children
        self._own = f"{children.INSTANCE_LABEL}={name},{children.MANAGED_BY_LABEL}"
        self._forget()
        self._body: Object = {}
        self._serves = False
        self._wake = asyncio.Event()

    @property
    def uid(self) -> str:
        """Of the object that was seen last."""
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
        context, self._memory = self._context, _Memory()
        self._model = ModelReader(context.cluster, context.settings)
        self._scraper = Scraper(context.client, context.metrics, context.exchanges)
        self._status = StatusWriter(context.cluster, context.turns)
        cluster, every_s = context.cluster, context.settings.resync_s
        self._failures = Failures(cluster, self._namespace, self._own, every_s)
        self._keys = ApiKeys(cluster, every_s)

    def wake(self) -> None:
        """Something that this object is made of has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Pass after pass, until the object is found to be gone."""
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
                await self._woken(max(started_s + pause_s - time.monotonic(), 0.0))

    async def _woken(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _counted_pass(self) -> float | None:
        """Seconds until the next pass, or None if this one failed."""
        passes = self._context.metrics.passes
        try:
            with self._context.metrics.pass_seconds.time():
                pause_s = await self.reconcile()
        except ClusterError as e:
            _log.warning("%s/%s: %s: %s", self._namespace, self._name, e.reason, e)
            passes.labels("error").inc()
        except Exception:
            # Ours to mend: it must be seen, and must not take the other objects down with it.
            _log.exception("%s/%s: a pass failed", self._namespace, self._name)
            passes.labels("bug").inc()
        else:
            passes.labels("ok").inc()
            return pause_s
        return None

    async def reconcile(self) -> float:
        """One pass; seconds until the next, infinite where the object is gone and the watch has
        missed it. Raises ClusterError where the API server refuses."""
        now, body = time.time(), self._body
        self._serves = any(pod.serving for pod in self._pods(now))
        meta, previous = body["metadata"], self._status.unwritten or body.get("status") or {}
        if meta.get("deletionTimestamp"):
            return _MAX_BACKOFF_S
        if not await self._is_to_care(now):
            return self._context.settings.resync_s
        last = {**previous, "observedGeneration": meta.get("generation", 0)}
        try:
            service = parse(body)
        except SpecError as e:
            wanted = compose.fail(last, previous, Reason.INVALID_SPEC, str(e), now)
            await self._tell(meta, events.transitions(previous, wanted), now)
            await self._write_status(wanted)
            return self._context.settings.resync_s
        if service.unknown and service.unknown != self._memory.unknown:
            await self._tell(meta, [events.left_out(service.unknown, service.generation)], now)
        self._memory.unknown = service.unknown
        try:
            if not await self._drop_stale(service):
                return math.inf
            observed = await self._observe(service, previous, now)
        except ClusterError as e:
            await self._tell_refusal(last, previous, e, now)
            raise
        planned = plan(service, observed, self._context.settings, now)
        wait_s = await self._execute(planned, previous, now)
        self._memory.pods = planned.pods
        # A look a tick is enough also where the status waits for its turn.
        return min(planned.requeue_s, max(wait_s, self._context.settings.tick_s))

    async def _is_to_care(self, now: float) -> bool:
        """Whether the object is this operator's, and not another installation's."""
        memory, meta, me = self._memory, self._body["metadata"], self._context.settings.instance
        ref = Ref("ConfigMap", self._namespace, runtime.runtime_name(self._name))
        owner = ownership.owner_of(meta["uid"], await self._find(ref))
        if owner in ("", me):
            return True
        memory.runtime = None
        refusal = ownership.refusal(owner, me, ref, now)
        if refusal.key != memory.refusal:
            await self._tell(meta, [refusal], now)
            memory.refusal = refusal.key
        return False

    # Observe

    async def _observe(self, service: InferenceService, previous: Object, now: float) -> Observed:
        memory = self._memory
        pods = self._pods(now)
        is_served = partial(self._is_served, service) if any(p.serving for p in pods) else None
        found = await self._model.look(service, is_served, time.monotonic())
        fit = judge(service.spec, found)
        live = await self._live(service, fit)
        held = live.get("ConfigMap")
        if held and children.is_ours(service, held):
            self._take(held)
        return Observed(
            live=live,
            pods=pods,
            scrapes=await self._scrape(service, pods, now),
            fit=fit,
            token=memory.token,
            previous=previous,
            runtime=memory.runtime,
            accepted=dict(memory.accepted),
            deleted=self._children.lost(self._key, self.uid),
            unsaved_s=time.monotonic() - memory.saved_s,
            failed=await self._failures.newest(pods, now),
            keys_problem=await self._keys.problem(service, time.monotonic()),
            former=memory.pods,
        )

    def _take(self, held: Object) -> None:
        """The stored state, where we know none or another process has written since: to go on from
        what we know would be a fight. A person's edit leaves our hash, and is put back."""
        memory = self._memory
        if memory.runtime is not None and drift.manifest_hash(held) == memory.saved:
            return
        stored = runtime.parse(held.get("data") or {})
        if memory.runtime is None or (stored and stored.epoch >= memory.runtime.epoch):
            # That other replicas were wanted then, nobody has seen to hold since.
            memory.runtime = stored and replace(stored, past=wanting_none(stored.past))

    async def _is_served(self, service: InferenceService) -> bool:
        """Whether the Deployment is of the model that is asked for now."""
        live = await self._find(Ref("Deployment", service.namespace, service.name))
        return children.is_of_model(service, live)

    async def _live(self, service: InferenceService, fit: Fit) -> dict[str, Object]:
        refs = _refs(service, children.WATCHED)
        self._memory.unread = {}
        pods = await self._find(Ref("Deployment", service.namespace, service.name))
        if fit.status == "False" and not (pods and children.is_ours(service, pods)):
            return {ref.kind: child for ref in refs if (child := self._child(ref.kind))}
        # The watch shows only labelled ones; others of that name must not be written over.
        found = {ref.kind: await self._find(ref) for ref in refs}
        live = {kind: child for kind, child in found.items() if child is not None}
        live.update(await self._by_name(service))
        secret = live.get("Secret")
        # Pods read theirs again when it changes: an edited Secret is put back, not believed.
        is_ours = secret is not None and children.is_ours(service, secret)
        known = self._memory.token or (token_of(secret) if secret and is_ours else None)
        if not known and "Secret" in self._memory.unread:
            raise self._memory.unread["Secret"]
        self._memory.token = known or secrets.token_urlsafe(32)
        return live

    async def _find(self, ref: Ref) -> Object | None:
        """The child of that name; read where it is not known, or no watch would tell of it."""
        if (known := self._child(ref.kind)) is not None:
            return known
        live = await self._context.cluster.get(ref)
        if live and _is_watched(live):
            self._children.keep(self._key, ref.kind, live)
        return live

    def _child(self, kind: str) -> Object | None:
        return self._children.child(self._key, kind)

    async def _drop_stale(self, service: InferenceService) -> bool:
        """Find deletions that the watch has missed: after a gap it lists anew, and tells none.

        False where the object itself is gone.
        """
        memory, now_s, store = self._memory, time.monotonic(), self._children
        if now_s - memory.swept_s < _SWEEP_RESYNCS * self._context.settings.resync_s:
            return True
        pods = {_uid(body) for body in store.pods(self._key)}  # later ones the watch tells
        for uid in pods - await self._context.cluster.uids(Ref("Pod", self._namespace), self._own):
            store.lose_pod(uid)
        for ref in _refs(service, children.WATCHED):
            if known := self._child(ref.kind):
                live = await self._context.cluster.get(ref)
                if _uid(known) != _uid(live) or not (live and _is_watched(live)):
                    store.lose(self._key, ref.kind, known)
        itself = Ref(KIND, self._namespace, self._name)
        memory.swept_s = now_s
        return self._body["metadata"]["uid"] in await self._context.cluster.uids(itself)

    async def _by_name(self, service: InferenceService) -> dict[str, Object]:
        memory, now_s = self._memory, time.monotonic()
        refs = _refs(service, children.UNWATCHED)
        if now_s - memory.read_by_name_s >= self._context.settings.resync_s:
            memory.unread = await self._read(refs)
            memory.read_by_name_s = -math.inf if memory.unread else now_s
        found = {ref.kind: child for ref in refs if (child := self._child(ref.kind))}
        if not all(children.is_ours(service, body) for body in found.values()):
            memory.read_by_name_s = -math.inf  # a deleted object's may be gone in a moment
        return found

    async def _read(self, refs: Iterable[Ref]) -> dict[str, ClusterError]:
        """Read children into the store, where one that cannot be read stays as it was; the errors,
        by kind."""
        unread: dict[str, ClusterError] = {}
        for ref in refs:
            try:
                live = await self._context.cluster.get(ref)
            except ClusterError as e:
                if not e.status:  # nobody answers: the others would wait as long
                    raise
                said = f"{ref.kind} {ref.name} cannot be read: {e}"
                unread[ref.kind] = ClusterError(e.status, e.reason, said)
                continue
            if live:
                self._children.keep(self._key, ref.kind, live)
            elif before := self._child(ref.kind):
                self._children.lose(self._key, ref.kind, before)
        return unread

    def _pods(self, now: float) -> tuple[Pod, ...]:
        pods = (pod_of(body, now) for body in self._children.pods(self._key) if not has_ended(body))
        return tuple(sorted(pods, key=lambda pod: pod.name))

    async def _scrape(
        self, service: InferenceService, pods: tuple[Pod, ...], now: float
    ) -> Mapping[str, Scrape]:
        if not self._memory.token:  # nothing of ours is there yet
            return {}
        known = self._scraper.knows
        asked = (p for p in pods if p.serving or p.unready_s or known(p.uid))
        targets = tuple(_target(pod) for pod in asked if pod.ip)
        keep_s = service.spec.slo.window_s
        return await self._scraper.scrape(targets, self._memory.token, now, keep_s)

    # Execute

    async def _execute(self, planned: Plan, previous: Object, now: float) -> float:
        """Seconds until the status may be written, where that waits for its turn."""
        meta, unread = self._body["metadata"], self._memory.unread
        wanted = [m for m in planned.apply if m["kind"] not in unread]  # it may be somebody else's
        try:
            # A child that is refused must not keep what was decided from the pods that serve.
            same = await self._apply([m for m in wanted if m["kind"] == "ConfigMap"])
            self._memory.runtime = planned.runtime
            for notice in planned.decided:
                self._context.metrics.decisions.labels(notice.reason).inc()
            await self._send(planned)
            await self._tell(meta, planned.decided, now)
            same |= await self._apply([m for m in wanted if m["kind"] != "ConfigMap"])
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
        """Say in the status `known` what is refused, where waiting may not be enough."""
        if 400 <= refused.status <= 500 and refused.status not in (409, 429):  # 500: webhook down
            why = Reason.APPLY_FAILED
            failed = compose.fail(known, previous, why, str(refused), now)
            await self._tell(self._body["metadata"], events.transitions(previous, failed), now)
            await self._write_status(failed)

    async def _apply(self, manifests: Iterable[Object]) -> set[str]:
        """Write all of them, also behind one that is refused; the kinds for which that changed
        nothing, as a webhook makes the same of it again. Raises the first ClusterError."""
        memory, refused, same = self._memory, None, set()
        for manifest in manifests:
            kind, before = manifest["kind"], self._child(manifest["kind"])
            try:
                live = await self._write(manifest)
            except ClusterError as e:
                if kind == "ConfigMap" and e.status == 409:
                    # Somebody else wrote: look again before deciding.
                    memory.runtime = None
                    self._children.drop(self._key, kind)
                if not e.status:  # nobody answers: the others would wait as long
                    raise
                refused = refused or e
                continue
            self._children.keep(self._key, kind, live)
            memory.accepted[kind] = drift.acceptance(manifest, live)
            if before and drift.acceptance(manifest, before) == memory.accepted[kind]:
                same.add(kind)
            if kind == "ConfigMap":
                memory.saved, memory.saved_s = drift.manifest_hash(live), time.monotonic()
            _log.info("%s/%s: applied %s", self._namespace, self._name, kind)
        if refused:
            raise refused
        return same

    async def _write(self, manifest: Object) -> Object:
        """Apply it; what is there after that. What somebody has put beside ours may be what it is
        refused for, such as a second port of the same name: then ours takes the place of all."""
        cluster, ref = self._context.cluster, ref_of(manifest)
        try:
            return await cluster.apply(manifest)
        except ClusterError as e:
            if e.status == 409 and (live := await self._as_written(ref, manifest)):
                return live  # by a try whose answer was lost
            if e.status != 422 or ref.kind not in _WRITTEN_OVER or self._child(ref.kind) is None:
                raise
        await cluster.merge(ref, {"spec": {**manifest["spec"], **_WRITTEN_OVER[ref.kind]}})
        return await cluster.apply(manifest)

    async def _as_written(self, ref: Ref, manifest: Object) -> Object | None:
        """What is there, if it is all that `manifest` says, but for the version."""
        meta = {k: v for k, v in manifest["metadata"].items() if k != "resourceVersion"}
        live = await self._context.cluster.get(ref)
        return None if any(drift.differences({**manifest, "metadata": meta}, live)) else live

    async def _send(self, planned: Plan) -> None:
        """A pod that cannot be reached is sent its configuration again at the next pass."""
        answers = await asyncio.gather(
            *(
                self._scraper.patch(_target(item.pod), self._memory.token, item.patch)
                for item in planned.patches
            ),
            return_exceptions=True,
        )
        for item, answer in zip(planned.patches, answers, strict=True):
            if isinstance(answer, ScrapeError):
                self._context.metrics.scrape_failures.labels(answer.reason).inc()
                _log.warning(
                    "%s/%s: pod %s: %s", self._namespace, self._name, item.pod.name, answer
                )
            elif isinstance(answer, BaseException):
                raise answer

    async def _tell(self, meta: Object, notices: Iterable[Notice], now: float) -> None:
        for notice in notices:
            _log.info("%s/%s: %s: %s", self._namespace, self._name, notice.reason, notice.message)
            try:
                await self._context.cluster.create_once(events.manifest(meta, notice, now))
            except ClusterError as e:  # an event less is no reason to stop serving
                _log.warning("%s/%s: no event: %s", self._namespace, self._name, e)

    async def _write_status(self, wanted: dict[str, Any]) -> float:
        """Seconds until it may be written, where it waits for its turn, else infinite."""
        body, wait_s = await self._status.write(self._body, wanted)
        self.see(body)  # it may bring a spec that this pass has not seen
        return wait_s


def _own_metadata(body: Object) -> Object:
    """Without what may be large, and is not read."""
    return {key: value for key, value in body["metadata"].items() if key not in _NOT_READ}


def _asked(body: Object) -> tuple[Any, ...]:
    """What of an object is a person's: not its status, and not the bookkeeping of its writes."""
    meta = body.get("metadata", {})
    return meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp")


def _refs(service: InferenceService, kinds: Iterable[str]) -> list[Ref]:
    return [Ref(kind, service.namespace, children.name_of(service, kind)) for kind in kinds]


def _is_watched(live: Object) -> bool:
    """Whether the watch shows it: by its label, which somebody may have taken away."""
    labels = live["metadata"].get("labels") or {}
    return labels.get(children.MANAGED_BY_LABEL) == children.MANAGED_BY


def _uid(child: Object | None) -> str:
    return str(child["metadata"]["uid"]) if child else ""


def _target(pod: Pod) -> Target:
    return Target(pod.uid, pod.ip)
