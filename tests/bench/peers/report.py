"""*Rim*: benchmarks.md and the plots, from the traces' files alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from bench.peers.goals import GOALS, Goal, between, judge, percent_good, percent_smooth, speed
from bench.peers.plots import plot_batches, plot_trace
from bench.peers.results import TraceResult
from bench.peers.rounds import NEAR, Run, Spread, counted, ratio, spread
from bench.peers.traces import BATCHES, TRACES
from bench.peers.variants import TAKING_PART

ROOT = Path(__file__).parents[3]
START_S = 5.0
INTRODUCTION = """\
# Benchmarks: Sluice and its peers

Written by `make bench ARGS="{options}"`, which replaces it; with `--report` it is
written anew from the files beside the plots.{others}

All peers run the same random Llama checkpoints in bfloat16 (88 M: 768 wide, 12 layers, 12/4 heads,
8 k tokens; 500 M: 1536 wide, 16 layers, 24/8 heads). They get the same requests: token ids as
prompts, greedy, a fixed number of output tokens. Servers are asked over HTTP with streaming.
Libraries run in their own process.

All peers run one after another in a round, each round begins with another peer, and its prompts are
new. The register peak is measured between any two runs: products of registers alone, on all
processors, per second of wall time. A run counts only if this peak was at least {near:.0%} of its
maximum before and after. Each ratio compares runs of the same round. There is no ratio if over half
of the rounds are discarded. Figures are medians, with least and most in brackets. CPU-seconds are
those of all processes of a peer.
"""


def load(out: Path) -> dict[str, TraceResult]:
    """The traces' files, in the order of the traces."""
    found = {}
    for name in TRACES:
        if (path := out / f"{name}.json").exists():
            found[name] = msgspec.json.decode(path.read_bytes(), type=TraceResult)
    return found


def write(out: Path) -> None:
    """`out`.md beside the folder `out`, and one PNG for each trace in it."""
    results = load(out)
    if not results:
        return
    peaks: dict[str, float] = {}
    for result in results.values():
        machine = result.machine
        peaks[machine.cpu] = max(peaks.get(machine.cpu, 0.0), machine.best_gflops)
    (out.parent / f"{out.name}.md").write_text("\n".join(page(results, peaks, out)) + "\n")
    batches = {n: r for n in BATCHES if (r := results.get(f"batch-{n}"))}
    if batches:
        plot_batches(batches, peaks, out / "batch.png")
    for name, result in results.items():
        if not name.startswith("batch-"):
            plot_trace(result, peaks[result.machine.cpu], out / f"{name}.png")


def page(
    results: Mapping[str, TraceResult], peaks: Mapping[str, float], out: Path
) -> Iterator[str]:
    """The document's lines."""
    yield _introduction(out)
    yield from _machines(results, peaks)
    yield "\n## Goals\n"
    yield "| work | at least | aim | measured | |\n|---|---|---|---|---|"
    run = [goal for goal in GOALS if _is_run(goal, results)]
    for goal in run:
        yield _goal_row(goal, results, peaks[results[goal.trace].machine.cpu])
    yield _start_row(results)
    if left := [goal.work for goal in GOALS if goal not in run]:
        yield f"\nNot run here: {'; '.join(left)}."
    if any(name.startswith("batch-") for name in results):
        yield "\n## Continuous against static batches\n"
        yield f"![tokens a second by sequences at once]({out.name}/batch.png)"
        yield from _growth(results, peaks)
    for name, result in results.items():
        yield f"\n## {name}: {result.about}\n"
        if not name.startswith("batch-"):
            yield f"![{name}]({out.name}/{name}.png)\n"
        yield from _trace(result, peaks[result.machine.cpu])


def _introduction(out: Path) -> str:
    """How the page came about, and where those of other processors are."""
    folder = out.relative_to(ROOT) if out.is_relative_to(ROOT) else Path(out.name)
    others = [f"[{path.stem}]({out.name}/{path.name})" for path in sorted(out.glob("*.md"))]
    if (above := out.parent.with_suffix(".md")).exists():
        others.append(f"[{above.stem}](../{above.name})")
    told = f" Other pages: {', '.join(others)}." if others else ""
    return INTRODUCTION.format(near=NEAR, options=f"--out {folder}", others=told)


def _machines(results: Mapping[str, TraceResult], peaks: Mapping[str, float]) -> Iterator[str]:
    machines = {(r.machine.cpu, r.machine.num_cpus, r.machine.probe) for r in results.values()}
    for cpu, num_cpus, kind in sorted(machines):
        peak = f"register peak {peaks[cpu]:.0f} GFLOP/s ({kind})"
        yield f"- Processor: {cpu}, {num_cpus} used; {peak}."
    versions = {f"{k}: {v}" for r in results.values() for k, v in r.versions.items()}
    for line in sorted(versions):
        yield f"- {line}"


def _is_run(goal: Goal, results: Mapping[str, TraceResult]) -> bool:
    result = results.get(goal.trace)
    return result is not None and goal.peer in result.peers


def _goal_row(goal: Goal, results: Mapping[str, TraceResult], peak: float) -> str:
    claim, other = judge(goal, results, peak)
    sign = "at most " if goal.is_less_better else ""
    limits = f"{sign}{goal.at_least:g} | {goal.aim:g}"
    if claim.spread is None:
        return f"| {goal.work} | {limits} | - | {claim.why_not} |"
    median = claim.spread.median
    verdict = "missed"
    if goal.holds(median):
        verdict = "reached, and the aim" if goal.reaches_aim(median) else "reached"
    beside = f", against {other}" if other else ""
    return f"| {goal.work} | {limits} | {_told(claim.spread)} | {verdict}{beside} |"


def _start_row(results: Mapping[str, TraceResult]) -> str:
    """Starts are not between probes; all of this worker's with the 88 M model are taken."""
    found = spread(
        [
            seconds
            for result in results.values()
            for name, seconds in result.starts_s.items()
            if name.startswith("sluice") and result.model == "88M"
        ]
    )
    told = "not measured" if found is None else "reached" if found.median <= START_S else "missed"
    return (
        f"| seconds from start to ready, 88M | at most {START_S:g} | 3 | {_told(found)} | {told} |"
    )


def _growth(results: Mapping[str, TraceResult], peaks: Mapping[str, float]) -> Iterator[str]:
    """Tokens a second at each size, and how much longer each sequence takes in company."""
    sizes = [size for size in BATCHES if f"batch-{size}" in results]
    told = f"a sequence's time for a token, {sizes[-1]} over {sizes[0]} at once"
    yield f"\n| tokens/s at | {' | '.join(map(str, sizes))} | {told} |"
    yield "|---" * (len(sizes) + 2) + "|"
    batches = [results[f"batch-{size}"] for size in sizes]
    for peer in dict.fromkeys(name for result in batches for name in result.peers):
        speeds = []
        for result in batches:
            good = counted(result.runs, peer, peaks[result.machine.cpu])
            speeds.append(spread([value for run in good if (value := speed(run))]))
        first, last = speeds[0], speeds[-1]
        growth = (
            f"{sizes[-1] * first.median / sizes[0] / last.median:.1f}" if first and last else "-"
        )
        cells = " | ".join(f"{found.median:.0f}" if found else "-" for found in speeds)
        yield f"| {peer} | {cells} | {growth} |"
    commits: dict[str, list[str]] = {}
    for size, result in zip(sizes, batches, strict=True):
        commits.setdefault(result.versions.get("sluice", ""), []).append(str(size))
    if len(commits) > 1:
        told = "; ".join(f"{', '.join(of)}: {commit}" for commit, of in commits.items())
        yield f"\nNot all sizes are of the same Sluice, so compare columns with care: {told}."


def _told(found: Spread | None, digits: int = 2) -> str:
    if found is None:
        return "-"
    return f"{found.median:.{digits}f} ({found.least:.{digits}f} .. {found.most:.{digits}f})"


def _trace(result: TraceResult, peak: float) -> Iterator[str]:
    yield (
        f"{result.num_requests} requests, {result.prompt_tokens:,} tokens in, "
        f"{result.output_tokens:,} out; {result.model}; {result.date}; `{result.command}`\n"
    )
    online = TRACES[result.trace].is_online
    head = ["", "runs counted", "seconds", "tokens/s", "CPU-seconds", "of the peak"]
    head += ["sluice's P99 between, of it"] if online else ["sluice's tokens/s over it"]
    if online:
        head += ["first token P50, P99 ms", "between P50, P99 ms", "good, %", "smooth, %"]
    yield "| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|"
    for name, about in result.peers.items():
        if any(run.peer == name for run in result.runs):
            yield f"| {name}: {about} | " + " | ".join(_cells(result, name, peak, online)) + " |"
    for name, reason in result.left_out.items():
        yield f"\nLeft out: {name}, because {reason.rstrip('.')}."
    known = {run.peer for run in result.runs} | set(result.left_out)
    if not_run := [name for name in TAKING_PART[result.trace] if name not in known]:
        yield f"\nNot run here: {', '.join(not_run)}."
    if result.starts_s:
        started = ", ".join(f"{name} {seconds:.1f}" for name, seconds in result.starts_s.items())
        yield f"\nSeconds from start to ready: {started}."
    shares = [100 * run.others_cpu_s / run.wall_s for run in result.runs if not run.error]
    if idle := spread(shares):
        yield f"\nWhile one ran, all others together took {_told(idle, 1)} % of a processor."


def _cells(result: TraceResult, name: str, peak: float, online: bool) -> Iterator[str]:
    good = counted(result.runs, name, peak)
    total = sum(1 for run in result.runs if run.peer == name)
    yield f"{len(good)} of {total}"
    yield _told(spread([run.wall_s for run in good]))
    yield _told(spread([value for run in good if (value := speed(run))]), 0)
    yield _told(spread([run.cpu_s for run in good]))
    yield _told(spread([run.peak_fraction for run in good]))
    claim = ratio(result.runs, ("sluice", name), between if online else speed, peak)
    yield "1" if name == "sluice" else _told(claim.spread) if claim.spread else claim.why_not
    if online:
        yield _pair(good, "ttft_p50_ms", "ttft_p99_ms")
        yield _pair(good, "itl_p50_ms", "itl_p99_ms")
        for percent in (percent_good, percent_smooth):
            yield _told(spread([value for run in good if (value := percent(run)) is not None]), 0)


def _pair(runs: Sequence[Run], *names: str) -> str:
    values = [
        spread([v for run in runs if (v := getattr(run, name)) is not None]) for name in names
    ]
    return ", ".join("-" if value is None else f"{value.median:.0f}" for value in values)
