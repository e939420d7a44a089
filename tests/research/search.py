"""One trace under every policy; the best fixed cap is searched among several."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from msgspec.structs import replace
from research.policies import Aimd, Replay
from sluice.simulate import runs
from sluice.simulate.params import Params
from sluice.simulate.runs import Result, Tuner, Watch, read_cap
from sluice.simulate.score import score
from sluice.simulate.trace import Request
from sluice.simulate.world import Policy, World
from sluice_core.contract import TICK_SECONDS
from sluice_operator.tuner import Targets

POLICIES = f"{runs.POLICIES}, best-fixed, oracle, aimd"


def caps_to_try(ceiling: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... and the ceiling itself."""
    powers = [1 << bit for bit in range(ceiling.bit_length())]
    between = [3 << bit for bit in range(ceiling.bit_length())]
    return sorted({cap for cap in (*powers, *between, ceiling) if cap <= ceiling})


def simulate(
    params: Params,
    targets: Targets,
    trace: Sequence[Request],
    policy: str,
    seed: int,
    every_s: float = TICK_SECONDS,
    watch: Watch | None = None,
) -> Result:
    """As `sluice.simulate.runs.simulate`. `best-fixed` and `oracle` name the cap that they found.

    The oracle and AIMD come with the replicas that `sluice` had on this trace, so that only the cap
    differs. Raises ParamsError.
    """
    case = Case(params, targets, trace, seed, every_s, watch)
    if policy == "sluice":
        return case.sluice()
    if policy == "deadline":
        return case.deadline()
    if policy == "aimd":
        return case.aimd()
    if policy == "best-fixed":
        return best_of(case.fixed, caps_to_try(params.ceiling))
    if policy == "oracle":
        return best_of(case.replayed, caps_to_try(params.ceiling))
    return case.fixed(read_cap(policy, params.ceiling, POLICIES))


class Case:
    """One trace on one service; what `sluice` did is run once."""

    def __init__(
        self,
        params: Params,
        targets: Targets,
        trace: Sequence[Request],
        seed: int,
        every_s: float = TICK_SECONDS,
        watch: Watch | None = None,
    ) -> None:
        self.params, self.targets, self.trace, self.seed = params, targets, trace, seed
        self.every_s, self._watch = every_s, watch
        self._tuned: World | None = None
        self._replayed: dict[int, Result] = {}
        self._unfilled: Result | None = None

    def _run(self, name: str, policy: Policy, params: Params | None = None) -> World:
        params = params or self.params
        world = World(params, self.targets, self.trace, policy, self.seed)
        world.run(partial(self._watch, name) if self._watch else None)
        return world

    def tuned(self) -> World:
        """The world after the operator's own tuner has seen to it."""
        if self._tuned is None:
            self._tuned = self._run("sluice", Tuner(self.params.limits(), every_s=self.every_s))
        return self._tuned

    def sluice(self) -> Result:
        return score(self.tuned())

    def deadline(self) -> Result:
        """As `sluice`, but the order is by deadline."""
        params = replace(self.params, order="deadline")
        tuner = Tuner(params.limits(), every_s=self.every_s)
        return score(self._run("deadline", tuner, params))

    def fixed(self, cap: int) -> Result:
        """A fixed cap, and the tuner for the replicas."""
        tuner = Tuner(self.params.limits(), cap, self.every_s)
        return {"cap": cap} | score(self._run(f"fixed:{cap}", tuner))

    def replayed(self, cap: int) -> Result:
        """A fixed cap with the tuner's replicas of its own run. What comes of one that was never
        filled comes of all above it."""
        if self._unfilled and cap > self._unfilled["cap"]:
            return self._unfilled | dict.fromkeys(("cap", "first_cap", "last_cap"), cap)
        if cap not in self._replayed:
            world = self._run(f"fixed:{cap}", Replay(cap, self._replicas()))
            self._replayed[cap] = {"cap": cap} | score(world)
            if world.totals.most_running < cap:
                self._unfilled = self._replayed[cap]
        return self._replayed[cap]

    def aimd(self) -> Result:
        """The limiters' law, from the cap that `sluice` begins at."""
        return score(self._run("aimd", Aimd(None, self._replicas())))

    def _replicas(self) -> Sequence[tuple[float, int]]:
        if self.params.min_replicas == self.params.max_replicas:
            return ()
        return self.tuned().replica_changes


def quality(result: Result) -> tuple[float, float, float]:
    """What makes a cap the better one, in hindsight."""
    return result["smooth_share"], result["good_share"], -(result["gpu_seconds_per_1k_tokens"] or 0)


def best_of(run: Callable[[int], Result], caps: Iterable[int]) -> Result:
    """The best result over `caps`, and over those between it and its neighbours."""
    found = {cap: run(cap) for cap in caps}
    _refine(run, found)
    return _chosen(found)


def best_near(run: Callable[[int], Result], start: int, ceiling: int) -> Result:
    """The best result over `start`, its halves and doubles until both sides are worse, those
    between the best and its neighbours, and then the ceiling: a share has one peak over the caps,
    and where more comes than can be done another one there."""
    found = {cap: run(cap) for cap in {max(1, start // 2), start, min(2 * start, ceiling)}}
    while True:
        best = _best(found)
        beside = {max(1, best // 2), min(2 * best, ceiling)} - found.keys()
        lower = best == 1 or any(best // 2 <= cap < best for cap in found)
        higher = best == ceiling or any(best < cap <= 2 * best for cap in found)
        if lower and higher or not beside:
            break
        found |= {cap: run(cap) for cap in beside}
    _refine(run, found)
    if ceiling not in found:
        found[ceiling] = run(ceiling)
        if _best(found) == ceiling:
            _refine(run, found)
    return _chosen(found)


def _refine(run: Callable[[int], Result], found: dict[int, Result]) -> None:
    """Run what lies between the best and its neighbours."""
    best, tried = _best(found), sorted(found)
    place = tried.index(best)
    around = (tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)])
    for neighbour in around:
        for part in (1 / 3, 2 / 3):
            cap = round(best + (neighbour - best) * part)
            if cap not in found:
                found[cap] = run(cap)


def _best(found: dict[int, Result]) -> int:
    return max(found, key=lambda cap: quality(found[cap]))


def _chosen(found: dict[int, Result]) -> Result:
    by_cap = {cap: found[cap]["smooth_share"] for cap in sorted(found)}
    return found[_best(found)] | {"smooth_by_cap": by_cap}
