"""Pods that miss what is sent to them, and pods that say nothing, in the simulated world."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from sluice.simulate.pod import SimulatedPod
from sluice_core.contract import TICK_SECONDS
from sluice_operator.tuner import Decision
from unit.operator.tuner.loop import SMALL_CPU, TARGETS, Loop, limits, shaped
from unit.operator.tuner.traces import poisson
from unit.operator.tuner.world import Pod, Route, Shape, World

STALE_S = 12.0
"""Five ticks after its last word, give or take one, a pod is silent."""


def two_thirds_to_the_first(pods: Sequence[SimulatedPod], random: Random) -> SimulatedPod:
    """Clients that keep their connections."""
    return pods[random.random() > 2 / 3]


def deaf_and_hearing(loop: Loop) -> tuple[Pod, Pod]:
    deaf, hearing = loop.world.pods
    deaf.is_deaf = True
    return deaf, hearing


def pair(
    phases: Sequence[tuple[float, float]],
    itl_ms: float,
    cap: int,
    route: Route | None,
    shape: Shape = SMALL_CPU,
) -> Loop:
    targets = replace(TARGETS, itl_ms=itl_ms)
    world = World(shape, targets, poisson(phases), cap=cap, replicas=2, route=route)
    return Loop(world, limits(min_replicas=2, max_replicas=2))


def gaps_of(pods: Sequence[Pod], epoch: int) -> tuple[int, int]:
    """Gaps and those over target, in the settled ticks of `epoch`."""
    ticks = [t for pod in pods for t in pod.ticks if t.epoch == epoch and t.settled]
    return sum(t.itl.n for t in ticks), sum(t.itl.over for t in ticks)


def evidence_of(decision: Decision) -> tuple[int, int]:
    judged = decision.verdicts["interTokenLatency"]
    return judged.epoch_n, judged.epoch_over


def test_a_pod_that_missed_the_lowering_and_breaks_on_lowers_nothing_more() -> None:
    """10/s keep the deaf one at its old cap of 32 over the target; 5/s are little for the other."""
    loop = pair([(100, 15), (60, 9)], 30, 32, two_thirds_to_the_first)
    deaf, hearing = deaf_and_hearing(loop)
    loop.run(110)
    ((lowered_s, lowered, reason),) = loop.cap_changes
    assert reason == "InterTokenLatencyBreached"
    assert (deaf.cap, hearing.cap) == (32, lowered)
    since = [t.itl for t in deaf.ticks if t.t_s > lowered_s]
    assert sum(gaps.over for gaps in since) > 0.1 * sum(gaps.n for gaps in since)
    assert evidence_of(loop.last) == gaps_of([hearing], loop.world.epoch)
    deaf.is_deaf = False
    loop.run(160)
    assert len(loop.cap_changes) == 1
    assert deaf.cap == lowered
    assert gaps_of([deaf], loop.world.epoch)[0] > 1000
    assert evidence_of(loop.last) == gaps_of([deaf, hearing], loop.world.epoch)


def test_a_pod_that_missed_the_raises_asks_for_none_until_it_has_them() -> None:
    """7/s are too much for the deaf one at a cap of 2, and fit into 16 on the other."""
    unmodelled = shaped(reports_model=False)
    loop = pair([(180, 14)], 60, 2, None, unmodelled)
    deaf, hearing = deaf_and_hearing(loop)
    loop.run(120)
    raised = [cap for _, cap, _ in loop.cap_changes]
    assert raised == sorted(set(raised))
    assert (deaf.cap, hearing.cap) == (2, 16)
    assert deaf.num_waiting > 200
    assert evidence_of(loop.last) == gaps_of([hearing], loop.world.epoch)
    deaf.is_deaf = False
    loop.run(180)
    assert [cap for _, cap, _ in loop.cap_changes] == [*raised, 32]  # its queue counts now
    assert evidence_of(loop.last)[0] > gaps_of([hearing], loop.world.epoch)[0]


@pytest.mark.parametrize(("num_silent", "goes_on"), [(1, True), (2, False)])
def test_silent_pods_are_named_and_a_majority_of_them_holds_all_until_heard(
    num_silent: int, goes_on: bool
) -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(40, 3), (100, 24)]), cap=4, replicas=3)
    loop = Loop(world, limits(min_replicas=2, max_replicas=4))
    loop.run(20)
    silent = world.pods[:num_silent]
    for pod in silent:
        pod.is_silent = True
    loop.run(80)
    held = [decision for at, decision in loop.decisions if at > 20 + STALE_S]
    assert {decision.silent_pods for decision in held} == {tuple(pod.name for pod in silent)}
    assert {decision.metrics.holds for decision in held} == {goes_on}
    assert bool(loop.cap_changes) == goes_on
    if not goes_on:
        moves = [move for d in held for move in (d.cap_move, d.replicas_move)]
        assert {move.reason for move in moves} == {"MetricsUnavailable"}
        assert loop.replica_changes == []
    for pod in silent:
        pod.is_silent = False
    loop.run(80 + TICK_SECONDS)
    assert loop.last.silent_pods == ()
    assert {pod.cap for pod in world.pods} == {world.cap}
    loop.run(140)
    assert world.cap >= 8
    assert all(gaps_of([pod], world.epoch)[0] > 0 for pod in silent)
