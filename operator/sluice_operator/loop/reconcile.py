"""One task per object: observe -> plan -> apply, woken by events, else by the clock.

Level-triggered: a pass starts from the present state. It does not matter what woke it, how often,
or where the last one was killed. Memory of earlier passes only saves reads.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from ..cluster.client import ClusterError
from ..cluster.observed import Object, version
from ..reasons import Reason
from ..spec.service import InferenceService, SpecError, kueue_of
from ..status import events
from ..status.events import Notice
from ..status.samples import Shown
from ..status.writer import StatusWriter
from . import ownership
from .dependencies import Dependencies
from .kind import Kind
from .service import ServiceKind

_log = logging.getLogger(__name__)
_MIN_SPACING_S = 0.5
"""Seconds between two passes, so that a fight with another writer over a field stays cheap."""
_MAX_BACKOFF_S = 60.0
_MAX_DOUBLINGS = 10
"""Doublings of a back-off: more than either takes, and far from the largest float."""
_SERVING_BACKOFF_S = 10.0
"""Longest back-off in seconds while pods serve: else they are read every two seconds."""
Make = Callable[[Dependencies, str, str], Kind[Any, Any, Any]]
"""Makes the kind of an object, given its key: namespace, and name among all objects of ours."""
_NOT_READ = frozenset({"labels", "annotations", "managedFields"})


class Reconciler:
    """Looks after one object until its task is cancelled. `shown`: what Prometheus reads of it."""

    def __init__(
        self,
        dependencies: Dependencies,
        namespace: str,
        name: str,
        make: Make = ServiceKind,
    ) -> None:
        self._dependencies, self._namespace, self._name = dependencies, namespace, name
        self._key, self._make = (namespace, name), make
        self._forget()
        self._body: Object = {}
        self._serves = False
        self._wake = asyncio.Event()

    @property
    def uid(self) -> str:
        """The uid of the object that was seen last."""
        return str(self._body.get("metadata", {}).get("uid", ""))

    def see(self, body: Object) -> None:
        """Take in the object of a watch event. A change of its status alone does not wake us."""
        before = self._body
        if version(body) <= version(before):
            return
        if _asked(body) != _asked(before):
            self.wake()
        if body["metadata"]["uid"] != before.get("metadata", {}).get("uid"):
            self._kind.stop()
            self._forget()  # another object of the same name
        self._body = {**body, "metadata": _own_metadata(body)}

    def _forget(self) -> None:
        dependencies = self._dependencies
        self._kind = self._make(dependencies, *self._key)
        self._status = StatusWriter(dependencies.cluster, dependencies.turns, self._kind.name)
        self._told: dict[str, str] = {}  # by reason, the key of the last event
        self.shown: Shown | None = None
        self._service: InferenceService | None = None

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Run pass after pass, until the object is found to be gone."""
        try:
            await self._passes()
        finally:
            self._kind.stop()

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
        await self._kind.children.list_pods()
        now, body = time.time(), self._body
        self._serves = self._kind.serves(now)
        meta, previous = body["metadata"], self._status.unwritten or body.get("status") or {}
        if meta.get("deletionTimestamp"):
            return _MAX_BACKOFF_S
        if not await self._is_to_care(now):
            return self._dependencies.settings.resync_s
        last = {**previous, "observedGeneration": meta.get("generation", 0)}
        try:
            parsed = self._kind.parse(body)
        except SpecError as e:
            return await self._tell_invalid(last, previous, str(e), now)
        self._service = parsed if isinstance(parsed, InferenceService) else None
        if parsed.unknown:
            await self._tell(meta, [events.left_out(parsed.unknown, parsed.generation)], now)
        try:
            if not await self._is_there():
                return math.inf
            observed = await self._kind.observe(parsed, self.uid, previous, now)
        except ClusterError as e:
            await self._tell_refusal(last, previous, e, now)
            raise
        planned = self._kind.plan(parsed, observed, now)
        try:
            await self._kind.execute(planned, partial(self._tell, meta, now=now))
        except ClusterError as e:
            if e.is_of_template:
                return await self._tell_invalid(planned.status, previous, str(e), now)
            await self._tell_refusal(planned.status, previous, e, now)
            raise
        wait_s = await self._write_status(planned.status)
        # One pass per tick is enough, also while the status waits for its turn.
        requeue_s: float = planned.requeue_s
        return min(requeue_s, max(wait_s, self._dependencies.settings.tick_s))

    async def _is_to_care(self, now: float) -> bool:
        """True if the object is this installation's; otherwise an event reports that it is not."""
        meta, me = self._body["metadata"], self._dependencies.settings.instance
        ref = self._kind.owned
        owner = ownership.owner_of(meta["uid"], await self._kind.children.find(ref))
        if owner in ("", me):
            return True
        self._kind.disown()
        self.shown = None
        await self._tell(meta, [ownership.refusal(owner, me, ref, now)], now)
        return False

    async def _is_there(self) -> bool:
        """True unless the object itself is found to be gone; checked as often as its children."""
        await self._kind.children.sweep()
        there = await self._dependencies.roster.listed(
            self._kind.name, self._namespace, time.monotonic()
        )
        return not there.lacks(self._body)

    async def _tell_invalid(
        self, known: dict[str, Any], previous: Object, why: str, now: float
    ) -> float:
        """Report in the status `known` what the object's writer must mend; seconds until the next
        pass, which an edit brings at once."""
        wanted = self._kind.fail(known, previous, Reason.INVALID_SPEC, why, now)
        await self._tell(self._body["metadata"], events.transitions(previous, wanted), now)
        await self._write_status(wanted)
        return _SERVING_BACKOFF_S if self._serves else self._dependencies.settings.resync_s

    async def _tell_refusal(
        self, known: dict[str, Any], previous: Object, refused: ClusterError, now: float
    ) -> None:
        """Report in the status `known` what is refused, if waiting may not be enough."""
        if 400 <= refused.status <= 500 and refused.status not in (409, 429):  # 500: webhook down
            is_missing = refused.reason == Reason.NO_GROUPS
            why = Reason.NO_GROUPS if is_missing else Reason.APPLY_FAILED
            failed = self._kind.fail(known, previous, why, str(refused), now)
            await self._tell(self._body["metadata"], events.transitions(previous, failed), now)
            await self._write_status(failed)

    async def _tell(self, meta: Object, notices: Iterable[Notice], now: float) -> None:
        for notice in notices:
            if self._told.get(notice.reason) == notice.key:
                continue
            self._told[notice.reason] = notice.key
            _log.info("%s/%s: %s: %s", self._namespace, self._name, notice.reason, notice.message)
            try:
                await self._dependencies.cluster.create_once(
                    events.manifest(meta, notice, now, self._kind.name)
                )
            except ClusterError as e:  # a missing event is no reason to stop serving
                _log.warning("%s/%s: no event: %s", self._namespace, self._name, e)

    async def _write_status(self, wanted: dict[str, Any]) -> float:
        """Seconds until it may be written, if it waits for its turn, else infinite."""
        door = self._dependencies.store.child(self._key, "Service") or {}
        self.shown = Shown(
            self._kind.name,
            self._namespace,
            self._body["metadata"]["name"],
            wanted,
            self._service,
            door.get("spec", {}).get("clusterIP", ""),
        )
        body, wait_s = await self._status.write(self._body, wanted)
        self.see(body)  # it may bring a spec that this pass has not seen
        return wait_s


def _own_metadata(body: Object) -> Object:
    """The metadata without fields that may be large and are not read."""
    kept = {key: value for key, value in body["metadata"].items() if key not in _NOT_READ}
    return {**kept, "labels": labels} if (labels := kueue_of(body)) else kept


def _asked(body: Object) -> tuple[Any, ...]:
    """The parts of an object that a person writes, without the bookkeeping of other writes."""
    meta = body.get("metadata", {})
    return meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp"), kueue_of(body)
