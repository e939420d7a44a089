"""InferenceServices: what one pass over one of them reads, and what it writes and sends."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ..children import manifests, runtime
from ..children.api_keys import ApiKeys
from ..children.drift import manifest_hash
from ..children.manifests import is_ours
from ..children.runtime import DecidedRuntime
from ..cluster.client import Ref
from ..cluster.failures import FailedPods
from ..cluster.observed import Object, Pod, pod_of, with_followers
from ..model.fit import judge
from ..model.reader import ModelReader
from ..plan import rival
from ..plan.observed import Observed
from ..plan.plan import Plan, plan
from ..plan.rival import Rivalry
from ..pods.scrape import Scrape, ScrapeError, Scraper, ScrapeTarget
from ..spec.service import KIND, InferenceService, parse
from ..status import compose
from ..tuner.replicas import wanting_none
from .children import Children
from .dependencies import Dependencies
from .kind import Tell

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Memory:
    """The memory of one object's passes; all of it can be lost at any time.

    `pods`: as last reported, by uid. `rivalry`: of others who write the replicas.
    """

    runtime: DecidedRuntime | None = None
    pods: Mapping[str, Pod] = field(default_factory=dict)
    rivalry: Rivalry = Rivalry()


class ServiceKind:
    """One InferenceService (`kind.Kind`)."""

    name = KIND
    fail = staticmethod(compose.fail)

    def __init__(self, dependencies: Dependencies, namespace: str, name: str) -> None:
        self._dependencies, self._key, self._memory = dependencies, (namespace, name), _Memory()
        cluster, every_s = dependencies.cluster, dependencies.settings.resync_s
        roster, store = dependencies.roster, dependencies.store
        self.children = Children(cluster, roster, store, self._key, every_s)
        self._model = ModelReader(cluster, dependencies.settings)
        self._scraper = Scraper(dependencies.client, dependencies.metrics, dependencies.exchanges)
        self._failures = FailedPods(cluster, namespace, self.children.pods_label, every_s)
        self._keys = ApiKeys(cluster)
        self.owned = Ref("ConfigMap", namespace, runtime.runtime_name(name))

    def stop(self) -> None:
        """End the reading of the model."""
        self._model.stop()

    def disown(self) -> None:
        """Forget cap and epoch."""
        self._memory.runtime = None

    def serves(self, now: float) -> bool:
        """True if a pod serves."""
        return any(pod.serving for pod in self._pods(now))

    def parse(self, body: Object) -> InferenceService:
        """Read the object. Raises SpecError."""
        service = parse(body)
        manifests.check(service, self._dependencies.settings)
        return service

    async def observe(
        self, service: InferenceService, uid: str, previous: Object, now: float
    ) -> Observed:
        """Read model, children and pods. Raises ClusterError."""
        memory, children, pods = self._memory, self.children, self._pods(now)
        serves = any(pod.serving for pod in pods)
        is_served = partial(children.are_of_model, service) if serves else None
        found = await self._model.look(service, is_served, time.monotonic())
        fit = judge(service.spec, found)
        live = await children.look(service, fits=fit.status != "False")
        held = live.get("ConfigMap")
        if held and is_ours(service, held):
            self._take(held)
        wanted = memory.runtime.replicas if memory.runtime else None
        pods_of = live.get(manifests.workload_of(service))
        memory.rivalry = rival.after(memory.rivalry, pods_of, wanted, service.generation, now)
        pods = await self._of_groups(service, pods, now)
        return Observed(
            live=live,
            pods=pods,
            scrapes=await self._scrape(service, pods, now),
            fit=fit,
            token=children.token,
            previous=previous,
            runtime=memory.runtime,
            accepted=dict(children.accepted),
            deleted=self._dependencies.store.lost(self._key, uid),
            unsaved_s=time.monotonic() - children.saved_s,
            failed=await self._failures.newest(
                pods, self._dependencies.store.num_gone(self._key), now
            ),
            keys_problem=await self._keys.problem(service, time.monotonic(), children.every_s),
            former=memory.pods,
            rival=memory.rivalry.writer,
        )

    def plan(self, service: InferenceService, observed: Observed, now: float) -> Plan:
        """Decide what to write, send and report."""
        return plan(service, observed, self._dependencies.settings, now)

    async def execute(self, planned: Plan, tell: Tell) -> None:
        """Write, send and report. Raises ClusterError."""
        unread = self.children.unread
        wanted = [m for m in planned.apply if m["kind"] not in unread]  # it may be somebody else's
        # A refused child must not hold up the decision from the serving pods.
        same = await self.children.apply([m for m in wanted if m["kind"] == "ConfigMap"])
        self._memory.runtime = planned.runtime
        for notice in planned.decided:
            self._dependencies.metrics.decisions.labels(notice.reason).inc()
        await self._send(planned)
        await tell(planned.decided)
        same |= await self.children.apply([m for m in wanted if m["kind"] != "ConfigMap"])
        for refused in unread.values():
            raise refused
        restored = [notice for kind, notice in planned.restored.items() if kind not in same]
        await tell([*restored, *planned.noticed])
        self._memory.pods = planned.pods

    def _take(self, held: Object) -> None:
        """Continue from the stored state if this process has none, or another one has written: two
        would undo each other's writes. A person's edit keeps our hash, and is undone."""
        memory = self._memory
        if memory.runtime is not None and manifest_hash(held) == self.children.saved:
            return
        stored = runtime.parse(held.get("data") or {})
        if memory.runtime is None or (stored and stored.epoch >= memory.runtime.epoch):
            # It is unknown if other replicas were wanted all the while since.
            memory.runtime = stored and replace(stored, past=wanting_none(stored.past))

    def _pods(self, now: float) -> tuple[Pod, ...]:
        pods = (pod_of(body, now) for body in self._dependencies.store.pods(self._key))
        return tuple(sorted(pods, key=lambda pod: pod.name))

    async def _of_groups(
        self, service: InferenceService, pods: tuple[Pod, ...], now: float
    ) -> tuple[Pod, ...]:
        """The pods, which say what they wait for in their groups. No watch shows the others."""
        if service.spec.hardware.nodes == 1 or all(pod.ready for pod in pods):
            return pods
        listed = self._dependencies.cluster.live_pods(self._key[0], manifests.followers(service))
        return with_followers(pods, [pod_of(body, now) async for body in listed])

    async def _scrape(
        self, service: InferenceService, pods: tuple[Pod, ...], now: float
    ) -> Mapping[str, Scrape]:
        if not self.children.token:  # nothing of ours is there yet
            return {}
        known = self._scraper.knows
        asked = (p for p in pods if p.serving or p.unready_s or known(p.uid))
        targets = tuple(_target(pod) for pod in asked if pod.ip)
        keep_s = service.spec.slo.window_s
        return await self._scraper.scrape(targets, self.children.token, now, keep_s)

    async def _send(self, planned: Plan) -> None:
        """Send configurations. A pod that cannot be reached gets its own again in the next pass."""
        answers = await asyncio.gather(
            *(
                self._scraper.patch(_target(item.pod), self.children.token, item.patch)
                for item in planned.patches
            ),
            return_exceptions=True,
        )
        for item, answer in zip(planned.patches, answers, strict=True):
            if isinstance(answer, ScrapeError):
                self._dependencies.metrics.scrape_failures.labels(answer.reason).inc()
                _log.warning("%s/%s: pod %s: %s", *self._key, item.pod.name, answer)
            elif isinstance(answer, BaseException):
                raise answer


def _target(pod: Pod) -> ScrapeTarget:
    return ScrapeTarget(pod.uid, pod.ip)
