"""Runs the tuner against simulated pods, as the operator's rim does."""

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from msgspec import structs
from sluice_core.contract import TICK_SECONDS
from sluice_operator.tuner import CapLimits, Decision, Observation, Past, Targets, decide
from unit.operator.tuner.world import Shape, World


@dataclass
class Loop:
    """Observes `world` every `every_s`, decides, and applies the decision."""

    world: World
    limits: CapLimits
    every_s: float = TICK_SECONDS
    past: Past = field(default_factory=Past)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def observe(self) -> Observation:
        """What the rim would hand to the tuner now."""
        world = self.world
        return Observation(
            now=world.now,
            targets=world.targets,
            limits=self.limits,
            cap=world.cap,
            epoch=world.epoch,
            replicas=world.replicas,
            pods=tuple(pod.view(world.now) for pod in world.pods),
        )

    def run(self, end_s: float) -> None:
        """Let the world and the tuner run until `end_s`; `past` goes through JSON each time."""
        while self.world.now < end_s:
            self.world.advance(self.world.now + self.every_s)
            self.turn()

    def turn(self) -> Decision:
        """One decision, applied."""
        past = msgspec.json.decode(msgspec.json.encode(self.past), type=Past)
        self.past, decision = decide(past, self.observe())
        self.decisions.append((self.world.now, decision))
        self.world.set_cap(decision.cap)
        self.world.set_replicas(decision.replicas)
        self.world.patch()
        return decision

    @property
    def cap_changes(self) -> list[tuple[float, int, str]]:
        """(time, new cap, reason) of each change."""
        return [(at, d.cap, d.cap_reason) for at, d in self.decisions if d.cap_reason]

    @property
    def replica_changes(self) -> list[tuple[float, int, str]]:
        """(time, new replicas, reason) of each change."""
        return [
            (at, d.replicas, d.replicas_reason) for at, d in self.decisions if d.replicas_reason
        ]

    @property
    def last(self) -> Decision:
        """The newest decision."""
        return self.decisions[-1][1]


SMALL_CPU = Shape(
    a=4,
    b=1.0,
    c=0.0005,
    d=0.3,
    kv_tokens=40_000,
    cold_start_s=20,
    ceiling=32,
    noise=0.1,
    hiccup_ms=50,
)
"""32 sequences take 38 ms a step; about 10 requests/s of 64 + 64 tokens."""
TARGETS = Targets("99", ttft_ms=500, itl_ms=60, e2e_ms=None, window_s=60)


def shaped(**changes: Any) -> Shape:
    """A small CPU with these changes."""
    return structs.replace(SMALL_CPU, **changes)


def limits(**changes: Any) -> CapLimits:
    """1..32 sequences on 1..4 replicas, scaled in after 30 s."""
    usual = CapLimits(32, 1, min_replicas=1, max_replicas=4, scale_down_window_s=30)
    return replace(usual, **changes)
