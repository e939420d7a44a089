"""Who goes first, on a real worker over HTTP: by deadline and first come, first served, in turns.

    PYTHONPATH=tests .venv/bin/python -m bench.real_order --out docs/slo/order.json

For each repeat a worker with an 88M model is measured, and its figures decide the load and the
inter-token target of all runs of the repeat. Two traces: the simulator's bursts, and `--factor`
times what the worker does. Both policies meet the same requests, each on a fresh worker, in an
order that is drawn. Every request is waited for: the longest first token counts as well.
"""

import argparse
import asyncio
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from random import Random

import httpx
from bench.hard_loads import poisson
from bench.overload import spread
from bench.peers.checkpoint import CACHE, MODELS, write
from bench.real_caps import (
    LOAD_CAP,
    MODEL,
    WARM_UP,
    Aim,
    Steered,
    calibrate,
    measured,
    replay,
)
from bench.real_rows import LENGTHS, scaled_trace
from bench.real_turns import Setting
from bench.serving import serving
from sluice.machine import processor
from sluice.measure.client import quantile
from sluice.measure.targets import is_good, is_smooth
from sluice.numbers import count
from sluice.simulate.trace import Request
from sluice_operator.pods.scrape import create_client

POLICIES = ("fcfs", "deadline")
OVERLOAD, BURSTS = "overload", "bursts"
LONGEST_S = 300.0
"""For what is left behind the last arrival."""


@dataclass(frozen=True, slots=True)
class Run:
    """One policy on one trace. Shares are of all arrivals; `first_ms`: first tokens, ascending, of
    those that were answered in full; `cpu_s`: of both processes of the worker; `steps`: of its
    engine, so that the tokens of one are known, whatever speed the machine had."""

    trace: str
    policy: str
    repeat: int
    requests: int
    good_share: float
    smooth_share: float
    first_ms: Sequence[float]
    tokens_per_s: float
    seconds: float
    cpu_s: float
    steps: float
    per_s: float
    itl_target_ms: float


def made(trace: str, found: Setting, given: argparse.Namespace, seed: int) -> list[Request]:
    """The requests of one repeat."""
    if trace == BURSTS:
        return scaled_trace(trace, found.per_s, given.seconds, seed)
    per_s = given.factor * found.per_s
    return poisson(lambda _: per_s, given.seconds, LENGTHS.draw)(Random(seed))


async def run(
    client: httpx.AsyncClient,
    model: Path,
    found: Setting,
    requests: Sequence[Request],
    of: tuple[str, str, int],
) -> Run:
    """One policy, on a fresh worker."""
    trace, policy, repeat = of
    targets = found.targets
    flags = ["--scheduling-policy", policy, "--max-num-seqs", str(LOAD_CAP)]
    flags += ["--slo-ttft-ms", str(targets.ttft_ms), "--slo-itl-ms", str(targets.itl_ms)]
    with serving(*flags, model=model) as worker:
        await replay(worker.url, WARM_UP, repeat)
        await Steered.of(worker, client).put(LOAD_CAP)
        steps = worker.metric("sluice_steps_total")
        replaying = replay(worker.url, requests, repeat, grace_s=LONGEST_S)
        outcomes, seconds, cpu_s = await measured(worker, replaying)
        steps = worker.metric("sluice_steps_total") - steps
    answered = [one for one in outcomes if one is not None and one.is_ok]
    return Run(
        *of,
        requests=len(outcomes),
        good_share=sum(is_good(one, targets) for one in answered) / len(outcomes),
        smooth_share=sum(is_smooth(one, targets) for one in answered) / len(outcomes),
        first_ms=sorted(round(1000 * one.ttft_s, 1) for one in answered),
        tokens_per_s=sum(one.num_tokens for one in answered) / seconds,
        seconds=seconds,
        cpu_s=cpu_s,
        steps=steps,
        per_s=found.per_s,
        itl_target_ms=targets.itl_ms or 0.0,
    )


async def measure(given: argparse.Namespace, runs: list[Run]) -> None:
    """Fill `runs`, and keep them in the file after each."""
    model, chance = write(MODELS[MODEL], given.cache / "models"), Random(given.seed)
    setting = {
        "cpu": processor(), "python": platform.python_version(), "model": MODEL,
        "lengths": asdict(LENGTHS), "cap": LOAD_CAP, "factor": given.factor,
        "ttft_ms": given.ttft_ms, "seconds": given.seconds, "seed": given.seed,
    }  # fmt: skip
    async with create_client() as client:
        for repeat in range(given.repeats):
            with serving("--max-num-seqs", str(LOAD_CAP), model=model) as worker:
                found = await calibrate(worker, client, Aim(given.ttft_ms, given.tail))
            told = f"{found.per_s:.2f}/s at cap {LOAD_CAP}, {found.targets.itl_ms:g} ms are due"
            print(f"repeat {repeat + 1} of {given.repeats}: {told}", flush=True)
            for trace in (OVERLOAD, BURSTS):
                requests = made(trace, found, given, given.seed + repeat)
                for policy in chance.sample(POLICIES, len(POLICIES)):
                    one = await run(client, model, found, requests, (trace, policy, repeat))
                    runs.append(one)
                    print(line(one), flush=True)
                    rows = [asdict(one) for one in runs]
                    given.out.write_text(json.dumps(setting | {"runs": rows}, indent=1) + "\n")


def line(one: Run) -> str:
    """What is told of a run."""
    lost = one.requests - len(one.first_ms)
    firsts = [quantile(one.first_ms, q) or inf for q in (0.5, 0.99, 1.0)]
    return (
        f"  {one.trace:8} {one.policy:8} {one.good_share:6.1%} good {one.smooth_share:6.1%} smooth"
        f" of {one.requests}; first tokens {firsts[0]:.0f}, P99 {firsts[1]:.0f}, longest "
        f"{firsts[2]:.0f} ms; {one.tokens_per_s:.0f} tokens/s, {one.cpu_s:.1f} CPU-s, "
        f"{one.steps:.0f} steps; {lost} lost"
    )


def findings(runs: Sequence[Run]) -> list[str]:
    """By deadline over first come, first served: medians of the repeats' ratios, least and most."""
    told = []
    for trace in dict.fromkeys(one.trace for one in runs):
        by_repeat: dict[int, dict[str, Run]] = {}
        for one in runs:
            if one.trace == trace:
                by_repeat.setdefault(one.repeat, {})[one.policy] = one
        pairs = [(pair["deadline"], pair["fcfs"]) for pair in by_repeat.values() if len(pair) == 2]
        good = ratios(pairs, "good_share")
        smooth = ratios(pairs, "smooth_share")
        speed = ratios(pairs, "tokens_per_s")
        steps, cpu = ratios(pairs, "steps"), ratios(pairs, "cpu_s")
        longest = spread([a.first_ms[-1] / b.first_ms[-1] for a, b in pairs])
        told.append(
            f"{trace}: by deadline {good} x the good share, {smooth} x the smooth share, "
            f"{speed} x the tokens/s, {steps} x the steps, {cpu} x the CPU time, "
            f"{longest} x the longest first token"
        )
    return told


def ratios(pairs: Sequence[tuple[Run, Run]], of: str) -> str:
    """One over the other, in each repeat in which the other is not 0."""
    found = [getattr(a, of) / getattr(b, of) for a, b in pairs if getattr(b, of)]
    return spread(found) if found else "-"


def picture(runs: Sequence[Run], ttft_ms: float, path: Path) -> None:
    """For each trace, how many have their first token by when."""
    from matplotlib.figure import Figure

    colours = {"fcfs": "#8a8a8a", "deadline": "#c2417c"}
    traces = list(dict.fromkeys(one.trace for one in runs))
    figure = Figure((5.5 * len(traces), 4), layout="constrained")
    for axis, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        for policy, colour in colours.items():
            for one in (one for one in runs if (one.trace, one.policy) == (trace, policy)):
                shares = [100 * (at + 1) / one.requests for at in range(len(one.first_ms))]
                label = policy if one.repeat == 0 else None
                seconds = [ms / 1000 for ms in one.first_ms]
                axis.plot(seconds, shares, color=colour, alpha=0.7, label=label)
        axis.axvline(ttft_ms / 1000, color="#1f6fb4", linestyle="--", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("seconds to the first token (dashed: the target)")
        axis.set_ylabel("% of all arrivals")
        axis.set_title(trace)
        axis.legend(loc="upper left")
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of a trace")
    parser.add_argument("--factor", type=float, default=1.3, help="of the capacity: overload")
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--tail", type=float, default=1.5, help="of the target: P99 over mean step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the checkpoint is made")
    parser.add_argument("--out", type=Path, default=Path("build/real/order.json"))
    return parser.parse_args(argv)


def main() -> None:
    """Measures, tells, and writes --out and the picture beside it."""
    given = parse(sys.argv[1:])
    given.out.parent.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    asyncio.run(measure(given, runs))
    picture(runs, given.ttft_ms, given.out.with_suffix(".png"))
    print(*findings(runs), sep="\n")


if __name__ == "__main__":
    main()
