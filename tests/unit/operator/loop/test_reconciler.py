"""Claims on the reconciler: what it believes of children that come, go and are somebody else's."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from sluice_core.contract import Hung, Tick, encode
from sluice_core.errors import timestamp
from sluice_operator.children import manifests, runtime
from sluice_operator.cluster.child_store import ChildStore
from sluice_operator.cluster.client import Cluster, ClusterError, Listed, Ref
from sluice_operator.loop import children, reconcile, service
from sluice_operator.loop.dependencies import Dependencies
from sluice_operator.loop.reconcile import Reconciler
from sluice_operator.metrics import Metrics
from sluice_operator.model import reader
from sluice_operator.model.checkpoint import Unread
from sluice_operator.model.reader import Found
from sluice_operator.spec.service import parse
from sluice_operator.tuner import Past
from unit.operator.objects import changed, valid_object
from unit.operator.observations import (
    CHECKPOINT,
    NOW,
    SETTINGS,
    create_config,
    create_evidence,
    create_tick,
    pod_body,
)

WATCHED = ("ConfigMap", "Service", "Deployment")
Key = tuple[str, str]
DEMO = ("default", "demo")
LABEL = "app.kubernetes.io/instance=demo,app.kubernetes.io/managed-by=sluice-operator"


class Store(Cluster):
    """Objects by kind and name; the watch shows what is there the moment it is."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.is_deleted = False
        self.num_writes = 0
        self.events: list[Any] = []
        self.statuses: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.num_looks = 0
        self.status_refusal: Callable[[Any], ClusterError | None] = lambda status: None
        self.refused: dict[str, ClusterError] = {}
        self.after_write: Callable[[str], None] = lambda kind: None

    async def get(self, ref: Ref) -> Any:
        if ref.kind in self.refused:
            raise self.refused[ref.kind]
        return self.objects.get((ref.kind, ref.name))

    async def listed(self, collection: Ref, label: str = "") -> Listed:
        if collection.kind == "InferenceService":
            return Listed(frozenset() if self.is_deleted else frozenset({"uid-1", "uid-2"}), 10_000)
        assert label == LABEL.partition(",")[2]
        named = [body for (kind, _), body in self.objects.items() if kind == collection.kind]
        there = self.pods if collection.kind == "Pod" else named
        uids = [body["metadata"]["uid"] for body in there]
        return Listed(frozenset(uids), self.num_writes)

    async def failed_pods(self, namespace: str, label: str) -> AsyncIterator[dict[str, Any]]:
        assert label == LABEL
        self.num_looks += 1
        for body in self.failed:
            yield body

    async def live_pods(self, namespace: str, label: str) -> AsyncIterator[dict[str, Any]]:
        assert label == LABEL
        if "Pod" in self.refused:
            raise self.refused["Pod"]
        for body in self.pods:
            yield body

    async def create_once(self, manifest: Any) -> None:
        self.events.append(manifest)

    async def apply(self, manifest: Any, subresource: str = "") -> dict[str, Any]:
        self.num_writes += 1
        live: dict[str, Any] = json.loads(json.dumps(manifest))
        if subresource:
            if refusal := self.status_refusal(live["status"]):
                raise refusal
            live["metadata"] |= {"uid": "uid-1", "resourceVersion": "0"}
            self.statuses.append(live["status"])
            return live
        key = manifest["kind"], manifest["metadata"]["name"]
        before = self.objects.get(key)
        uid = before["metadata"]["uid"] if before else f"made-{self.num_writes}"
        live["metadata"] |= {"uid": uid, "resourceVersion": str(self.num_writes)}
        self.objects[key] = live
        self.after_write(manifest["kind"])
        return live

    def watched(self, kind: str) -> list[Any]:
        return [body for (of, _), body in self.objects.items() if of == kind and kind in WATCHED]


class Children(ChildStore):
    """Those of demo; at each look the watch shows what `store` holds."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.open(DEMO)

    def child(self, key: Key, kind: str) -> Any:
        for body in self._store.watched(kind):
            self.show(key, kind, body)
        return super().child(key, kind)

    def pods(self, key: Key) -> list[Any]:
        return self._store.pods


@dataclass
class Clock:
    """Stands in for `time`: the wall clock may be set, the other one only goes on."""

    wall_s: float = NOW
    running_s: float = field(default_factory=time.monotonic)

    def time(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.running_s


@dataclass
class AdminPorts:
    """The pods' admin ports, and what they were asked."""

    asked: list[tuple[str, str]] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    refused: dict[tuple[str, str], Exception | int] = field(default_factory=dict)
    """By verb and address: the status it is refused with, or why nobody is reached."""
    hung: Hung | None = None

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.url.path))
        refused = self.refused.get((request.method, request.url.host), 200)
        if isinstance(refused, Exception):
            raise refused
        is_config = request.url.path == "/v1/runtime_config"
        evidence = create_evidence(ticks=self.ticks)
        found = encode(create_config(hung=self.hung)) if is_config else encode(evidence)
        return httpx.Response(refused, stream=httpx.ByteStream(found))


def body(generation: int = 1, **spec: Any) -> dict[str, Any]:
    made = changed(valid_object(), "spec.model", {"uri": "pvc://models/x"})
    for path, value in spec.items():
        made = changed(made, f"spec.{path}", value)
    version = str(1000 * generation)
    made["metadata"] |= {"uid": "uid-1", "generation": generation, "resourceVersion": version}
    return made


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (children, reconcile, service):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def ports() -> AdminPorts:
    return AdminPorts()


@pytest.fixture
def context(store: Store, ports: AdminPorts) -> Dependencies:
    client = httpx.AsyncClient(transport=httpx.MockTransport(ports.answer))
    return Dependencies(SETTINGS, store, client, Metrics(), Children(store))


@pytest.fixture
def reconciler(context: Dependencies) -> Reconciler:
    made = Reconciler(context, "default", "demo")
    made.see(body())
    return made


async def test_nothing_is_done_before_the_pods_are_known(
    store: Store, context: Dependencies
) -> None:
    """Else each start of an operator would tell that none is ready, and forget what they serve."""
    children = ChildStore()
    children.open(DEMO)
    new = Reconciler(replace(context, store=children), *DEMO)
    new.see(body())
    store.pods, store.refused = [pod_body()], {"Pod": ClusterError(500, "InternalError", "away")}
    with pytest.raises(ClusterError, match="away"):
        await new.reconcile()
    assert (store.objects, store.statuses) == ({}, [])
    store.refused.clear()
    await new.reconcile()
    assert _condition(store, "Ready") == ("True", "Serving")


async def test_a_child_that_goes_while_it_is_written_is_made_again(
    store: Store, context: Dependencies, reconciler: Reconciler
) -> None:
    await reconciler.reconcile()

    def lose(kind: str) -> None:
        if kind == "Deployment":
            store.after_write = lambda kind: None
            gone = store.objects.pop(("Deployment", "demo"))
            context.store.lose(DEMO, "Deployment", gone)

    store.after_write = lose
    reconciler.see(body(2, replicas=2))
    await reconciler.reconcile()
    assert ("Deployment", "demo") not in store.objects
    await reconciler.reconcile()
    assert store.objects[("Deployment", "demo")]["spec"]["replicas"] == 2


async def test_a_child_that_went_unseen_right_after_it_was_written_is_found_missing(
    store: Store, reconciler: Reconciler, clock: Clock
) -> None:
    await reconciler.reconcile()
    del store.objects[("Deployment", "demo")]
    await reconciler.reconcile()
    assert ("Deployment", "demo") not in store.objects, "no watch has told"
    clock.running_s += 11 * SETTINGS.resync_s
    await reconciler.reconcile()
    assert ("Deployment", "demo") in store.objects


@pytest.mark.parametrize("is_webhooks", [False, True])
async def test_only_what_a_write_undoes_is_told_as_put_back(
    store: Store, context: Dependencies, reconciler: Reconciler, is_webhooks: bool
) -> None:
    """A new operator finds an image that differs: a person's, or the one that a webhook makes of
    whatever is written."""
    await reconciler.reconcile()
    deployment = "Deployment", "demo"

    def other(kind: str) -> None:
        if kind == "Deployment":
            container = store.objects[deployment]["spec"]["template"]["spec"]["containers"][0]
            container["image"] = "elsewhere/worker"

    other("Deployment")
    if is_webhooks:
        store.after_write = other
    another = Reconciler(context, "default", "demo")
    another.see(body())
    writes = store.num_writes
    await another.reconcile()
    assert store.num_writes > writes
    told = [event["message"] for event in store.events if event["reason"] == "ChildRestored"]
    assert len(told) == (not is_webhooks)


@pytest.mark.parametrize("status", [409, 429, 503])
async def test_a_write_that_may_succeed_when_it_is_tried_again_is_not_told_as_refused(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    apply = Store.apply

    async def refuses(self: Store, manifest: Any, *more: Any, **named: Any) -> Any:
        if manifest["kind"] == "Deployment":
            raise ClusterError(status, "Later", "the object has been modified")
        return await apply(self, manifest, *more, **named)

    monkeypatch.setattr(Store, "apply", refuses)
    with pytest.raises(ClusterError, match="has been modified"):
        await reconciler.reconcile()
    assert (store.statuses, _reasons(store)) == ([], [])


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret", "Deployment"])
async def test_what_is_refused_for_good_is_told_for_each_kind(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    await reconciler.reconcile()
    apply = Store.apply
    for key in [key for key in store.objects if key[0] == kind]:
        store.objects[key]["metadata"]["labels"] = {}

    async def refuses(self: Store, manifest: Any, *more: Any, **named: Any) -> Any:
        if manifest["kind"] == kind:
            raise ClusterError(422, "Invalid", "field is immutable")
        return await apply(self, manifest, *more, **named)

    monkeypatch.setattr(Store, "apply", refuses)
    reconciler.see(body(2, replicas=2))
    with pytest.raises(ClusterError, match="immutable"):
        await reconciler.reconcile()
    stalled = [c for c in store.statuses[-1]["conditions"] if c["type"] == "Stalled"]
    assert (stalled[0]["status"], stalled[0]["reason"]) == ("True", "ApplyFailed")


@pytest.mark.parametrize("is_persons", [False, True])
async def test_what_another_process_has_written_is_gone_on_from(
    store: Store, reconciler: Reconciler, is_persons: bool
) -> None:
    """Two of one installation would undo each other's replicas at every pass; a person's edit
    leaves our hash, and is put back."""
    held = "ConfigMap", "demo-runtime"
    await reconciler.reconcile()
    written = store.objects[held]
    mine = runtime.parse(written["data"])
    assert mine
    other = runtime.DecidedRuntime(mine.epoch, mine.cap, 3)
    manifest = manifests.configmap(parse(body()), SETTINGS, other)
    meta = {**(written if is_persons else manifest)["metadata"], "resourceVersion": "900"}
    store.objects[held] = {**manifest, "metadata": {**written["metadata"], **meta}}
    await reconciler.reconcile()
    replicas = 1 if is_persons else 3
    assert store.objects[held]["data"]["replicas"] == str(replicas)
    assert store.objects["Deployment", "demo"]["spec"]["replicas"] == replicas


async def test_for_how_long_fewer_replicas_were_wanted_is_not_taken_from_another_process(
    store: Store, reconciler: Reconciler, ports: AdminPorts
) -> None:
    """Nobody has seen since that they were: of two idle pods none goes at the first look."""
    past = Past(scale_in_since_s=NOW - 3600)
    wrote = manifests.configmap(parse(body()), SETTINGS, runtime.DecidedRuntime(1, 4, 2, past))
    wrote["metadata"] |= {"uid": "made-0", "resourceVersion": "0"}
    store.objects["ConfigMap", "demo-runtime"] = wrote
    store.pods = [pod_body("demo-1"), pod_body("demo-2")]
    ports.ticks = [create_tick(seq, t_s=NOW - 60 + 2 * seq) for seq in range(30)]
    for _ in range(2):
        await reconciler.reconcile()
    assert store.objects["Deployment", "demo"]["spec"]["replicas"] == 2
    assert store.statuses[-1]["scaling"]["reason"] == "ScaleDownWindow"


async def test_the_token_of_another_s_secret_is_not_ours(
    store: Store, reconciler: Reconciler, clock: Clock
) -> None:
    """Of an object that was just deleted and made again, or of anybody."""
    key = ("Secret", "demo-admin")
    meta = {"name": "demo-admin", "uid": "old", "resourceVersion": "1"}
    store.objects[key] = {"kind": "Secret", "metadata": meta, "data": {"token": "Zm9yZWlnbg=="}}
    await reconciler.reconcile()
    assert list(store.objects) == [key]
    del store.objects[key]
    clock.running_s += 5
    await reconciler.reconcile()
    assert ("Deployment", "demo") in store.objects, "looked at again at the next pass"
    assert b64decode(store.objects[key]["data"]["token"]) != b"foreign"


async def test_fields_of_a_newer_crd_are_left_out_and_told_once(
    store: Store, reconciler: Reconciler
) -> None:
    newer = body(2, **{"warmup": True, "hardware.topology": "mesh"})
    newer["spec"]["hardware"]["tolerations"] = [{"key": "gpu", "operator": "Exists", "since": "5m"}]
    reconciler.see(newer)
    for _ in range(3):
        await reconciler.reconcile()
    assert ("Deployment", "demo") in store.objects
    [told] = [event for event in store.events if event["reason"] == "UnknownFields"]
    named = told["message"].partition(": ")[2].split(", ")
    paths = {"spec.warmup", "spec.hardware.topology", "spec.hardware.tolerations[0].since"}
    assert set(named) == paths


def _condition(store: Store, kind: str) -> tuple[str, str]:
    """Status and reason of a condition in the newest status."""
    [found] = [c for c in store.statuses[-1]["conditions"] if c["type"] == kind]
    return found["status"], found["reason"]


def _reasons(store: Store) -> list[str]:
    return [event["reason"] for event in store.events]


async def test_pods_that_serve_are_looked_after_though_a_child_cannot_be_read(
    store: Store, reconciler: Reconciler, ports: AdminPorts, clock: Clock
) -> None:
    store.pods = [pod_body()]
    await reconciler.reconcile()
    clock.running_s += 60
    store.refused["Secret"] = ClusterError(500, "InternalError", "no key decrypts it")
    reconciler.see(body(2, **{"batching.maxNumSeqs": 2}))
    for _ in range(2):
        ports.asked.clear()
        with pytest.raises(ClusterError, match="Secret demo-admin cannot be read: no key"):
            await reconciler.reconcile()
        assert ("GET", "/v1/evidence") in ports.asked
        assert ("PATCH", "/v1/runtime_config") in ports.asked
        assert store.objects["ConfigMap", "demo-runtime"]["data"]["cap"] == "2"
        assert _condition(store, "Ready")[0] == "True"
        assert _condition(store, "Stalled") == ("True", "ApplyFailed")
    assert "ApplyFailed" in _reasons(store)
    store.refused.clear()
    await reconciler.reconcile()
    assert _condition(store, "Stalled")[0] == "False"


@pytest.mark.parametrize(
    ("refused", "reason"), [(409, "Refused"), (httpx.ConnectError("gone"), "Unreachable")]
)
async def test_a_pod_that_takes_no_configuration_holds_up_neither_the_pass_nor_the_others(
    store: Store,
    reconciler: Reconciler,
    context: Dependencies,
    ports: AdminPorts,
    refused: Exception | int,
    reason: str,
) -> None:
    store.pods = [pod_body("demo-1"), pod_body("demo-2", podIP="10.0.0.8")]
    await reconciler.reconcile()
    ports.refused["PATCH", "10.0.0.7"] = refused
    ports.asked.clear()
    reconciler.see(body(2, **{"batching.maxNumSeqs": 2}))
    await reconciler.reconcile()
    assert ports.asked.count(("PATCH", "/v1/runtime_config")) == 2
    failures = "sluice_operator_scrape_failures_total"
    assert context.metrics.registry.get_sample_value(failures, {"reason": reason}) == 1
    assert store.statuses[-1]["observedGeneration"] == 2
    assert _condition(store, "Ready")[0] == "True"


async def test_an_object_that_is_being_deleted_gets_no_child_back(
    store: Store, context: Dependencies, reconciler: Reconciler
) -> None:
    await reconciler.reconcile()
    leaving = body(2)
    leaving["metadata"]["deletionTimestamp"] = timestamp(NOW)
    reconciler.see(leaving)
    context.store.lose(DEMO, "Deployment", store.objects.pop(("Deployment", "demo")))
    writes, events = store.num_writes, len(store.events)
    await reconciler.reconcile()
    assert (store.num_writes, len(store.events)) == (writes, events)
    assert ("Deployment", "demo") not in store.objects


@pytest.mark.parametrize(("kind", "is_made"), [("Secret", False), ("PodDisruptionBudget", True)])
async def test_a_child_that_was_never_read_is_not_written_over(
    store: Store, reconciler: Reconciler, kind: str, is_made: bool
) -> None:
    """Without its token an operator can do nothing with the pods."""
    store.refused[kind] = ClusterError(403, "Forbidden", "no right")
    with pytest.raises(ClusterError, match="no right"):
        await reconciler.reconcile()
    made = {of for of, _ in store.objects}
    assert kind not in made
    assert ("Deployment" in made) is is_made
    assert _condition(store, "Stalled") == ("True", "ApplyFailed")
    assert _condition(store, "Ready")[0] == "False"


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between passes."""
    for name in ("_MIN_SPACING_S", "_SERVING_BACKOFF_S", "_MAX_BACKOFF_S"):
        monkeypatch.setattr(reconcile, name, 0.0)


@pytest.mark.parametrize(
    ("serves", "pauses"),
    [(False, [2, 4, 8, 16, 32, 60, 60]), (True, [2, 4, 8, 10, 10, 10, 10])],
)
async def test_a_pass_that_fails_is_tried_again_ever_later_until_one_succeeds(
    store: Store,
    reconciler: Reconciler,
    monkeypatch: pytest.MonkeyPatch,
    serves: bool,
    pauses: list[float],
) -> None:
    """Sooner where pods serve, for which there may be something to decide."""
    store.pods = [pod_body()] if serves else []
    outcomes = iter([*(None for _ in pauses), 0.0, None, math.inf])
    slept, look = [], reconciler.reconcile

    async def reconcile_then() -> float:
        await look()
        outcome = next(outcomes)
        if outcome is None:
            raise ClusterError(403, "Forbidden", "no right")
        return outcome

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        reconciler.wake()  # events do not cut it short

    monkeypatch.setattr(reconciler, "reconcile", reconcile_then)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    await reconciler.run()
    assert [pause for pause in slept if pause != reconcile._MIN_SPACING_S] == [*pauses, 2]


@pytest.mark.usefixtures("hurried")
async def test_an_api_server_that_is_away_for_a_night_ends_nothing(
    reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    morning, failures = asyncio.Event(), itertools.count(1)

    async def fail() -> float:
        if next(failures) == 1100:
            morning.set()
        raise ClusterError(0, "Unreachable", "the API server cannot be reached")

    monkeypatch.setattr(reconciler, "reconcile", fail)
    passes = asyncio.create_task(reconciler.run())
    waiting = asyncio.create_task(morning.wait())
    await asyncio.wait({passes, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not passes.done()
    passes.cancel()


@pytest.mark.usefixtures("hurried")
async def test_a_pod_that_cannot_be_understood_fails_a_pass_and_ends_nothing(
    store: Store, reconciler: Reconciler, context: Dependencies
) -> None:
    store.pods = [pod_body(startTime="yesterday")]
    passes = asyncio.create_task(reconciler.run())
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not passes.done()
    passes.cancel()
    assert context.metrics.registry.get_sample_value(
        "sluice_operator_passes_total", {"result": "bug"}
    )


async def test_a_wall_clock_that_is_set_back_delays_nothing(
    store: Store, reconciler: Reconciler, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Found] = [Unread("not there")]
    monkeypatch.setattr(reader, "_read", lambda *_: found[-1])
    monkeypatch.setattr(reader, "_DEADLINE_S", 30.0)
    await reconciler.reconcile()
    del store.objects["Secret", "demo-admin"]
    found.append(CHECKPOINT)
    clock.wall_s -= 3600
    clock.running_s += 120
    await reconciler.reconcile()
    assert ("Secret", "demo-admin") in store.objects
    assert _condition(store, "ModelFits")[0] == "True"


async def test_a_pod_that_its_node_refuses_is_the_reason_of_not_ready(
    store: Store, reconciler: Reconciler, clock: Clock
) -> None:
    refused = pod_body(phase="Failed", reason="NodeAffinity", message="it matches no more")
    refused["metadata"]["creationTimestamp"] = timestamp(clock.wall_s)
    store.failed = [refused]
    for _ in range(3):
        await reconciler.reconcile()
    assert _condition(store, "Ready") == ("False", "NodeAffinity")
    assert store.num_looks == 1, "there may be thousands"
    store.pods = [pod_body()]
    await reconciler.reconcile()
    assert _condition(store, "Ready") == ("True", "Serving")


async def test_a_child_that_goes_during_a_pass_is_told_at_the_next(
    store: Store, context: Dependencies, reconciler: Reconciler
) -> None:
    await reconciler.reconcile()

    def lose(kind: str) -> None:
        store.after_write = lambda kind: None
        context.store.lose(DEMO, "Service", store.objects.pop(("Service", "demo")))

    store.after_write = lose
    reconciler.see(body(2, replicas=2))
    await reconciler.reconcile()
    assert "ChildRestored" not in _reasons(store)
    await reconciler.reconcile()
    assert ("Service", "demo") in store.objects
    assert _reasons(store).count("ChildRestored") == 1
    await reconciler.reconcile()
    assert _reasons(store).count("ChildRestored") == 1


async def test_a_pod_that_hangs_is_told_once_also_by_an_operator_that_is_new(
    store: Store, ports: AdminPorts, context: Dependencies, reconciler: Reconciler, clock: Clock
) -> None:
    """It is not ready, and has not been asked by this process before."""
    await reconciler.reconcile()
    running = {"state": {"running": {"startedAt": timestamp(NOW - 60)}}, "ready": False}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(NOW - 4)}
    store.pods = [pod_body(conditions=[unready], containerStatuses=[running])]
    ports.hung = Hung(NOW - 20, "the engine process is hung: no step since then")
    another = Reconciler(context, "default", "demo")
    another.see(body())
    for _ in range(3):
        await another.reconcile()
    [ready] = [c for c in store.statuses[-1]["conditions"] if c["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "Hung")
    assert ready["message"] == "pod demo-1: Hung: the engine process is hung: no step since then"
    assert len({e["metadata"]["name"] for e in store.events if e["reason"] == "Hung"}) == 1
