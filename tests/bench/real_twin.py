"""The traces of `real_caps` in the simulator: what a repeat takes an hour for, many times a second.

    PYTHONPATH=tests .venv/bin/python -m bench.real_twin --out docs/slo/real_twin.json

A repeat on a real worker says little by itself: what the machine did in its hundred seconds moves
shares by more than a rule does. Here the machine's noise is a parameter, and each seed another
trace and other noise. Ours is the operator's tuner, from the cap that a start-up profile predicts.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from bench.real_rows import LENGTHS, scaled_trace
from matplotlib.figure import Figure
from research.search import Case
from sluice.measure.targets import read_targets
from sluice.numbers import count, positive
from sluice.simulate.params import Params

WORKER = Params(
    a=4.86, b=0.514, c=0.0022, d=0.667, between_ms=0.4, noise=0.06,
    kv_tokens=1_772_800, block_size=64, ceiling=32, cold_start_s=5,
)  # fmt: skip
"""The 88M model on one thread of an AMD EPYC with AVX512-BF16: the step model that its worker's
admin port told after the measurement of `real_caps`, where P99 over mean was 1.30."""
SLO, PER_S = "ttft=1s,itl=54.7ms", 12.2
"""Target and load that `real_caps --tail 1.5` derived from that worker."""
NOISES: dict[str, dict[str, float]] = {
    "calm": {},
    "as told": {"noise": 0.113},
    "noisy": {"noise": 0.16},
    "hiccups": {
        "noise": 0.08,
        "interference_every_s": 20,
        "interference_mean_s": 0.5,
        "interference_factor": 2,
    },
    "a quarter slower": {"b": 0.64, "noise": 0.12},
    "slows down": {"noise": 0.1, "leak_per_hour": 12},
}
"""`as told`: a log-normal's P99 at 1.30; `a quarter slower`: than when the target was set;
`slows down`: by a third within the hundred seconds."""
TRACES = ("steps", "bursts")
CAPS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)


@dataclass(frozen=True, slots=True)
class Run:
    """One seed of one cell: smooth shares of ours and of each fixed cap."""

    noise: str
    trace: str
    seed: int
    ours: float
    fixed: dict[int, float]
    cap_path: list[tuple[float, int]]

    @property
    def of_best(self) -> float:
        """Ours over the best fixed cap of just this trace, in hindsight."""
        return self.ours / max(self.fixed.values())


def run(job: tuple[str, str, int, float], caps: Sequence[int] = CAPS) -> Run:
    """One of (noise, trace, seed, seconds), and each of `caps` fixed."""
    noise, trace, seed, seconds = job
    params = msgspec.structs.replace(WORKER, **NOISES[noise])
    case = Case(params, read_targets(SLO), scaled_trace(trace, PER_S, seconds, seed), seed)
    ours = case.sluice()
    fixed = {cap: case.replayed(cap)["smooth_share"] for cap in caps}
    path = [(0.0, ours["first_cap"]), *ours["cap_path"]]
    return Run(noise, trace, seed, ours["smooth_share"], fixed, path)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """One cell. `of_best_seeds`: median and least of the seeds' own ratios; `of_best`: of the means
    over the seeds, where a fixed cap may not be another one for each."""
    fixed = {cap: fmean(run.fixed[cap] for run in runs) for cap in runs[0].fixed}
    best = max(fixed, key=lambda cap: fixed[cap])
    ours, ratios = fmean(run.ours for run in runs), [run.of_best for run in runs]
    return {
        "noise": runs[0].noise, "trace": runs[0].trace, "seeds": len(runs),
        "ours": ours, "fixed": fixed, "best": best, "of_best": ours / fixed[best],
        "of_best_seeds": [median(ratios), min(ratios)],
        "changes": fmean(len(run.cap_path) - 1 for run in runs),
    }  # fmt: skip


def table(cells: Sequence[dict[str, Any]]) -> str:
    """A line of Markdown for each cell."""
    head = ["noise", "trace", "seeds", "ours % smooth", "best fixed cap", "cap = max",
            "of the best", "seed by seed", "changes"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for cell in cells:
        fixed, best = cell["fixed"], cell["best"]
        middle, least = cell["of_best_seeds"]
        lines.append([
            cell["noise"], cell["trace"], str(cell["seeds"]), f"{cell['ours']:.1%}",
            f"{fixed[best]:.1%} ({best})", f"{fixed[max(CAPS)]:.1%}", f"{cell['of_best']:.0%}",
            f"{middle:.0%}, least {least:.0%}", f"{cell['changes']:.1f}",
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Smooth share by fixed cap, a line for each noise; ours dashed, in the same colour."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, len(TRACES))
    for axis, trace in zip(axes, TRACES, strict=True):
        for shade, cell in enumerate(cell for cell in cells if cell["trace"] == trace):
            shares = [100 * cell["fixed"][cap] for cap in CAPS]
            axis.plot(CAPS, shares, ".-", color=f"C{shade}", label=cell["noise"])
            axis.axhline(100 * cell["ours"], color=f"C{shade}", linestyle="--", linewidth=1)
        axis.set_title(trace)
        axis.set_xlabel("fixed cap (dashed: ours)")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("% of requests smooth, mean of the seeds")
    axes[0].legend(fontsize=8)
    figure.suptitle("The real worker's traces, simulated")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs all cells, prints the table, writes --out and the picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=positive, default=100.0, help="of a trace")
    parser.add_argument("--seeds", type=count, default=40)
    parser.add_argument("--jobs", type=count, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("build/real/real_twin.json"))
    given = parser.parse_args()
    jobs = [
        (n, t, seed, given.seconds) for n in NOISES for t in TRACES for seed in range(given.seeds)
    ]
    runs: list[Run] = []
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for done in pool.imap(run, jobs):
            runs.append(done)
            if done.seed == given.seeds - 1:
                print(f"{len(runs)} of {len(jobs)}", file=sys.stderr, flush=True)
    of = [[r for r in runs if (r.noise, r.trace) == (n, t)] for t in TRACES for n in NOISES]
    cells = [summary(of_cell) for of_cell in of]
    setting = {
        "worker": msgspec.to_builtins(WORKER), "noises": NOISES, "slo": SLO, "per_s": PER_S,
        "lengths": asdict(LENGTHS), "seconds": given.seconds,
    }  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(setting | {"cells": cells}, indent=1) + "\n")
    picture(cells, given.out.with_suffix(".png"))
    print(table(cells))


if __name__ == "__main__":
    main()
