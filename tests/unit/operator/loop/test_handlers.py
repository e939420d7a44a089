"""Claims on watch events: objects that come and go, and children that leave the watch."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest
from sluice_operator.children.runtime import OWNER_ANNOTATION
from sluice_operator.cluster.client import LIVE_PODS
from sluice_operator.loop.dependencies import Dependencies
from sluice_operator.loop.handlers import Operator, configure, create_registry
from sluice_operator.loop.reconcile import Reconciler
from sluice_operator.metrics import Metrics
from sluice_operator.pods.scrape import create_client
from unit.operator.loop.test_reconciler import Children, Store, body
from unit.operator.observations import SETTINGS, pod_body

KEY = ("default", "demo")


def create_context(store: Store, operator: Operator, instance: str = "one") -> Dependencies:
    settings = replace(SETTINGS, instance=instance)
    return Dependencies(settings, store, create_client(), Metrics(), operator.store)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """Whose reconcilers pass only when a test says so."""

    async def run(self: Reconciler) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Reconciler, "run", run)
    return Operator(SETTINGS)


def child_body(child: dict[str, Any]) -> kopf.Body:
    return kopf.Body(cast(kopf.RawBody, child))


def another(uid: str) -> dict[str, Any]:
    """The object, made again with a new uid."""
    made = body(2)
    made["metadata"]["uid"] = uid
    return made


async def test_a_late_deletion_does_not_take_the_object_that_came_after(operator: Operator) -> None:
    """kopf tells of each uid in a task of its own."""
    context = create_context(Store(), operator)
    operator.see(context, KEY, body())
    operator.see(context, KEY, another("uid-2"))
    await operator.forget(KEY, "uid-1")
    assert not operator.tasks[KEY].done()
    await operator.forget(KEY, "uid-2")
    assert (operator.tasks, operator.reconcilers) == ({}, {})


async def test_a_task_that_has_ended_is_told_and_replaced(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def end(self: Reconciler) -> None:
        raise OverflowError("too large")

    context = create_context(Store(), operator)
    with monkeypatch.context() as faulty:
        faulty.setattr(Reconciler, "run", end)
        operator.see(context, KEY, body())
        await asyncio.wait([operator.tasks[KEY]])
        await asyncio.sleep(0)
    assert "default/demo: its task has ended" in caplog.text
    assert "too large" in caplog.text
    operator.see(context, KEY, body(2))
    assert not operator.tasks[KEY].done()
    await operator.forget(KEY, "uid-1")


async def test_an_object_whose_deletion_the_watch_missed_is_let_go() -> None:
    operator, store = Operator(SETTINGS), Store()
    context = create_context(store, operator)
    operator.see(context, KEY, body())
    assert operator.shown() == []
    await operator.reconcilers[KEY].reconcile()
    [shown] = operator.shown()
    assert (shown.namespace, shown.name, shown.status) == (*KEY, store.statuses[-1])
    store.is_deleted = True
    context.roster._taken.clear()  # it is time to look
    operator.reconcilers[KEY].wake()
    async with asyncio.timeout(10):
        await asyncio.wait([operator.tasks[KEY]])
    assert (operator.tasks, operator.reconcilers, operator.shown()) == ({}, {}, [])


def test_nothing_that_bears_our_label_is_kept_by_kopf_or_waited_for(operator: Operator) -> None:
    """Anybody may make ten thousand such objects, or three hundred of a MiB each: kopf's indices
    hold all of them, and take a time that grows with the square of their number."""
    settings = kopf.OperatorSettings()
    configure(settings)
    registry = create_registry(operator)
    assert list(registry._indexing.get_all_handlers()) == []
    assert settings.watching.chunk_size == 10
    assert settings.queueing.idle_timeout < 1
    essence = settings.persistence.diffbase_storage.build(body=child_body(pod_body()))
    assert settings.persistence.progress_storage.clear(essence=essence) == {}


def pod_of_demo(name: str, version: int = 1) -> dict[str, Any]:
    pod = pod_body(name)
    pod["metadata"] |= {"namespace": "default", "resourceVersion": str(version)}
    return pod


async def test_a_child_wakes_its_own_object_only(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = list[str]()
    monkeypatch.setattr(Reconciler, "wake", lambda self: woken.append(self._name))
    context = create_context(Store(), operator)
    operator.see(context, KEY, body())
    woken.clear()
    named = {"namespace": "default", "uid": "uid-7", "resourceVersion": "1"}
    for is_gone in (False, True):
        for name in ("demo-runtime", "other-runtime", "demo-runtime-copy"):
            copy = {"metadata": {**named, "name": name}}
            operator.see_child("ConfigMap", copy, is_gone=is_gone)
        assert woken == ["demo"] * (1 + is_gone)
    operator.see_child("Pod", pod_of_demo("a"), is_gone=False)
    operator.see_child("Pod", pod_of_demo("a"), is_gone=True)
    assert woken == ["demo"] * 4
    await operator.forget(KEY, "uid-1")


def test_pods_that_have_ended_are_not_watched() -> None:
    """Of 12,500 that a node has refused, kopf's start would take half an hour and a gigabyte."""
    settings = kopf.OperatorSettings()
    configure(settings)
    assert settings.watching.field_selectors["v1", "pods"] == LIVE_PODS


async def test_a_child_whose_label_is_put_back_is_seen_again(operator: Operator) -> None:
    """Else its ConfigMap says of an object that it is nobody's, and it changes hands."""
    store = Store()
    one = Reconciler(replace(create_context(store, operator), store=Children(store)), *KEY)
    one.see(body())
    await one.reconcile()
    operator.see(create_context(store, operator, "two"), KEY, body())
    held = "ConfigMap", "demo-runtime"
    for is_gone in (True, False):
        operator.see_child("ConfigMap", store.objects[held], is_gone=is_gone)
    await operator.reconcilers[KEY].reconcile()
    assert store.objects[held]["metadata"]["annotations"][OWNER_ANNOTATION] == "one"
    await operator.forget(KEY, "uid-1")


async def test_children_that_go_with_a_former_object_are_not_told_as_deleted(
    operator: Operator,
) -> None:
    store = Store()
    context = create_context(store, operator)
    operator.see(context, KEY, body())
    await operator.reconcilers[KEY].reconcile()
    operator.see(context, KEY, another("uid-2"))
    for (kind, _), child in json.loads(json.dumps(list(store.objects.items()))):
        if kind in ("ConfigMap", "Service", "Deployment"):
            operator.see_child(kind, child, is_gone=True)
    store.objects.clear()
    await operator.reconcilers[KEY].reconcile()
    assert ("Service", "demo") in store.objects
    assert "ChildRestored" not in [event["reason"] for event in store.events]
    await operator.forget(KEY, "uid-2")
