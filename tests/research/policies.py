"""Contenders: a fixed cap with the replicas of another run, and AIMD."""

from collections.abc import Sequence

from sluice.simulate.world import World
from sluice_core.contract import TICK_SECONDS, Tick
from sluice_operator.tuner import Targets

AIMD_EVERY_S = 10.0
AIMD_DECREASE = 0.8


class Replay:
    """A fixed cap with the replicas of another run, moment by moment."""

    every_s = TICK_SECONDS

    def __init__(self, cap: int | None, replica_changes: Sequence[tuple[float, int]]) -> None:
        self.first_cap = cap
        self._changes = list(reversed(replica_changes))

    def decide(self, world: World) -> None:
        """Change the replicas when the other run did."""
        while self._changes and self._changes[-1][0] <= world.now:
            world.set_replicas(self._changes.pop()[1])


class Aimd(Replay):
    """Additive increase, multiplicative decrease on what a lower cap mends, as limiters do.

    Every ten seconds: over the allowed share of gaps (of whole requests, where gaps have no
    target), 0.8 of the cap; else, if at least half of the cap ran, one more. Late first tokens
    lower nothing: a lower cap makes more of them. With the replicas of another run.
    """

    def __init__(self, cap: int | None, replica_changes: Sequence[tuple[float, int]]) -> None:
        super().__init__(cap, replica_changes)
        self._next_s = AIMD_EVERY_S

    def decide(self, world: World) -> None:
        """Look at the ticks since the last time."""
        super().decide(world)
        if world.now < self._next_s:
            return
        self._next_s += AIMD_EVERY_S
        num = int(AIMD_EVERY_S / TICK_SECONDS)
        ticks = [tick for pod in world.pods for tick in pod.recorder.ticks.newest(num)]
        if _breaks(world.targets, ticks):
            world.set_cap(max(1, int(world.cap * AIMD_DECREASE)))
        elif any(2 * tick.max_running >= world.cap for tick in ticks):
            world.set_cap(min(world.params.ceiling, world.cap + 1))


def _breaks(targets: Targets, ticks: Sequence[Tick]) -> bool:
    if not (targets.itl_ms or targets.e2e_ms):
        return False
    parts = [tick.itl if targets.itl_ms else tick.e2e for tick in ticks]
    return sum(part.over for part in parts) > targets.allowed_share * sum(part.n for part in parts)
