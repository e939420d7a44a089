"""Claims on watch events: objects that come and go, and children that leave the watch."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any, cast

import kopf
import pytest
from sluice_operator.cluster import LIVE_PODS
from sluice_operator.handlers import Operator, configure, create_registry
from sluice_operator.metrics import Metrics
from sluice_operator.namespaces import Namespaces
from sluice_operator.reconcile import Context, Reconciler
from sluice_operator.runtime import OWNER_ANNOTATION
from sluice_operator.scrape import create_client
from unit.operator.observations import SETTINGS, pod_body
from unit.operator.test_reconciler import Store, body

KEY = ("default", "demo")


def create_context(store: Store, instance: str = "one") -> Context:
    settings = replace(SETTINGS, instance=instance)
    return Context(settings, store, create_client(), Metrics(), store.watched)


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """Whose reconcilers pass only when a test says so."""

    async def run(self: Reconciler) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Reconciler, "run", run)
    return Operator(SETTINGS, Namespaces(()))


def child_body(child: dict[str, Any]) -> kopf.Body:
    return kopf.Body(cast(kopf.RawBody, child))


def another(uid: str) -> dict[str, Any]:
    """The object, made again with a new uid."""
    made = body(2)
    made["metadata"]["uid"] = uid
    return made


async def test_a_late_deletion_does_not_take_the_object_that_came_after(operator: Operator) -> None:
    """kopf tells of each uid in a task of its own."""
    context = create_context(Store())
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

    context = create_context(Store())
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
    operator, store = Operator(SETTINGS, Namespaces(())), Store()
    context = create_context(store)
    operator.see(context, KEY, body())
    await operator.reconcilers[KEY].reconcile()
    store.is_deleted = True
    operator.reconcilers[KEY]._memory.swept_s = -math.inf  # it is time to look
    operator.reconcilers[KEY].wake()
    async with asyncio.timeout(10):
        await asyncio.wait([operator.tasks[KEY]])
    assert (operator.tasks, operator.reconcilers) == ({}, {})


async def test_of_a_pod_the_watch_keeps_no_more_than_is_read(operator: Operator) -> None:
    [index] = [h for h in create_registry(operator)._indexing.get_all_handlers() if h.id == "Pod"]
    pod: dict[str, Any] = {**pod_body(phase="Failed", reason="OutOfcpu"), "spec": {"volumes": []}}
    pod["metadata"] |= {"namespace": "default", "managedFields": [{}]}
    kept = await cast(Any, index.fn)(body=child_body(pod))
    assert kept[KEY].keys() == {"metadata", "status"}
    assert "managedFields" not in kept[KEY]["metadata"]


def test_pods_that_have_ended_are_not_watched() -> None:
    """Of 12,500 that a node has refused, kopf's start would take half an hour and a gigabyte."""
    settings = kopf.OperatorSettings()
    configure(settings)
    assert settings.watching.field_selectors["v1", "pods"] == LIVE_PODS


async def test_a_child_whose_label_is_put_back_is_seen_again(operator: Operator) -> None:
    """Else its ConfigMap says of an object that it is nobody's, and it changes hands."""
    store = Store()
    one = Reconciler(create_context(store, "one"), *KEY)
    one.see(body())
    await one.reconcile()
    operator.see(create_context(store, "two"), KEY, body())
    held = "ConfigMap", "demo-runtime"
    for is_gone in (True, False):
        operator.see_child("ConfigMap", child_body(store.objects[held]), is_gone=is_gone)
    await operator.reconcilers[KEY].reconcile()
    assert store.objects[held]["metadata"]["annotations"][OWNER_ANNOTATION] == "one"
    await operator.forget(KEY, "uid-1")


async def test_children_that_go_with_a_former_object_are_not_told_as_deleted(
    operator: Operator,
) -> None:
    store = Store()
    context = create_context(store)
    operator.see(context, KEY, body())
    await operator.reconcilers[KEY].reconcile()
    operator.see(context, KEY, another("uid-2"))
    for (kind, _), child in json.loads(json.dumps(list(store.objects.items()))):
        if kind in ("ConfigMap", "Service", "Deployment"):
            operator.see_child(kind, child_body(child), is_gone=True)
    store.objects.clear()
    await operator.reconcilers[KEY].reconcile()
    assert ("Service", "demo") in store.objects
    assert "ChildRestored" not in [event["reason"] for event in store.events]
    await operator.forget(KEY, "uid-2")
