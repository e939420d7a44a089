"""One run of a named policy: the operator's tuner, which sets the replicas at a fixed cap too."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs
from sluice_core.contract import TICK_SECONDS
from sluice_operator.tuner import CapLimits, Decision, Observation, Past, Targets, decide

from .foreign import ForeignPod
from .inner import InnerPod
from .params import Params, ParamsError
from .pod import SimulatedPod
from .score import score
from .trace import Request
from .world import World

Result = dict[str, Any]
Watch = Callable[[str, World], None]
"""Called after each virtual slice with policy (`sluice`, `deadline` or `fixed:8`) and world."""
PODS = {"sluice": SimulatedPod, "foreign": ForeignPod, "inner": InnerPod}
POLICIES = "sluice, deadline, fixed:N, fixed:max"


class Tuner:
    """The operator's own code. With a `cap` it decides only the replicas."""

    def __init__(
        self, limits: CapLimits, cap: int | None = None, every_s: float = TICK_SECONDS
    ) -> None:
        self.first_cap, self.every_s = cap, every_s
        self._limits = limits if cap is None else replace(limits, ceiling=cap, min_num_seqs=cap)
        self._is_idle = cap is not None and limits.min_replicas == limits.max_replicas
        self._past = Past()
        self.last: Decision | None = None

    def decide(self, world: World) -> None:
        """Make one pass of the operator; its changes are in force at once."""
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
        self.last = decision
        world.set_cap(decision.cap)
        world.set_replicas(decision.replicas)


def simulate(
    params: Params,
    targets: Targets,
    trace: Sequence[Request],
    policy: str,
    seed: int,
    every_s: float = TICK_SECONDS,
    watch: Watch | None = None,
    pod: str = "sluice",
) -> Result:
    """The score of one policy.

    `deadline` is `sluice` with the prompts in order of their deadlines, not of arrival. With a
    fixed cap, the tuner sets the replicas for that cap. `every_s`: seconds between the tuner's
    looks. `pod`: one of `PODS`. Raises ParamsError.
    """
    cap = None
    if policy == "deadline":
        params = structs.replace(params, order="deadline")
    elif policy != "sluice":
        cap = read_cap(policy, params.ceiling, POLICIES)
    tuner = Tuner(params.limits(), cap, every_s)
    world = World(params, targets, trace, tuner, seed, PODS[pod])
    world.run(None if watch is None else lambda seen: watch(policy, seen))
    told = _told(tuner.last) if pod == "foreign" and tuner.last else {}
    return ({} if cap is None else {"cap": cap}) | score(world) | told


def _told(last: Decision) -> Result:
    """What the tuner says at the end about a token budget that it cannot change."""
    feasible = last.slo_feasible
    return {"slo_feasible": f"{feasible.reason}: {feasible.message}"}


def read_cap(policy: str, ceiling: int, known: str) -> int:
    """N of `fixed:N`; max means `ceiling`. Raises ParamsError, which names the `known` ones."""
    kind, _, number = policy.partition(":")
    is_number = number.isdecimal() and len(number) <= len(str(ceiling))
    cap = ceiling if number == "max" else int(number) if is_number else 0
    if kind != "fixed" or not 1 <= cap <= ceiling:
        raise ParamsError(f"--policy {policy[:40]} is none of {known} with N in 1..{ceiling}.")
    return cap
