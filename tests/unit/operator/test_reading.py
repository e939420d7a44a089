"""What a reconciler makes of a model that is slow to read, or cannot be read any more."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from sluice_operator import children, reconcile
from sluice_operator.checkpoint import Checkpoint, Unread
from sluice_operator.cluster import Cluster
from sluice_operator.fit import Refused
from sluice_operator.metrics import create_metrics
from sluice_operator.reconcile import Context, Found, Reconciler
from sluice_operator.scrape import create_client
from sluice_operator.spec import InferenceService
from unit.operator.observations import CHECKPOINT, NOW, SETTINGS, create_pod, create_service

SERVING, GONE = (create_pod(),), ()
REFUSED = Refused("the repository is gated")


class Model:
    """What reading it finds, once it may."""

    def __init__(self, found: Found) -> None:
        self.found = found
        self.may_end = threading.Event()
        self.may_end.set()

    def read(self, *_: Any) -> Found:
        assert self.may_end.wait(30)
        return self.found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model(CHECKPOINT)
    monkeypatch.setattr(reconcile, "_read_checkpoint", made.read)
    monkeypatch.setattr(reconcile, "_SERVING_WAIT_S", 0.01)
    return made


class NoCluster(Cluster):
    """Nothing is there but what the watch has told."""

    def __init__(self) -> None:
        pass

    async def get(self, *_: Any) -> None:
        return None


def reconciler(rolled_out: InferenceService | None) -> Reconciler:
    """A new operator's; the Deployment is of `rolled_out`."""

    def watched(kind: str, namespace: str, owner: str) -> list[dict[str, Any]]:
        if kind != "Deployment" or rolled_out is None:
            return []
        made = children.deployment(rolled_out, SETTINGS, ceiling=8, replicas=1, live=None)
        live = json.loads(json.dumps(made))
        live["metadata"] |= {"uid": "uid-2", "resourceVersion": "5"}
        return [live]

    return Reconciler(
        Context(SETTINGS, NoCluster(), create_client(), create_metrics(), watched),
        "default",
        "demo",
    )


async def found(by: Reconciler, service: InferenceService, pods: Any, now: float = NOW) -> Found:
    return await by._checkpoint(service, pods, now)


async def test_what_serves_waits_for_no_model_and_is_not_rolled_out_unread(model: Model) -> None:
    asked = create_service(model__uri="hf://org/new")
    by = reconciler(create_service())
    model.may_end.clear()
    assert await found(by, asked, SERVING) == Unread("the model is being read", is_pending=True)
    model.may_end.set()
    async with asyncio.timeout(30):
        while (seen := await found(by, asked, SERVING)) != CHECKPOINT:
            assert isinstance(seen, Unread)
            assert seen.is_pending
    assert await found(by, asked, SERVING) == CHECKPOINT


async def test_a_model_without_pods_is_waited_for(model: Model) -> None:
    by = reconciler(None)
    model.may_end.clear()
    reading = asyncio.create_task(found(by, create_service(), GONE))
    done, _ = await asyncio.wait({reading}, timeout=0.1)
    assert not done
    model.may_end.set()
    assert isinstance(await reading, Checkpoint)


async def test_what_was_refused_stays_so_while_it_is_read_again(model: Model) -> None:
    asked, by = create_service(model__uri="hf://org/gated"), reconciler(create_service())
    model.found = REFUSED
    assert await found(by, asked, GONE) == REFUSED
    model.may_end.clear()
    assert await found(by, asked, SERVING, NOW + 1000) == REFUSED
    model.may_end.set()


async def test_a_new_operator_rolls_nothing_out_that_was_refused(model: Model) -> None:
    model.found = REFUSED
    by = reconciler(create_service())
    asked = create_service(model__uri="hf://org/gated")
    assert await found(by, asked, SERVING) == REFUSED


async def test_what_serves_is_looked_after_though_its_model_is_refused_now(model: Model) -> None:
    service = create_service()
    by = reconciler(service)
    model.found = REFUSED
    for pods, hours in ((SERVING, 0), (SERVING, 1), (GONE, 1), (SERVING, 2)):
        seen = await found(by, service, pods, NOW + 3600 * hours)
        if pods:
            assert seen == Unread(REFUSED.message, is_pending=True)
    upgraded = create_service(engine__image="registry/worker:2")
    assert isinstance(await found(by, upgraded, SERVING, NOW + 4 * 3600), Unread)
    model.found = CHECKPOINT
    assert await found(by, upgraded, SERVING, NOW + 5 * 3600) == CHECKPOINT
