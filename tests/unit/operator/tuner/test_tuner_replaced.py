"""What the tuner does while pods are replaced one by one: a gap is no want of pods."""

from dataclasses import dataclass, replace

import pytest
from sluice_operator.tuner import Observation
from unit.operator.tuner.loop import TARGETS, Loop, limits, shaped
from unit.operator.tuner.traces import poisson
from unit.operator.tuner.world import World

SHAPE = shaped(cold_start_s=40)


@dataclass
class Replacing(Loop):
    """Sees the pods that are gone as well, as the rim does, and replaces one after the other."""

    def observe(self) -> Observation:
        """What the rim would hand to the tuner now."""
        now = self.world.now
        gone = (
            replace(
                pod.view(now),
                ready=False,
                terminating=True,
                config=None,
                started_s=None,
                seen_s=pod.now,
            )
            for pod in self.world.gone
        )
        seen = super().observe()
        return replace(seen, pods=(*seen.pods, *gone))

    def replace_all(self) -> None:
        """Each pod drains first; its successor is ready after its cold start."""
        for old in list(self.world.pods):
            old.terminating = True
            self.world.add_pod(SHAPE.cold_start_s)
            new = self.world.pods[-1]
            while self.world.now < new.ready_s:
                self.run(self.world.now + self.every_s)


def loop_at(per_s: float, replicas: int, seed: int) -> Replacing:
    targets = replace(TARGETS, window_s=120)
    world = World(
        SHAPE, targets, poisson([(500, per_s)], seed=seed), cap=30, replicas=replicas, seed=seed
    )
    return Replacing(world, limits(scale_down_window_s=300))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_pods_that_hold_the_load_stay_two_while_they_are_replaced(seed: int) -> None:
    """At four fifths of what two can do. One alone is late, and a rate that reads a little high
    asked for a third in each of these."""
    loop = loop_at(16, 2, seed)
    loop.run(200)
    loop.replace_all()
    loop.run(420)
    assert any(d.verdicts["timeToFirstToken"].verdict == "Breach" for _, d in loop.decisions)
    assert loop.replica_changes == []


def test_a_single_replica_comes_back_as_one() -> None:
    loop = loop_at(8, 1, 0)
    loop.run(100)
    loop.replace_all()
    loop.run(300)
    assert loop.world.num_lost > 0, "nobody served meanwhile"
    assert loop.replica_changes == []


def test_more_than_the_pods_can_do_adds_one_also_while_they_are_replaced() -> None:
    loop = loop_at(26, 2, 1)
    loop.limits = limits(replicas_external=True)
    loop.run(20)
    loop.limits = limits()
    loop.replace_all()
    assert loop.replica_changes
    assert loop.replica_changes[0][1] >= 3
