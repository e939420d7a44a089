"""Claims on what is kept of what the watches show: nothing of others', of pods what is read."""

from __future__ import annotations

from typing import Any

import pytest
from sluice_operator.children.manifests import INSTANCE_LABEL, owner_of
from sluice_operator.cluster import child_store
from sluice_operator.cluster.child_store import MAX_PODS, ChildStore, Key
from sluice_operator.cluster.observed import essence_of, pod_of
from unit.operator.observations import NOW, pod_body

Object = dict[str, Any]
DEMO, OTHER = ("default", "demo"), ("default", "other")
KINDS = {"ConfigMap": "demo-runtime", "Service": "demo", "Deployment": "demo"}


def child(name: str, uid: str = "uid-1", version: int = 1, **more: Any) -> Object:
    meta = {"name": name, "namespace": "default", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": meta, **more}


def pod(uid: str, owner: str = "demo", version: int = 1) -> Object:
    made = pod_body(uid)
    meta = {"namespace": "default", "resourceVersion": str(version), "uid": uid}
    made["metadata"] |= {**meta, "labels": {INSTANCE_LABEL: owner, "pod-template-hash": "5d4f"}}
    return made


@pytest.fixture
def held() -> ChildStore:
    made = ChildStore()
    made.open(DEMO)
    return made


def show(held: ChildStore, kind: str, body: Object) -> set[Key]:
    return held.show(owner_of(kind, body), kind, body)


def lose(held: ChildStore, kind: str, body: Object) -> set[Key]:
    return held.lose(owner_of(kind, body), kind, body)


def pods(held: ChildStore, name: str = "demo") -> list[str]:
    return [body["metadata"]["uid"] for body in held.pods(("default", name))]


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_of_each_kind_the_one_of_our_name_is_kept(held: ChildStore, kind: str, name: str) -> None:
    for others in (f"{name}-copy", f"copy-{name}", "demo" if kind == "ConfigMap" else "x"):
        assert show(held, kind, child(others, "uid-2")) == set()
    assert held.child(DEMO, kind) is None
    assert show(held, kind, child(name)) == {DEMO}
    assert (held.child(DEMO, kind) or {})["metadata"]["name"] == name
    assert lose(held, kind, child(name, "uid-of-a-former-one")) == {DEMO}
    assert held.child(DEMO, kind), "it was made again before that was told"
    assert lose(held, kind, child(name)) == {DEMO}
    assert held.child(DEMO, kind) is None


def test_what_was_written_is_read_before_the_watch_shows_it_and_not_after_it_is_gone(
    held: ChildStore,
) -> None:
    show(held, "Service", child("demo", version=1))
    held.keep(DEMO, "Service", child("demo", version=5, spec="written"))
    show(held, "Service", child("demo", version=3))
    assert (held.child(DEMO, "Service") or {})["spec"] == "written"
    lose(held, "Service", child("demo", version=6))
    held.keep(DEMO, "Service", child("demo", version=5, spec="written"))
    assert held.child(DEMO, "Service") is None
    show(held, "Service", child("demo", version=7))
    assert held.child(DEMO, "Service"), "its label was put back"


def test_what_is_lost_is_told_to_the_object_that_had_it(held: ChildStore) -> None:
    owned = child("demo")
    owned["metadata"]["ownerReferences"] = [{"uid": "of-demo", "controller": True}]
    show(held, "Service", owned)
    assert held.lost(DEMO, "of-demo") == set()
    lose(held, "Service", owned)
    assert held.lost(DEMO, "of-demo") == {"Service"}
    assert held.lost(DEMO, "of-its-successor") == set()


def test_of_objects_that_are_not_looked_after_nothing_is_kept(held: ChildStore) -> None:
    assert show(held, "Service", child("other")) == show(held, "Pod", pod("a", "other")) == set()
    assert lose(held, "Service", child("other")) == lose(held, "Pod", pod("a", "other")) == set()
    held.open(OTHER)
    assert show(held, "Service", child("other")) == show(held, "Pod", pod("a", "other")) == {OTHER}
    held.close(OTHER)
    held.open(OTHER)
    assert (held.child(OTHER, "Service"), pods(held, "other")) == (None, [])
    assert held._key_of == {}


def test_what_a_late_list_says_takes_nothing_back(held: ChildStore) -> None:
    show(held, "Service", child("demo", version=7, spec="new"))
    show(held, "Service", child("demo", version=5, spec="old"))
    assert (held.child(DEMO, "Service") or {})["spec"] == "new"
    show(held, "Pod", pod("a", version=7))
    show(held, "Pod", pod("a", version=5))
    [kept] = held.pods(DEMO)
    assert kept["metadata"]["resourceVersion"] == "7"


def test_a_pod_whose_label_is_edited_is_the_other_object_s(held: ChildStore) -> None:
    show(held, "Pod", pod("a"))
    assert show(held, "Pod", pod("a", "nobody")) == {DEMO}
    assert pods(held) == []
    held.open(OTHER)
    show(held, "Pod", pod("a"))
    assert show(held, "Pod", pod("a", "other")) == {DEMO, OTHER}
    assert (pods(held), pods(held, "other")) == ([], ["a"])
    assert lose(held, "Pod", pod("a")) == {OTHER}
    assert pods(held, "other") == []


def test_pods_are_no_more_than_an_object_may_have(
    held: ChildStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_PODS >= 2000
    monkeypatch.setattr(child_store, "MAX_PODS", 3)
    for number in range(5):
        show(held, "Pod", pod(str(number)))
    assert pods(held) == ["0", "1", "2"]
    show(held, "Pod", pod("1", version=2))
    lose(held, "Pod", pod("0"))
    show(held, "Pod", pod("7"))
    assert pods(held) == ["1", "2", "7"]


def test_of_a_pod_no_more_is_kept_than_is_read() -> None:
    made = pod("a")
    made["spec"] = {"volumes": []}
    made["metadata"] |= {"managedFields": [{}], "annotations": {"a": "b"}}
    made["metadata"]["labels"]["team"] = "search"
    kept = essence_of(made)
    assert kept.keys() == {"metadata", "status"}
    assert kept["metadata"].keys() <= {
        "name", "uid", "resourceVersion", "creationTimestamp", "labels",
    }  # fmt: skip
    assert kept["metadata"]["labels"] == {"pod-template-hash": "5d4f"}
    assert essence_of(kept) == kept
    assert pod_of(kept, NOW) == pod_of(made, NOW)
