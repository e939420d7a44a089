"""InferenceBatches: what one pass over one of them reads, and what it writes."""

import asyncio
import logging
import time
from collections.abc import Sequence

from sluice_core.contract import BatchReport

from ..children import job, manifests
from ..cluster.client import Ref
from ..cluster.jobs import ShardEnd, job_of, shard_end_of, shard_of
from ..cluster.observed import Object, pod_of
from ..model.fit import judge
from ..model.reader import ModelReader
from ..plan.batch import BatchObserved, BatchPlan, plan
from ..pods.scrape import ScrapeError, Scraper, ScrapeTarget
from ..spec.batch import BATCH_KIND, InferenceBatch, parse_batch
from ..spec.service import KIND
from ..status import batch as status
from .children import Children
from .dependencies import Dependencies
from .kind import Tell

_log = logging.getLogger(__name__)


class BatchKind:
    """One InferenceBatch (`kind.Kind`)."""

    name = BATCH_KIND
    fail = staticmethod(status.fail)

    def __init__(self, dependencies: Dependencies, namespace: str, key: str) -> None:
        self._dependencies, self._key = dependencies, (namespace, key)
        cluster, every_s = dependencies.cluster, dependencies.settings.resync_s
        roster, store = dependencies.roster, dependencies.store
        self.children = Children(cluster, roster, store, self._key, every_s)
        self.owned = Ref(manifests.JOB, namespace, key.removesuffix(manifests.OF_BATCHES))
        self._model = ModelReader(cluster, dependencies.settings)
        self._scraper = Scraper(dependencies.client, dependencies.metrics, dependencies.exchanges)
        self._ends: Sequence[ShardEnd] = ()
        self._ended: tuple[int, int] | None = None

    def stop(self) -> None:
        """End the reading of the model."""
        self._model.stop()

    def disown(self) -> None:
        """Nothing was decided."""

    def serves(self, now: float) -> bool:
        """True if a pod is at work."""
        return any(pod_of(body, now).serving for body in self._pods())

    def parse(self, body: Object) -> InferenceBatch:
        """Read the object. Raises SpecError."""
        return parse_batch(body)

    async def observe(
        self, batch: InferenceBatch, uid: str, previous: Object, now: float
    ) -> BatchObserved:
        """Read the Job, and what its pods tell; before there is one, what it needs. Raises
        ClusterError."""
        if status.is_over(previous):
            return BatchObserved(None, previous)
        live, engine = await self.children.find(self.owned, afresh=True), batch.engine
        found = await self._model.look(engine, None, time.monotonic()) if engine else None
        fit = judge(engine.spec, found) if engine and found else None
        if live is None:
            return BatchObserved(None, previous, fit, *await self._service(batch))
        ends = await self._ends_of(live)  # first: a drained pod goes within a second of its end
        return BatchObserved(
            job=live,
            previous=previous,
            fit=fit,
            pods=tuple(pod_of(body, now) for body in self._pods()),
            live=await self._reports(),
            ends=ends,
        )

    def plan(self, batch: InferenceBatch, observed: BatchObserved, now: float) -> BatchPlan:
        """Decide what to write and report."""
        return plan(batch, observed, self._dependencies.settings, now)

    async def execute(self, planned: BatchPlan, tell: Tell) -> None:
        """Write and report. Raises ClusterError."""
        if planned.make:
            await self.children.apply([planned.make])
        if planned.steer:
            await self.children.change(self.owned, planned.steer)
        await tell(planned.noticed)

    async def _service(self, batch: InferenceBatch) -> tuple[Object | None, str]:
        """The service that answers, and its address; None and "" where there is none."""
        ref = batch.spec.service_ref
        if ref is None:
            return None, ""
        kinds = (KIND, "Service")
        service, door = [
            await self._dependencies.cluster.get(Ref(kind, batch.namespace, ref.name))
            for kind in kinds
        ]
        return service, str((door or {}).get("spec", {}).get("clusterIP", ""))

    def _pods(self) -> list[Object]:
        pods = self._dependencies.store.pods(self._key)
        return sorted(pods, key=lambda body: str(body["metadata"]["name"]))

    async def _reports(self) -> dict[int, BatchReport]:
        """By shard, what its pod tells now. One that only starts, or checks, does not answer."""
        asked = {
            shard: ScrapeTarget(body["metadata"]["uid"], ip, job.REPORT_PORT)
            for body in self._pods()
            if (shard := shard_of(body)) is not None
            and (ip := (body.get("status") or {}).get("podIP"))
        }
        answers = await asyncio.gather(*map(self._report, asked.values()))
        return {shard: told for shard, told in zip(asked, answers, strict=True) if told}

    async def _report(self, target: ScrapeTarget) -> BatchReport | None:
        try:
            return await self._scraper.report(target)
        except ScrapeError as e:
            _log.debug("%s/%s: %s: %s", *self._key, target.ip, e)
            return None

    async def _ends_of(self, live: Object) -> Sequence[ShardEnd]:
        """How pods have ended. No watch shows them; they are read when one more has. One that is
        drained and still finishes its shard is gone at once: its end is seen before it goes."""
        num_gone = self._dependencies.store.num_gone(self._key)
        ended = num_gone, job_of(live).num_ended
        if ended != self._ended:
            namespace, label = self._key[0], self.children.pods_label
            bodies = self._dependencies.cluster.ended_pods(namespace, label)
            read = [shard_end_of(body, job.CLIENT) async for body in bodies]
            self._ends, self._ended = [end for end in read if end], ended
        going = [shard_end_of(body, job.CLIENT) for body in self._pods()]
        return [*self._ends, *(end for end in going if end)]
