"""Who sets cap and replicas: the operator's tuner, for a fixed cap too."""

from dataclasses import replace

from sluice_core.contract import TICK_SECONDS
from sluice_operator.tuner import Limits, Observation, Past, decide

from .world import World


class Tuner:
    """The operator's own code. With a `cap` only the replicas are its to decide."""

    def __init__(
        self, limits: Limits, cap: int | None = None, every_s: float = TICK_SECONDS
    ) -> None:
        self.first_cap, self.every_s = cap, every_s
        self._limits = limits if cap is None else replace(limits, ceiling=cap, min_num_seqs=cap)
        self._is_idle = cap is not None and limits.min_replicas == limits.max_replicas
        self._past = Past()

    def decide(self, world: World) -> None:
        """One pass of the operator, its changes acknowledged at once."""
        if self._is_idle:
            return
        seen = Observation(
            now=world.now,
            targets=world.targets,
            limits=self._limits,
            cap=world.cap,
            epoch=world.epoch,
            replicas=world.replicas,
            pods=tuple(pod.view(world.now) for pod in world.pods),
        )
        self._past, decision = decide(self._past, seen)
        world.set_cap(decision.cap)
        world.set_replicas(decision.replicas)
