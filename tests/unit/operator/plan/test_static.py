"""Claims on an object of static batches: its cap, its order, its pods and its replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sluice_core.contract import StepModel, Waiting
from sluice_operator.children import manifests, pod
from sluice_operator.children.runtime import DecidedRuntime
from sluice_operator.model.checkpoint import Unread
from sluice_operator.model.fit import judge
from sluice_operator.plan.plan import plan
from sluice_operator.plan.tune import effective_ceiling, limits_of
from sluice_operator.reasons import Reason
from sluice_operator.tuner import Past, decide
from unit.operator.objects import static_batches
from unit.operator.observations import (
    NOW,
    SETTINGS,
    create_observed,
    create_pod,
    create_scrape,
    create_service,
)
from unit.operator.tuner.made import LIMITS, gaps, late, observation, tick
from unit.operator.tuner.made import pod as a_pod

STATIC = {"batching": static_batches(8)}
FIXED = replace(LIMITS, ceiling=8, min_num_seqs=8, ceiling_by="User", is_fixed=True)
STEEP = StepModel(5.0, 6.0, 0.0, 0.05, 1000, 1.05)
"""A full cap of 8 takes over 50 ms, and one alone does not."""


def _args(**changes: Any) -> list[str]:
    made = manifests.workload(create_service(**changes), SETTINGS, ceiling=8, replicas=1, live=None)
    args: list[str] = made["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_the_worker_gets_its_three_flags_only_where_batches_are_static() -> None:
    static = [arg for arg in _args(**STATIC) if "batch" in arg and "static" in arg]
    assert static == [
        "--batching-mode=static",
        "--static-batch-size=8",
        "--static-batch-timeout-ms=100",
    ]
    assert not [arg for arg in _args() if "static" in arg]


def test_a_wait_that_is_left_out_is_the_workers_own() -> None:
    args = _args(batching={"mode": "Static", "static": {"size": 8}})
    assert [arg for arg in args if "static" in arg] == [
        "--batching-mode=static",
        "--static-batch-size=8",
    ]


def test_an_edit_of_mode_size_or_wait_takes_new_pods_and_nothing_else_does() -> None:
    asked = [
        create_service(**changes)
        for changes in (
            {},
            STATIC,
            {"batching": static_batches(9)},
            {"batching": static_batches(8, "1s")},
        )
    ]
    digests = [manifests.digest(pod.inputs(service, SETTINGS)) for service in asked]
    assert len(set(digests)) == len(digests)
    assert "static" not in pod.inputs(asked[0], SETTINGS)


def test_static_batches_are_of_those_that_came_first() -> None:
    assert create_service().spec.scheduling_policy == "deadline"
    assert create_service(**STATIC).spec.scheduling_policy == "fcfs"


@pytest.mark.parametrize("is_read", [True, False])
def test_the_first_cap_is_the_size(is_read: bool) -> None:
    service = create_service(**STATIC)
    seen = create_observed(service)
    if not is_read:
        seen = replace(seen, fit=judge(service.spec, Unread("the hub is away")))
    planned = plan(service, seen, SETTINGS, NOW)
    assert planned.runtime is not None
    assert planned.runtime.cap == 8
    batching: Any = planned.status["batching"]
    assert (batching["mode"], batching["ceiling"], batching["cap"]) == ("Static", 8, 8)
    assert batching["reason"] == "StaticBatch"


@pytest.mark.parametrize("mode", ["Enforce", "Advisory"])
@pytest.mark.parametrize(("cap", "ceiling"), [(20, 64), (3, 64), (20, 5)])
def test_an_edit_to_static_moves_the_cap_to_the_size_that_memory_holds(
    mode: str, cap: int, ceiling: int
) -> None:
    """Pods of an older spec still run then, with their own ceiling."""
    service = create_service(**STATIC, slo__mode=mode)
    one = create_pod()
    seen = create_observed(
        service,
        pods=(one,),
        scrapes={one.uid: create_scrape(cap=min(cap, ceiling), ceiling=ceiling)},
        runtime=DecidedRuntime(1, cap, 1),
    )
    planned = plan(service, seen, SETTINGS, NOW)
    assert planned.runtime is not None
    assert (planned.runtime.epoch, planned.runtime.cap) == (2, min(8, ceiling))
    assert [notice.reason for notice in planned.decided] == [Reason.WITHIN_LIMITS]
    again = plan(service, replace(seen, runtime=planned.runtime), SETTINGS, NOW)
    assert again.runtime is not None
    assert (again.runtime.epoch, again.decided) == (2, ())


def test_the_limits_of_static_batches_are_one_number() -> None:
    service = create_service(**STATIC)
    ceiling = effective_ceiling(service.spec, create_observed(service))
    limits = limits_of(service.spec, ceiling)
    assert (limits.min_num_seqs, limits.ceiling, limits.ceiling_by) == (8, 8, "User")
    assert limits.is_fixed
    assert not limits_of(create_service().spec, 8).is_fixed


def test_late_requests_of_full_batches_add_a_pod() -> None:
    ticks = [
        tick(seq, arrivals=60, ttft=late(60, 30), waiting=Waiting(cap=40 * seq))
        for seq in range(1, 41)
    ]
    seen = observation(a_pod("a", ticks, model=STEEP), limits=FIXED)
    _, decision = decide(Past(), seen)
    assert (decision.cap, decision.cap_reason) == (8, "")
    assert decision.replicas_move.reason == Reason.SCALED_OUT


def test_gaps_that_a_smaller_batch_would_hold_are_told_so_and_hold_up_no_pod() -> None:
    ticks = [
        tick(seq, arrivals=60, itl=gaps(1000, 500), ttft=late(60, 30), waiting=Waiting(40 * seq))
        for seq in range(1, 41)
    ]
    seen = observation(a_pod("a", ticks, model=STEEP), limits=FIXED)
    _, decision = decide(Past(), seen)
    assert decision.cap == 8
    assert decision.limited_by == "User"
    assert decision.slo_feasible.holds
    assert "a smaller batching.static.size" in decision.slo_feasible.message
    assert decision.replicas_move.to > seen.replicas
