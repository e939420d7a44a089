"""Claims on a status that the API server refuses: of an older CRD, or for good."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from sluice_core.errors import timestamp
from sluice_operator.cluster.client import ClusterError
from sluice_operator.loop.reconcile import Reconciler
from sluice_operator.status import writer as status_writer
from sluice_operator.status.schema import STATUS
from sluice_operator.status.trim import prune_status
from sluice_operator.status.write_limiter import Turns
from sluice_operator.status.writer import StatusWriter
from unit.operator.loop.test_reconciler import (
    Clock,
    Store,
    body,
    clock,
    context,
    ports,
    reconciler,
    store,
)
from unit.operator.observations import NOW
from unit.operator.status.test_write_limiter import Clock as Seconds

__all__ = ["clock", "context", "ports", "reconciler", "store"]


def older_schema() -> dict[str, Any]:
    """A CRD that knows no `url` and no cap that ends bound."""
    older: dict[str, Any] = copy.deepcopy(STATUS)
    del older["properties"]["url"]
    older["properties"]["batching"]["properties"]["limitedBy"]["enum"].remove("EndToEnd")
    return older


def refuse_what_is_newer(store: Store) -> None:
    store.schema = older_schema()

    def refusal(status: Any) -> ClusterError | None:
        _, unknown = prune_status(status, store.schema)
        return ClusterError(500, "Unknown", f".{unknown[0]}: not in schema") if unknown else None

    store.status_refusal = refusal


def test_fields_and_words_that_the_crd_does_not_know_are_left_out_and_named() -> None:
    batching = {"limitedBy": "EndToEnd", "epoch": 3}
    met = {"type": "SLOMet", "status": "True"}
    wanted = {"url": "http://demo", "batching": batching, "conditions": [met]}
    known, unknown = prune_status(wanted, older_schema())
    assert known == {"batching": {"epoch": 3}, "conditions": [met]}
    assert unknown == ("status.url", "status.batching.limitedBy")
    assert prune_status(wanted, STATUS) == (wanted, ())
    assert prune_status(wanted, {}) == (wanted, ())


async def test_an_older_crd_gets_what_it_knows_of_the_status(
    store: Store, reconciler: Reconciler
) -> None:
    """Not a word of it was written: `kubectl get` showed what an older operator had seen last."""
    refuse_what_is_newer(store)
    for generation in (1, 2, 3):
        reconciler.see(body(generation, replicas=generation))
        await reconciler.reconcile()
    newest = store.statuses[-1]
    assert "url" not in newest
    assert newest["observedGeneration"] == 3
    assert store.num_schemas == 1
    [told] = [event for event in store.events if event["reason"] == "CRDOutdated"]
    assert "status.url" in told["message"]


async def test_an_upgraded_crd_gets_all_of_it(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = Clock()
    monkeypatch.setattr(status_writer, "time", seconds)
    refuse_what_is_newer(store)
    await reconciler.reconcile()
    store.schema = STATUS
    seconds.running_s += 600
    await reconciler.reconcile()
    assert store.statuses[-1]["url"] == "http://demo.default.svc"


async def test_what_is_refused_for_another_reason_stays_refused(
    store: Store, reconciler: Reconciler
) -> None:
    store.schema = STATUS
    store.status_refusal = lambda _: ClusterError(500, "InternalError", "webhook is down")
    with pytest.raises(ClusterError, match="webhook is down"):
        await reconciler.reconcile()
    assert store.statuses == []


async def test_a_status_that_cannot_be_written_is_told_once(
    store: Store, reconciler: Reconciler, clock: Clock
) -> None:
    """Each pass took its conditions for news: an event a minute for each object, without end."""
    store.status_refusal = lambda _: ClusterError(403, "Forbidden", "no right")
    reconciler.see(body(2, **{"model.uri": 7}))
    for _ in range(5):
        with pytest.raises(ClusterError, match="no right"):
            await reconciler.reconcile()
        clock.wall_s += 60
    assert [event["reason"] for event in store.events] == ["InvalidSpec"]
    store.status_refusal = lambda _: None
    await reconciler.reconcile()
    assert store.statuses[-1]["conditions"][0]["lastTransitionTime"] == timestamp(NOW)
    assert [event["reason"] for event in store.events] == ["InvalidSpec"]


async def test_a_schema_that_cannot_be_read_hides_no_refusal(store: Store) -> None:
    async def forbidden() -> dict[str, Any]:
        raise ClusterError(403, "Forbidden", "no discovery")

    store.status_schema = forbidden  # type: ignore[method-assign]
    store.status_refusal = lambda _: ClusterError(422, "Invalid", "limitedBy")
    writer = StatusWriter(store, Turns(Seconds()))
    with pytest.raises(ClusterError, match="limitedBy"):
        await writer.write(body(), {"conditions": [], "replicas": 1})
