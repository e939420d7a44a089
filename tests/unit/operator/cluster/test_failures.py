"""Claims on when failed pods are listed: there may be thousands, and no new one."""

from __future__ import annotations

from sluice_operator.cluster.failures import FailedPods
from unit.operator.loop.test_reconciler import LABEL, Store
from unit.operator.observations import NOW, create_pod


async def test_failed_pods_are_listed_at_the_start_and_once_more_has_gone() -> None:
    store = Store()
    failures = FailedPods(store, "default", LABEL, every_s=0.0)
    for num_gone, num_looks in ((0, 1), (0, 1), (1, 2), (1, 2), (3, 3)):
        assert await failures.newest((), num_gone, NOW) is None
        assert store.num_looks == num_looks
    await failures.newest((create_pod(),), 4, NOW)
    assert store.num_looks == 3, "a pod serves"
