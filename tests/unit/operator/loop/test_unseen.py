"""Claims on a new operator whose watches have shown nothing yet: it reads what it must know."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from sluice_operator.children import manifests, runtime
from sluice_operator.cluster.child_store import ChildStore
from sluice_operator.cluster.client import Listed, Ref
from sluice_operator.loop import children, reconcile
from sluice_operator.loop.dependencies import Dependencies
from sluice_operator.loop.ownership import owner_of
from sluice_operator.loop.reconcile import Reconciler
from sluice_operator.metrics import Metrics
from sluice_operator.model import reader
from sluice_operator.model.checkpoint import Refused
from unit.operator.loop.test_reconciler import DEMO, AdminPorts, Children, Clock, Store, body
from unit.operator.observations import SETTINGS, pod_body

HELD = "ConfigMap", "demo-runtime"


class Slow(Store):
    """Whose watches show what they are told to; `read` is what was asked for by name."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, str]] = []
        self.read: list[str] = []

    async def get(self, ref: Ref) -> Any:
        self.read.append(ref.kind)
        return await super().get(ref)

    def watched(self, kind: str) -> list[Any]:
        return [self.objects[key] for key in self.shown if key[0] == kind]


@pytest.fixture
def store() -> Slow:
    return Slow()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (children, reconcile):
        monkeypatch.setattr(module, "time", made)
    return made


def create_context(
    store: Slow, instance: str = "one", children: ChildStore | None = None
) -> Dependencies:
    """What a new operator's reconcilers share."""
    client = httpx.AsyncClient(transport=httpx.MockTransport(AdminPorts().answer))
    settings = replace(SETTINGS, instance=instance)
    return Dependencies(settings, store, client, Metrics(), children or Children(store))


def create_operator(
    store: Slow, instance: str = "one", children: ChildStore | None = None
) -> Reconciler:
    """A new one, which has read nothing."""
    made = Reconciler(create_context(store, instance, children), "default", "demo")
    made.see(body())
    return made


def owner(store: Slow) -> str:
    """Whom the ConfigMap names."""
    return str(store.objects[HELD]["metadata"]["annotations"][runtime.OWNER_ANNOTATION])


async def test_an_object_of_another_installation_is_left_to_it(store: Slow, clock: Clock) -> None:
    one, two = create_operator(store, "one"), create_operator(store, "two")
    await one.reconcile()
    store.num_writes, store.events = 0, []
    clock.wall_s -= clock.wall_s % 3600
    for _ in range(10):
        await two.reconcile()
        clock.wall_s += 60
    assert (store.num_writes, owner(store)) == (0, "one")
    assert one.shown is not None
    assert two.shown is None, "one series of each object"
    [told] = store.events
    assert told["reason"] == "OtherOperator"
    assert told["message"] == (
        "installation one cares for it, so two leaves it alone; to hand it over: kubectl annotate "
        "configmap demo-runtime -n default --overwrite sluice.dev/operator=two"
    )
    clock.wall_s += 3600
    await two.reconcile()
    assert len({event["metadata"]["name"] for event in store.events}) == 2, "it is told again"


@pytest.mark.parametrize("name", ["two", ""])
async def test_an_object_is_handed_over_by_its_annotation(store: Slow, name: str) -> None:
    """Both live; where nobody is named, whoever looks first has it."""
    one, two = create_operator(store, "one"), create_operator(store, "two")
    for operator in (one, two):
        await operator.reconcile()
    store.shown.append(HELD)
    handed = copy.deepcopy(store.objects[HELD])
    handed["metadata"]["annotations"][runtime.OWNER_ANNOTATION] = name
    handed["metadata"]["resourceVersion"] = "100"
    store.objects[HELD] = handed
    store.num_writes = 100
    for operator in (two, one, two, one):
        await operator.reconcile()
    assert owner(store) == "two"
    assert [e["message"].split(" cares")[0] for e in store.events] == [
        "installation one", "installation two",
    ]  # fmt: skip


async def test_the_configmap_of_a_former_object_names_nobody(store: Slow) -> None:
    await create_operator(store, "one").reconcile()
    held = store.objects[HELD]
    assert owner_of("uid-1", held) == "one"
    assert owner_of("another", held) == owner_of("uid-1", None) == ""


async def test_what_was_read_is_known_until_the_watch_shows_it_gone(store: Slow) -> None:
    await create_operator(store).reconcile()
    held = Children(store)
    again = create_operator(store, children=held)
    await again.reconcile()
    assert set(manifests.WATCHED) <= set(store.read)
    store.read.clear()
    for _ in range(3):
        await again.reconcile()
    assert store.read == []
    gone = store.objects.pop(("Service", "demo"))
    held.lose(DEMO, "Service", gone)
    await again.reconcile()
    assert ("Service", "demo") in store.objects
    assert [event["reason"] for event in store.events].count("ChildRestored") == 1


async def test_what_the_watch_shows_of_a_child_counts_from_when_it_is_newer(store: Slow) -> None:
    await create_operator(store).reconcile()
    again = create_operator(store)
    await again.reconcile()
    edited = store.objects["Deployment", "demo"]
    edited = {**edited, "spec": {**edited["spec"], "replicas": 7}}
    version = str(int(edited["metadata"]["resourceVersion"]) + 100)
    edited["metadata"] = {**edited["metadata"], "resourceVersion": version}
    store.objects["Deployment", "demo"] = edited
    await again.reconcile()
    assert store.objects["Deployment", "demo"]["spec"]["replicas"] == 7, "no watch has told"
    store.shown.append(("Deployment", "demo"))
    await again.reconcile()
    assert store.objects["Deployment", "demo"]["spec"]["replicas"] == 1


@pytest.mark.parametrize("is_labelled", [True, False])
async def test_what_somebody_else_holds_by_our_names_is_looked_at_again(
    store: Slow, is_labelled: bool
) -> None:
    """What bears no label no watch will ever show."""
    labels = {manifests.MANAGED_BY_LABEL: manifests.MANAGED_BY} if is_labelled else {}
    meta = {"name": "demo", "namespace": "default", "uid": "x", "resourceVersion": "1"}
    store.objects["Service", "demo"] = {"kind": "Service", "metadata": {**meta, "labels": labels}}
    one = create_operator(store)
    for _ in range(2):
        store.read.clear()
        await one.reconcile()
    assert ("Deployment", "demo") not in store.objects
    assert ("Service" in store.read) is not is_labelled


async def test_pods_of_a_model_that_fitted_are_looked_after_where_it_does_not_now(
    store: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_operator(store).reconcile()
    store.pods = [pod_body()]
    monkeypatch.setattr(reader, "_read", lambda *_: Refused("it does not fit"))
    del store.objects["Service", "demo"]
    again = create_operator(store)
    await again.reconcile()
    assert ("Service", "demo") in store.objects, "nothing else would be written"


async def test_a_child_that_went_before_the_watch_began_is_found_missing(
    store: Slow, clock: Clock
) -> None:
    await create_operator(store).reconcile()
    again = create_operator(store)
    await again.reconcile()
    del store.objects["Service", "demo"]
    await again.reconcile()
    assert ("Service", "demo") not in store.objects
    clock.running_s += 11 * SETTINGS.resync_s
    await again.reconcile()
    assert ("Service", "demo") in store.objects


async def test_a_pod_that_the_watch_still_shows_is_let_go_once_it_is_missed(
    store: Slow, clock: Clock
) -> None:
    held = ChildStore()
    held.open(DEMO)
    shown = pod_body()
    shown["metadata"]["resourceVersion"] = "1"
    held.show(DEMO, "Pod", shown)
    one = create_operator(store, children=held)
    await one.reconcile()
    assert len(held.pods(DEMO)) == 1
    clock.running_s += 11 * SETTINGS.resync_s
    await one.reconcile()  # the API server lists no pod
    assert len(held.pods(DEMO)) == 0


class Listing(Slow):
    """While a kind is asked for, what `meanwhile` says happens."""

    meanwhile: Callable[[str], None] = staticmethod(lambda kind: None)

    async def listed(self, collection: Ref, label: str = "") -> Listed:
        found = await super().listed(collection, label)
        self.meanwhile(collection.kind)
        return found


async def test_what_comes_and_goes_while_deletions_are_looked_for_is_as_the_watch_tells(
    clock: Clock,
) -> None:
    store, held = Listing(), ChildStore()
    held.open(DEMO)
    one = create_operator(store, children=held)
    await one.reconcile()
    new = pod_body()
    new["metadata"]["resourceVersion"] = "100"  # newer than the list

    def meanwhile(kind: str) -> None:
        if kind == "Pod":
            held.show(DEMO, "Pod", new)
        if kind == "Service" and (gone := store.objects.pop(("Service", "demo"), None)):
            held.lose(DEMO, "Service", gone)

    store.meanwhile = meanwhile
    clock.running_s += 11 * SETTINGS.resync_s
    await one.reconcile()
    store.meanwhile = lambda kind: None
    assert len(held.pods(DEMO)) == 1
    await one.reconcile()
    assert ("Service", "demo") in store.objects, "made again, as it is known to be gone"


async def test_of_the_object_itself_no_more_is_kept_than_is_read(store: Slow) -> None:
    """Each may bear a quarter of a MiB of annotations, and anybody may make many."""
    one = create_operator(store)
    large = body(2)
    large["metadata"] |= {"annotations": {"a": "x"}, "labels": {"b": "y"}, "managedFields": [{}]}
    one.see(large)
    assert not {"annotations", "labels", "managedFields"} & one._body["metadata"].keys()
    await one.reconcile()
    assert ("Deployment", "demo") in store.objects
