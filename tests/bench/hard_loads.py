"""The tuner on loads that were once read wrongly: what it did with caps and replicas, and for whom.

    PYTHONPATH=tests .venv/bin/python -m bench.hard_loads --out docs/slo/hard_loads.json

Each is a world of `sluice simulate`: a service, a load, and what is odd about it. Some minutes.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from sluice.measure.targets import read_targets
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.runs import Tuner
from sluice.simulate.score import score
from sluice.simulate.trace import Request
from sluice.simulate.world import World

GPU: dict[str, Any] = {"a": 12, "b": 0.06, "c": 9e-5, "d": 0.07, "kv_tokens": 160_000}
CPU: dict[str, Any] = {"a": 21, "b": 5.3, "c": 0.002, "d": 0.8, "kv_tokens": 40_000}
CPU |= {"block_size": 64, "cold_start_s": 20}
Lengths = Callable[[Random], tuple[int, int]]
"""Draws the tokens of a prompt and of an answer."""
Trace = Callable[[Random], list[Request]]


@dataclass(frozen=True, slots=True)
class Load:
    """A service with its targets and what comes; `pods`: of what class."""

    service: dict[str, Any]
    targets: str
    trace: Trace
    pods: type[SimulatedPod] = SimulatedPod


def poisson(
    per_s: Callable[[float], float], until_s: float, lengths: Lengths, shared: int = 0
) -> Trace:
    """`per_s(t)` a second by chance; all prompts begin with the same `shared` tokens."""

    def trace(random: Random) -> list[Request]:
        found, at_s = [], 0.0
        while at_s < until_s:
            at_s += random.expovariate(per_s(at_s))
            prompt, output = lengths(random)
            prefix = ("system",) if shared else ()
            found.append(Request(at_s, shared + prompt, output, prefix, shared))
        return found

    return trace


def bursts(size: int, every_s: float, until_s: float, lengths: Lengths) -> Trace:
    """`size` at once, again and again."""

    def trace(random: Random) -> list[Request]:
        times = (0.5 + every_s * i for i in range(int(until_s / every_s)))
        return [Request(at_s, *lengths(random)) for at_s in times for _ in range(size)]

    return trace


def spread(prompt: float, output: float, sigma: float) -> Lengths:
    """Log-normal lengths with these means."""

    def draw(random: Random) -> tuple[int, int]:
        one, other = (random.lognormvariate(-sigma * sigma / 2, sigma) for _ in range(2))
        return max(1, int(prompt * one)), max(1, int(output * other))

    return draw


def between(prompt: tuple[int, int], output: tuple[int, int]) -> Lengths:
    """Evenly drawn ones."""
    return lambda random: (random.randint(*prompt), random.randint(*output))


class SlowForTwoMinutes(SimulatedPod):
    """Steps take 3.5 times as long from the 200th second on."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        usual = self.noise.factor
        self.noise.factor = lambda now_s: usual(now_s) * (3.5 if 200 <= now_s < 320 else 1)  # type: ignore[method-assign]


LOADS = {
    "a system prompt, after a slow minute": Load(
        GPU | {"c": 2e-5, "cold_start_s": 60},
        "ttft=1s,itl=50ms",
        poisson(lambda _: 10.0, 2400, between((20, 100), (200, 300)), shared=4000),
        pods=SlowForTwoMinutes,
    ),
    "long answers that begin together": Load(
        GPU | {"kv_tokens": 1_600_000, "cold_start_s": 20, "max_replicas": 12, "ceiling": 64},
        "ttft=2s,itl=50ms",
        poisson(lambda t: 4.0 if t > 60 else 0.01, 1800, lambda _: (200, 1500)),
    ),
    "prompts that wait beside the gaps' target, then lulls": Load(
        GPU | {"cold_start_s": 60, "max_replicas": 16},
        "ttft=1s,itl=50ms",
        poisson(
            lambda t: 128.0 if t < 600 else 86.0 if t % 60 < 36 else 7.0,
            3600,
            spread(512, 128, 0.5),
        ),
    ),
    "200 at once on pods of another phase": Load(
        GPU | {"cold_start_s": 60.7, "max_replicas": 6, "ceiling": 128},
        "ttft=400ms,itl=50ms",
        bursts(200, 30.0, 6000, spread(4, 35, 0.2)),
    ),
    "half of the load is gone, and somebody always waits": Load(
        CPU | {"max_replicas": 20},
        "ttft=2s,itl=100ms",
        poisson(lambda t: 28.0 if t < 600 else 14.0, 4800, spread(128, 48, 0.5)),
    ),
}


def run(load: Load, seed: int) -> dict[str, Any]:
    """One world to its end: its score, and each change of the cap and the replicas."""
    params = Params(**load.service)
    trace, targets = load.trace(Random(seed)), read_targets(load.targets)
    world = World(params, targets, trace, Tuner(params.limits()), seed, load.pods)
    world.run()
    scored = score(world)
    told = ("good_share", "smooth_share", "gpu_seconds_per_1k_tokens", "p99_ttft_ms")
    return {name: scored[name] for name in told} | {
        "seed": seed, "cap_path": world.cap_changes, "replica_path": world.replica_changes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, load in LOADS.items():
        rows[name] = [run(load, seed) for seed in range(1, args.seeds + 1)]
        for row in rows[name]:
            path = ", ".join(f"{at_s:.0f} s: {pods}" for at_s, pods, *_ in row["replica_path"])
            print(
                f"{name}: {row['good_share']:.1%} good; pods {path or 'as they were'}", flush=True
            )
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
