"""Claims on what is kept of what the watches show: nothing of others', of pods what is read."""

from __future__ import annotations

from typing import Any

import pytest
from sluice_operator.children.manifests import INSTANCE_LABEL
from sluice_operator.cluster.observed import essence_of, pod_of
from sluice_operator.loop import child_store
from sluice_operator.loop.child_store import MAX_PODS, Seen
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
def held() -> Seen:
    made = Seen()
    made.open(DEMO)
    made.end_list(DEMO)
    return made


def pods(held: Seen, name: str = "demo") -> list[str]:
    return [body["metadata"]["uid"] for body in held.of("Pod", "default", name)]


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_of_each_kind_the_one_of_our_name_is_kept(held: Seen, kind: str, name: str) -> None:
    for others in (f"{name}-copy", f"copy-{name}", "demo" if kind == "ConfigMap" else "x"):
        assert held.show(kind, child(others, "uid-2")) == set()
    assert list(held.of(kind, *DEMO)) == []
    assert held.show(kind, child(name)) == {DEMO}
    assert [body["metadata"]["name"] for body in held.of(kind, *DEMO)] == [name]
    assert held.lose(kind, child(name, "uid-of-a-former-one")) == {DEMO}
    assert list(held.of(kind, *DEMO)), "it was made again before that was told"
    assert held.lose(kind, child(name)) == {DEMO}
    assert list(held.of(kind, *DEMO)) == []


def test_of_objects_that_are_not_looked_after_nothing_is_kept(held: Seen) -> None:
    assert held.show("Service", child("other")) == held.show("Pod", pod("a", "other")) == set()
    assert held.lose("Service", child("other")) == held.lose("Pod", pod("a", "other")) == set()
    held.open(OTHER)
    assert held.show("Service", child("other")) == held.show("Pod", pod("a", "other")) == {OTHER}
    held.close(OTHER)
    held.open(OTHER)
    assert [*held.of("Service", *OTHER), *held.of("Pod", *OTHER)] == []
    assert held._key_of == {}


def test_what_a_late_list_says_takes_nothing_back(held: Seen) -> None:
    held.show("Service", child("demo", version=7, spec="new"))
    held.show("Service", child("demo", version=5, spec="old"))
    [kept] = held.of("Service", *DEMO)
    assert kept["spec"] == "new"
    held.show("Pod", pod("a", version=7))
    held.list_pod(DEMO, pod("a", version=5))
    [kept] = held.of("Pod", *DEMO)
    assert kept["metadata"]["resourceVersion"] == "7"


def test_a_pod_whose_label_is_edited_is_the_other_object_s(held: Seen) -> None:
    held.show("Pod", pod("a"))
    assert held.show("Pod", pod("a", "nobody")) == {DEMO}
    assert pods(held) == []
    held.open(OTHER)
    held.show("Pod", pod("a"))
    assert held.show("Pod", pod("a", "other")) == {DEMO, OTHER}
    assert (pods(held), pods(held, "other")) == ([], ["a"])
    assert held.lose("Pod", pod("a")) == {OTHER}
    assert pods(held, "other") == []


def test_pods_are_no_more_than_an_object_may_have(
    held: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_PODS >= 2000
    monkeypatch.setattr(child_store, "MAX_PODS", 3)
    for number in range(5):
        held.show("Pod", pod(str(number)))
    assert pods(held) == ["0", "1", "2"]
    held.show("Pod", pod("1", version=2))
    held.lose("Pod", pod("0"))
    held.list_pod(DEMO, pod("7"))
    assert pods(held) == ["1", "2", "7"]


def test_a_pod_that_goes_while_it_is_listed_is_not_there() -> None:
    held = Seen()
    held.open(DEMO)
    held.show("Pod", pod("a"))
    held.lose("Pod", pod("a"))
    held.lose("Pod", pod("b"))
    for uid in "abc":
        held.list_pod(DEMO, pod(uid))
    held.end_list(DEMO)
    assert pods(held) == ["c"]
    held.lose_pod("c")
    held.lose_pod("unknown")
    assert pods(held) == []
    held.close(DEMO)
    held.list_pod(DEMO, pod("d"))
    held.end_list(DEMO)
    assert held._of == {}


def test_of_a_pod_no_more_is_kept_than_is_read() -> None:
    made = pod("a")
    made["spec"] = {"volumes": []}
    made["metadata"] |= {"managedFields": [{}], "annotations": {"a": "b"}}
    made["metadata"]["labels"]["team"] = "search"
    made["status"]["conditions"] += [{"type": str(number), "x": "y"} for number in range(1000)]
    made["status"]["containerStatuses"] = [{"ready": True, "image": "x", "state": {"waiting": {}}}]
    made["status"]["podIPs"] = ["10.0.0.7"] * 1000
    kept = essence_of(made)
    assert kept.keys() == {"metadata", "status"}
    assert kept["metadata"].keys() <= {
        "name", "uid", "resourceVersion", "creationTimestamp", "labels",
    }  # fmt: skip
    assert kept["metadata"]["labels"] == {"pod-template-hash": "5d4f"}
    assert len(kept["status"]["conditions"]) == 64
    assert kept["status"]["containerStatuses"] == [{"ready": True, "state": {"waiting": {}}}]
    assert "podIPs" not in kept["status"]
    assert essence_of(kept) == kept
    assert pod_of(kept, NOW) == pod_of(made, NOW)
