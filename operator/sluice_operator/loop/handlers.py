"""The watches of kopf, and nothing else: each handler only wakes the reconciler of an object.

No handler makes kopf write a finalizer, an annotation or a status. Garbage collection deletes
children with their owner, also while the operator is down.
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import kopf
from sluice_core.words import in_url

from ..children.manifests import MANAGED_BY, MANAGED_BY_LABEL, SEEN, batch_key, owner_of
from ..cluster.child_store import ChildStore, Key
from ..cluster.client import LIVE_PODS, RESOURCES, Cluster, ClusterError
from ..cluster.observed import Object
from ..metrics import Metrics, MetricsServer
from ..pods.scrape import create_client
from ..settings import Settings
from ..spec.batch import BATCH_PLURAL
from ..spec.service import GROUP, PLURAL, VERSION
from ..status.samples import ObjectCollector, Shown
from .batch import BatchKind
from .dependencies import Dependencies
from .reconcile import Make, Reconciler
from .service import ServiceKind

_log = logging.getLogger(__name__)

CHILDREN = {kind: RESOURCES[kind] for kind in SEEN}
"""Kinds that are watched, only with our label; the other children are read by name."""
_OF_A_LIST = 10
"""Objects in one page of a list of kopf's: each may be some MiB, and it lists all kinds at once."""
_WORKER_IDLE_S = 0.2
"""Seconds for which kopf's worker of an object keeps what it last saw of it."""
_WATCH = "watcher for "
"""kopf's names of the tasks that watch begin so."""


@dataclass(slots=True)
class Operator:
    """The reconcilers, their tasks, and the store that the watches feed."""

    settings: Settings
    dependencies: Dependencies | None = None
    store: ChildStore = field(default_factory=ChildStore)
    reconcilers: dict[Key, Reconciler] = field(default_factory=dict)
    tasks: dict[Key, asyncio.Task[None]] = field(default_factory=dict)

    def see(
        self, dependencies: Dependencies, key: Key, body: Object, make: Make = ServiceKind
    ) -> None:
        """Take in an object that the watch shows. `make`: of which kind."""
        task = self.tasks.get(key)
        if task is None or task.done():
            self.store.open(key)
            self.reconcilers[key] = Reconciler(dependencies, *key, make)
            task = asyncio.create_task(self.reconcilers[key].run(), name="/".join(key))
            task.add_done_callback(partial(self._ended, key))
            self.tasks[key] = task
            dependencies.metrics.objects.set(len(self.tasks))
        self.reconcilers[key].see(body)

    def shown(self) -> list[Shown]:
        """Every object that was passed over, also for other threads."""
        seen = [reconciler.shown for reconciler in list(self.reconcilers.values())]
        return [one for one in seen if one]

    def see_child(self, kind: str, body: Object, *, is_gone: bool) -> None:
        """Take in a child that the watch shows, or that it is gone."""
        tell = self.store.lose if is_gone else self.store.show
        for key in tell(owner_of(kind, body), kind, body):
            if reconciler := self.reconcilers.get(key):
                reconciler.wake()

    async def forget(self, key: Key, uid: str) -> None:
        """Forget the object with `uid`; another one of its name may have been seen before that."""
        reconciler = self.reconcilers.get(key)
        if reconciler and reconciler.uid == uid:
            await self._end(key)

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            _log.error("%s: its task has ended", task.get_name(), exc_info=error)
        if self.tasks.get(key) is task:
            self._let_go(key)

    def _let_go(self, key: Key) -> asyncio.Task[None] | None:
        task = self.tasks.pop(key, None)
        self.reconcilers.pop(key, None)
        self.store.close(key)
        if self.dependencies:
            self.dependencies.metrics.objects.set(len(self.tasks))
        return task

    async def _end(self, key: Key) -> None:
        if task := self._let_go(key):
            task.cancel()
            await asyncio.wait([task])

    async def stop(self) -> None:
        for key in list(self.tasks):
            await self._end(key)
        if self.dependencies:
            await self.dependencies.client.aclose()


def create_registry(operator: Operator) -> kopf.OperatorRegistry:
    """All handlers, bound to `operator`."""
    registry = kopf.OperatorRegistry()
    _register_lifecycle(registry, operator)
    for kind, resource in CHILDREN.items():
        _register_child(registry, operator, kind, resource)
    _register_objects(registry, operator, PLURAL, ServiceKind, str)
    _register_objects(registry, operator, BATCH_PLURAL, BatchKind, batch_key)
    return registry


def _register_lifecycle(registry: kopf.OperatorRegistry, operator: Operator) -> None:
    @kopf.on.login(registry=registry)
    def login(**known: Any) -> kopf.ConnectionInfo | None:
        # A custom registry lacks kopf's default logins. The first reads the token again at each
        # login, as rotated tokens need. Its server is a name, and not every cluster has DNS.
        account = kopf.login_with_service_account(**known)
        if account is None:
            return kopf.login_via_client(**known)
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        return dataclasses.replace(account, server=f"https://{in_url(host)}:{port}")

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        operator.dependencies = await connect(operator)

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        _end_watches()
        await operator.stop()


def _end_watches() -> None:
    """End the others after one watch has failed. Once kopf has closed its session they
    would wait for new credentials, and may then survive kopf's own cancellation for ten minutes."""
    for task in asyncio.all_tasks():
        if task.get_name().startswith(_WATCH):
            task.cancel()


async def connect(operator: Operator) -> Dependencies:
    """The reconcilers' context. Raises kopf.TemporaryError where waiting can help."""
    settings, metrics = operator.settings, Metrics()
    try:
        cluster = Cluster.connect(metrics)
        if not await cluster.serves_objects():
            raise kopf.TemporaryError(
                f"{PLURAL}.{GROUP} is not installed: the chart's crds.install brings it", delay=5
            )
    except ClusterError as e:
        raise kopf.TemporaryError(str(e), delay=5) from e
    metrics.registry.register(ObjectCollector(operator.shown))
    MetricsServer(settings.address, settings.metrics_port, metrics.registry).start()
    return Dependencies(settings, cluster, create_client(), metrics, operator.store)


def _register_child(
    registry: kopf.OperatorRegistry, operator: Operator, kind: str, resource: tuple[str, str, str]
) -> None:
    selector = {MANAGED_BY_LABEL: MANAGED_BY}

    # Not an index of kopf's: it keeps whatever bears the label, and each change wakes all that wait
    # for any of it. The time to start would grow with the square of their number.
    @kopf.on.event(*resource, id=f"{kind}-changed", labels=selector, registry=registry)
    async def changed(body: kopf.Body, type: str, **_: Any) -> None:
        operator.see_child(kind, dict(body), is_gone=type == "DELETED")


def _register_objects(
    registry: kopf.OperatorRegistry,
    operator: Operator,
    plural: str,
    make: Make,
    key_of: Callable[[str], str],
) -> None:
    @kopf.on.event(GROUP, VERSION, plural, id=f"{plural}-changed", registry=registry)
    async def changed(
        body: kopf.Body, type: str, namespace: str | None, name: str, **_: Any
    ) -> None:
        assert (
            operator.dependencies is not None
        )  # kopf watches only once its start-up handlers are done
        key = (namespace or "", key_of(name))
        if type == "DELETED":
            await operator.forget(key, str(body.metadata["uid"]))
        else:
            operator.see(operator.dependencies, key, dict(body), make)


class _NoDifferences(kopf.DiffBaseStorage):
    """No handler of ours needs differences; kopf would copy each object for them, twice."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing is copied."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing was kept."""
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""


def configure(settings: kopf.OperatorSettings) -> None:
    """Set kopf up so that it leaves no trace on the objects."""
    settings.posting.enabled = False  # our events are our own, deduplicated
    settings.watching.server_timeout = 600  # an int: the API server refuses 600.0
    settings.watching.chunk_size = _OF_A_LIST
    settings.queueing.idle_timeout = _WORKER_IDLE_S
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.enforce_retry_after = True
    settings.scanning.disabled = True  # needs rights on CRDs and namespaces that we do without
    settings.persistence.finalizer = f"{GROUP}/operator"
    settings.persistence.diffbase_storage = _NoDifferences()
    settings.watching.field_selectors[CHILDREN["Pod"]] = LIVE_PODS
    for resource in CHILDREN.values():
        settings.watching.label_selectors[resource] = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
