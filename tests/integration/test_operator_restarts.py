"""An operator that dies leaves nothing half done: exhaustively after each write, and for real."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.apiserver import ApiServer
from integration.operator_runs import (
    CHILDREN,
    Namespace,
    api_client,
    create_demo,
    create_namespace,
    running_operator,
    settle,
)
from sluice_operator.children.manifests import owner_of
from sluice_operator.cluster.child_store import ChildStore, Key
from sluice_operator.cluster.client import Cluster, ClusterError
from sluice_operator.loop.dependencies import Dependencies
from sluice_operator.loop.reconcile import Reconciler
from sluice_operator.metrics import Metrics
from sluice_operator.pods.scrape import create_client
from sluice_operator.settings import Settings

Object = Mapping[str, Any]
_numbers = itertools.count()
_PLURALS = {"Deployment": "deployments", "Service": "services", "ConfigMap": "configmaps"}
NUM_WRITES = 6
"""Five children and the status."""


class Killed(BaseException):
    """The process is gone: nothing of ours may catch it."""


class DyingCluster(Cluster):
    """The real thing, in a process that ends right after its n-th write went through. `meeting`:
    where it waits before the first write of a ConfigMap."""

    writes_left: float = float("inf")
    meeting: asyncio.Barrier | None = None

    async def apply(self, manifest: Object, subresource: str = "") -> Object:
        if manifest["kind"] == "ConfigMap" and self.meeting:
            meeting, self.meeting = self.meeting, None
            await meeting.wait()
        written = await super().apply(manifest, subresource)
        self.writes_left -= 1
        if self.writes_left == 0:
            raise Killed
        return written


@pytest.fixture
def space(client: httpx.Client) -> Namespace:
    return create_namespace(client, f"restarts-{next(_numbers)}")


@asynccontextmanager
async def a_reconciler(
    server: ApiServer,
    space: Namespace,
    models: Path,
    children: ChildStore,
    *,
    writes: float = float("inf"),
    resync_s: float = 30.0,
    meeting: asyncio.Barrier | None = None,
) -> AsyncIterator[Reconciler]:
    """A new operator's, of demo; it is killed after `writes` writes."""
    metrics = Metrics()
    cluster = DyingCluster(api_client(server), metrics)
    cluster.writes_left, cluster.meeting = writes, meeting
    settings = Settings("registry.invalid/worker:1", models_dir=models, resync_s=resync_s)
    async with create_client() as client:
        children.open(space.demo)
        reconciler = Reconciler(
            Dependencies(settings, cluster, client, metrics, children), *space.demo
        )
        reconciler.see(space.get("inferenceservices", "demo"))
        yield reconciler


class LiveChildren(ChildStore):
    """Those of demo, with a watch that misses nothing."""

    def __init__(self, space: Namespace) -> None:
        super().__init__()
        self._space = space

    def child(self, key: Key, kind: str) -> Object | None:
        is_watched = kind in _PLURALS
        if is_watched and (found := self._space.find(_PLURALS[kind], self._space.child(kind))):
            self.show(key, kind, found)
        return super().child(key, kind)


async def reconcile_once(server: ApiServer, space: Namespace, models: Path, writes: float) -> bool:
    """A new operator's pass over demo, ended after `writes` writes; whether it was ended."""
    children = LiveChildren(space)
    async with a_reconciler(server, space, models, children, writes=writes) as reconciler:
        try:
            await reconciler.reconcile()
        except Killed:
            return True
    return False


@asynccontextmanager
async def longlived(
    server: ApiServer, space: Namespace, models: Path
) -> AsyncIterator[tuple[Reconciler, ChildStore]]:
    """A reconciler of demo that looks at everything at each pass, and its children, of which no
    watch tells."""
    children = ChildStore()
    async with a_reconciler(server, space, models, children, resync_s=0.0) as reconciler:
        await reconciler.reconcile()
        yield reconciler, children


async def test_a_deletion_that_the_watch_missed_is_found(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    create_demo(space)
    async with longlived(apiserver, space, models) as (reconciler, _):
        before = space.get("deployments", "demo")
        space.delete("deployments", "demo")
        await reconciler.reconcile()
        restored = space.get("deployments", "demo")
    assert restored["metadata"]["uid"] != before["metadata"]["uid"]


async def test_an_object_whose_deletion_the_watch_missed_gets_no_children_again(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    create_demo(space)
    async with longlived(apiserver, space, models) as (reconciler, _):
        for plural, name in (("inferenceservices", "demo"), ("deployments", "demo")):
            space.delete(plural, name)
        for _ in range(3):
            await reconciler.reconcile()
            assert space.find("deployments", "demo") is None


async def test_an_edited_admin_token_is_put_back_for_pods_read_it_once(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    create_demo(space)
    async with longlived(apiserver, space, models) as (reconciler, _):
        token = space.get("secrets", "demo-admin")["data"]["token"]
        space.patch("secrets", "demo-admin", {"data": {"token": "bWluZQ=="}})
        await reconciler.reconcile()
        assert space.get("secrets", "demo-admin")["data"]["token"] == token


async def test_a_copy_of_a_child_is_not_taken_for_it(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    create_demo(space)
    async with longlived(apiserver, space, models) as (reconciler, children):
        held = space.get("configmaps", "demo-runtime")
        copy = {
            **held,
            "metadata": {**held["metadata"], "name": "a-backup"},
            "data": {"epoch": "9"},
        }
        assert children.show(owner_of("ConfigMap", copy), "ConfigMap", copy) == set()
        await reconciler.reconcile()
    assert space.get("configmaps", "demo-runtime")["data"]["epoch"] == "0"


def _shape(space: Namespace) -> dict[str, Any]:
    """The children without what differs from object to object."""
    token = space.get("secrets", "demo-admin")["data"]["token"]
    assert token
    parts = {}
    for plural, name in CHILDREN.items():
        body = space.get(plural, name)
        parts[plural] = (body.get("data") if plural == "configmaps" else None, _spec(body))
    return parts


def _spec(body: Mapping[str, Any]) -> Any:
    spec = dict(body.get("spec", {}))
    for assigned in ("clusterIP", "clusterIPs"):
        spec.pop(assigned, None)
    return spec


async def test_killed_after_any_write_it_converges_to_what_an_unkilled_one_makes(
    apiserver: ApiServer, client: httpx.Client, models: Path
) -> None:
    unkilled = create_namespace(client, f"restarts-{next(_numbers)}")
    create_demo(unkilled)
    assert not await reconcile_once(apiserver, unkilled, models, float("inf"))
    wanted = _shape(unkilled)
    for writes in range(1, NUM_WRITES + 1):
        space = create_namespace(client, f"restarts-{next(_numbers)}")
        create_demo(space)
        assert await reconcile_once(apiserver, space, models, writes)
        await reconcile_once(apiserver, space, models, float("inf"))
        assert _shape(space) == wanted
        for plural, name in CHILDREN.items():
            assert [o["metadata"]["name"] for o in space.ours(plural)] == [name]


async def test_a_killed_operator_that_had_written_everything_is_followed_by_silence(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    create_demo(space)
    assert await reconcile_once(apiserver, space, models, NUM_WRITES)
    versions = space.versions()
    assert not await reconcile_once(apiserver, space, models, 1)
    assert space.versions() == versions


def test_a_restarted_process_changes_nothing(
    apiserver: ApiServer, space: Namespace, models: Path, tmp_path: Path
) -> None:
    create_demo(space)
    with running_operator(apiserver, models, tmp_path / "1.log", space.name) as first:
        settle(first, space)
        first.kill()
    versions = space.versions()
    with running_operator(apiserver, models, tmp_path / "2.log", space.name) as second:
        second.await_passes(4)
        assert second.writes() == 0
    assert space.versions() == versions


async def test_an_operator_that_was_overtaken_goes_on_from_where_the_other_is(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    create_demo(space, batching__initialNumSeqs=4)

    def batching(**limits: int | None) -> Object:
        return space.patch("inferenceservices", "demo", {"spec": {"batching": limits}})

    async with a_reconciler(apiserver, space, models, LiveChildren(space)) as first:
        await first.reconcile()
        batching(maxNumSeqs=2, initialNumSeqs=2)
        assert not await reconcile_once(apiserver, space, models, float("inf"))
        first.see(batching(maxNumSeqs=None, initialNumSeqs=4))
        await first.reconcile()
    data = space.get("configmaps", "demo-runtime")["data"]
    assert (data["epoch"], data["cap"]) == ("1", "2")


async def test_of_two_operators_that_open_an_epoch_at_once_one_is_refused(
    apiserver: ApiServer, space: Namespace, models: Path
) -> None:
    """Both have read the same ConfigMap. Each wants another cap, as each has seen another edit."""
    create_demo(space, batching__initialNumSeqs=4)
    await reconcile_once(apiserver, space, models, float("inf"))
    meeting = asyncio.Barrier(2)

    async def narrow_to(cap: int, operators: AsyncExitStack) -> Reconciler:
        batching = {"maxNumSeqs": cap, "initialNumSeqs": cap}
        space.patch("inferenceservices", "demo", {"spec": {"batching": batching}})
        made = a_reconciler(apiserver, space, models, LiveChildren(space), meeting=meeting)
        return await operators.enter_async_context(made)

    async with AsyncExitStack() as operators, asyncio.timeout(30.0):
        both = {cap: await narrow_to(cap, operators) for cap in (3, 2)}
        passes = (reconciler.reconcile() for reconciler in both.values())
        ends = dict(zip(both, await asyncio.gather(*passes, return_exceptions=True), strict=True))
    [won] = [cap for cap, end in ends.items() if isinstance(end, float)]
    [lost] = [end for cap, end in ends.items() if cap != won]
    assert isinstance(lost, ClusterError)
    assert lost.status == 409
    data = space.get("configmaps", "demo-runtime")["data"]
    assert (data["epoch"], data["cap"]) == ("1", str(won))
