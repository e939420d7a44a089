"""The tuner on services that nobody made it for: all of each is drawn.

    PYTHONPATH=tests .venv/bin/python -m bench.drawn_services --out docs/slo/drawn.json

`research.compare` has two services with targets that were chosen to be held. Here the step's
cost, memory, lengths, targets, noise and trace are drawn, so that many targets contradict each
other or the load. Ours is compared with the best fixed cap of the same run in hindsight, and with
cap = max, which is what other engines do.
"""

import argparse
import gc
import json
import multiprocessing
import sys
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import msgspec
from matplotlib.figure import Figure
from research.generate import TRACES, Lengths, make_trace
from research.search import Case, best_near
from sluice.numbers import count
from sluice.simulate.params import Params
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_operator.tuner import Targets

LONGEST_S = 40_000.0
SCORES = ("smooth_share", "good_share", "ttft_over_share", "itl_over_share", "p99_ttft_ms")
NAMES = [name for name in TRACES if name != "slow-leak"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One service, what it was promised to hold, and its trace."""

    params: Params
    lengths: Lengths
    targets: Targets
    trace: str


def drawn(seed: int) -> Drawn:
    """From a CPU core to a large GPU, prompts of 16 to 4,096 tokens and answers of 8 to 512; the
    gaps' target is what a batch of 1 to 200 would take with little to spare; one target in four
    services, both in the others; 40 % with interference."""
    random = Random(f"svc{seed}")

    def between(low: float, high: float) -> float:
        return exp(random.uniform(log(low), log(high)))

    a = between(3, 60)
    d = a * between(0.002, 0.06)
    b, c = d * between(0.7, 7), a * between(5e-6, 1e-4)
    lengths = Lengths(between(16, 4096), between(8, 512), random.uniform(0.2, 1.0))
    context = lengths.prompt + lengths.output
    ceiling = random.choice([32, 64, 128, 256, 512])
    least = (20 if lengths.sigma > 0.6 else 8) * context
    kv_tokens = int(max(between(2, 400) * context, least, 20_000))
    interference: dict[str, float] = {}
    if random.random() < 0.4:
        interference["interference_every_s"] = between(30, 600)
        interference["interference_mean_s"] = between(1, 20)
        interference["interference_factor"] = random.uniform(1.5, 4)
    params = Params(
        a=a, b=b, c=c, d=d, kv_tokens=kv_tokens, cold_start_s=between(5, 120), ceiling=ceiling,
        block_size=random.choice([16, 64]), max_num_batched_tokens=random.choice([512, 2048, 8192]),
        noise=random.uniform(0.02, 0.15), between_ms=random.choice([0, 0.5, 2]),
    )  # fmt: skip
    batch = min(between(1, 200), ceiling, kv_tokens / context)
    step_ms = params.step_ms(batch, batch * (context - lengths.output / 2), MIN_CHUNK_TOKENS)
    itl_ms = step_ms * random.uniform(1.05, 1.5)
    ttft_ms = max(200.0, (d * lengths.prompt + itl_ms) * between(2, 60))
    kind = random.choice(["both"] * 6 + ["ttft", "itl"])
    targets = Targets(
        "99", None if kind == "itl" else ttft_ms, None if kind == "ttft" else itl_ms, None
    )
    spelled = msgspec.structs.replace(params, **interference)
    return Drawn(spelled, lengths, targets, random.choice(NAMES))


def run(job: tuple[int, int]) -> Row:
    """One of (seed, number of requests): ours, the best fixed cap, and cap = max."""
    gc.disable()  # nothing here makes cycles
    seed, num = job
    of = drawn(seed)
    trace = make_trace(of.trace, of.params, of.targets.itl_ms, of.lengths, num, seed)
    case = Case(of.params, of.targets, [r for r in trace if r.t_s < LONGEST_S], seed)
    ours = case.sluice()
    best = best_near(case.replayed, ours["last_cap"], of.params.ceiling)
    largest = case.replayed(of.params.ceiling)
    return {
        "seed": seed,
        "trace": of.trace,
        "targets": of.targets.by_name(),
        "params": msgspec.to_builtins(of.params),
        "prompt_tokens": of.lengths.prompt,
        "output_tokens": of.lengths.output,
        "hours": ours["simulated_s"] / 3600,
        "changes": len(ours["cap_path"]),
        "best_cap": best["cap"],
        "ours": {name: ours[name] for name in SCORES},
        "best": {name: best[name] for name in SCORES},
        "max": {name: largest[name] for name in SCORES},
    }


def summary(rows: list[Row]) -> dict[str, Any]:
    """Over the services; those of which not even the best cap serves 1 % count in no ratio."""
    served = [row for row in rows if row["best"]["smooth_share"] > 0.01]
    reach = [row["ours"]["smooth_share"] / row["best"]["smooth_share"] for row in served]
    beyond = [row["ours"]["smooth_share"] - row["max"]["smooth_share"] for row in rows]
    return {
        "services": len(rows),
        **{
            name: {who: fmean(row[who][name] for row in rows) for who in ("ours", "best", "max")}
            for name in ("smooth_share", "good_share")
        },
        "reach_95": [sum(share >= 0.95 for share in reach), len(reach)],
        "reach_80": [sum(share >= 0.80 for share in reach), len(reach)],
        "two_points_below_max": sum(points < -0.02 for points in beyond),
        "two_points_above_max": sum(points > 0.02 for points in beyond),
        "changes_per_hour": sum(r["changes"] for r in rows) / sum(r["hours"] for r in rows),
    }


def told(found: dict[str, Any]) -> str:
    """The summary as a Markdown table."""
    lines = ["| | ours | best fixed cap | cap = max |", "|---|---|---|---|"]
    for name in ("smooth_share", "good_share"):
        shares = " | ".join(f"{100 * found[name][who]:.1f} %" for who in ("ours", "best", "max"))
        lines.append(f"| {name.removesuffix('_share')}, mean of the services | {shares} |")
    counts = (
        "{services} services; 95 % of the best cap in {reach_95[0]} of {reach_95[1]}, 80 % in "
        "{reach_80[0]}; over 2 points below cap = max in {two_points_below_max}, above it in "
        "{two_points_above_max}; {changes_per_hour:.1f} changes an hour"
    )
    return "\n".join([*lines, "", counts.format(**found)])


def picture(rows: list[Row], path: Path) -> None:
    """Smooth shares: ours and cap = max over the best fixed cap's, a point for each service."""
    figure = Figure(figsize=(6, 6), layout="constrained")
    axis = figure.subplots()
    best = [100 * row["best"]["smooth_share"] for row in rows]
    for who, name, mark in (("max", "cap = max", "x"), ("ours", "ours", "o")):
        shares = [100 * row[who]["smooth_share"] for row in rows]
        axis.plot(best, shares, mark, markersize=5, alpha=0.7, label=name)
    axis.plot([0, 100], [0, 100], color="grey", linewidth=1)
    axis.set_xlabel("best fixed cap in hindsight, % of requests smooth")
    axis.set_ylabel("% of requests smooth")
    axis.set_title("Services that were drawn")
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Runs all, prints the table, writes --out and the picture beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=count, default=120)
    parser.add_argument("--requests", type=count, default=4000, help="of each")
    parser.add_argument("--jobs", type=count, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("build/drawn.json"))
    given = parser.parse_args()
    rows: list[Row] = []
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        jobs = [(seed, given.requests) for seed in range(given.services)]
        for row in pool.imap_unordered(run, jobs):
            rows.append(row)
            print(f"{len(rows)} of {len(jobs)}", file=sys.stderr, flush=True)
    rows.sort(key=lambda row: row["seed"])
    found = summary(rows)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"summary": found, "rows": rows}, indent=1) + "\n")
    picture(rows, given.out.with_suffix(".png"))
    print(told(found))


if __name__ == "__main__":
    main()
