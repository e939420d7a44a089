"""Claims on a status that the API server refuses."""

from __future__ import annotations

import pytest
from sluice_core.errors import timestamp
from sluice_operator.cluster.client import ClusterError
from sluice_operator.loop.reconcile import Reconciler
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

__all__ = ["clock", "context", "ports", "reconciler", "store"]


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
