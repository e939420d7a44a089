"""Claims on the reconciler: what it believes of children that come, go and are somebody else's."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from sluice_operator import reconcile
from sluice_operator.cluster import Cluster, Ref
from sluice_operator.metrics import create_metrics
from sluice_operator.reconcile import Context, Reconciler
from sluice_operator.scrape import create_client
from sluice_operator.settings import FIELD_MANAGER
from unit.operator.objects import changed, valid_object
from unit.operator.observations import NOW, SETTINGS

WATCHED = ("ConfigMap", "Service", "Deployment")
Key = tuple[str, str]


class Store(Cluster):
    """Objects by kind and name; the watch shows what is there the moment it is."""

    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.num_writes = 0
        self.events: list[Any] = []
        self.after_write: Callable[[str], None] = lambda kind: None

    async def get(self, ref: Ref) -> Any:
        return self.objects.get((ref.kind, ref.name))

    async def uids(self, ref: Ref, label: str = "") -> frozenset[str]:
        if ref.kind == "InferenceService":
            return frozenset({"uid-1"})
        return frozenset(
            body["metadata"]["uid"] for (kind, _), body in self.objects.items() if kind == ref.kind
        )

    async def create_once(self, manifest: Any) -> bool:
        self.events.append(manifest)
        return True

    async def apply(
        self, manifest: Any, subresource: str = "", manager: str = FIELD_MANAGER
    ) -> dict[str, Any]:
        assert manager == FIELD_MANAGER
        self.num_writes += 1
        live: dict[str, Any] = json.loads(json.dumps(manifest))
        if subresource:
            live["metadata"] |= {"uid": "uid-1", "resourceVersion": "0"}
            return live
        key = manifest["kind"], manifest["metadata"]["name"]
        before = self.objects.get(key)
        uid = before["metadata"]["uid"] if before else f"made-{self.num_writes}"
        live["metadata"] |= {"uid": uid, "resourceVersion": str(self.num_writes)}
        self.objects[key] = live
        self.after_write(manifest["kind"])
        return live

    def watched(self, kind: str, namespace: str, owner: str) -> list[Any]:
        return [body for (of, _), body in self.objects.items() if of == kind and kind in WATCHED]


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
def reconciler(store: Store) -> Reconciler:
    context = Context(SETTINGS, store, create_client(), create_metrics(), store.watched)
    made = Reconciler(context, "default", "demo")
    made.see(body())
    return made


async def test_a_child_that_goes_while_it_is_written_is_made_again(
    store: Store, reconciler: Reconciler
) -> None:
    await reconciler.reconcile()

    def lose(kind: str) -> None:
        if kind == "Deployment":
            store.after_write = lambda kind: None
            gone = store.objects.pop(("Deployment", "demo"))
            reconciler.child_deleted("Deployment", gone["metadata"]["uid"])

    store.after_write = lose
    reconciler.see(body(2, replicas=2))
    await reconciler.reconcile()
    assert ("Deployment", "demo") not in store.objects
    await reconciler.reconcile()
    assert store.objects[("Deployment", "demo")]["spec"]["replicas"] == 2


async def test_a_child_that_went_unseen_right_after_it_was_written_is_found_missing(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await reconciler.reconcile()
    del store.objects[("Deployment", "demo")]
    await reconciler.reconcile()
    assert ("Deployment", "demo") not in store.objects, "no watch has told"
    monkeypatch.setattr(reconcile, "_SWEEP_RESYNCS", 0)
    await reconciler.reconcile()
    assert ("Deployment", "demo") in store.objects


async def test_the_token_of_another_s_secret_is_not_ours(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an object that was just deleted and made again, or of anybody."""
    clock = [NOW]
    monkeypatch.setattr("sluice_operator.reconcile.time.time", lambda: clock[0])
    key = ("Secret", "demo-admin")
    meta = {"name": "demo-admin", "uid": "old", "resourceVersion": "1"}
    store.objects[key] = {"kind": "Secret", "metadata": meta, "data": {"token": "Zm9yZWlnbg=="}}
    await reconciler.reconcile()
    assert list(store.objects) == [key]
    del store.objects[key]
    clock[0] += 5
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
