"""*Rim*: one picture for each trace. Points are runs, bars their medians; hollow: not counted."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.goals import between, first, percent_good, percent_smooth, speed
from bench.peers.results import TraceResult
from bench.peers.rounds import Run, Value, spread
from bench.peers.traces import TRACES
from bench.peers.variants import VARIANTS
from matplotlib.figure import Figure

COLOURS = {
    "sluice": "#2166ac",
    "vllm": "#e08214",
    "transformers": "#7fbf7b",
    "llama.cpp": "#9970ab",
}
DPI = 110


def colour(peer: str) -> str:
    """One for each project."""
    return next((c for name, c in COLOURS.items() if peer.startswith(name)), "#666")


def _bars(axes: Any, runs: Sequence[Run], value: Value, best_gflops: float, label: str) -> None:
    """One row for each peer, fastest runs as they came."""
    peers = list(dict.fromkeys(run.peer for run in runs if not run.error))
    for row, peer in enumerate(peers):
        good: list[float] = []
        lost: list[float] = []
        for run in runs:
            if run.peer == peer and not run.error and (number := value(run)) is not None:
                (good if run.counts(best_gflops) else lost).append(number)
        if middle := spread(good):
            axes.barh(row, middle.median, color=colour(peer), alpha=0.5)
        axes.plot(good, [row] * len(good), "o", color=colour(peer), markersize=4)
        axes.plot(lost, [row] * len(lost), "o", color=colour(peer), markersize=4, fillstyle="none")
    axes.set_yticks(range(len(peers)), peers)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(label)


def plot_trace(result: TraceResult, best_gflops: float, path: Path) -> None:
    """Tokens a second of each peer; of waves the latencies that count."""
    online = TRACES[result.trace].is_online
    values = [(speed, "output tokens a second")]
    if online:
        values = [(between, "P99 between tokens, ms"), (first, "P99 of first tokens, ms")]
        if any(run.good_share is not None for run in result.runs):
            values += [(percent_good, "good requests, %"), (percent_smooth, "smooth requests, %")]
    num_peers = len({run.peer for run in result.runs})
    wide = min(len(values), 2)
    rows = len(values) // wide
    size = (5.5 * wide + 2, 1.4 + 0.4 * num_peers * rows)
    figure = Figure(figsize=size, layout="constrained")
    all_axes = figure.subplots(rows, wide, squeeze=False)
    for axes, (value, label) in zip(all_axes.flat, values, strict=True):
        _bars(axes, result.runs, value, best_gflops, label)
    figure.suptitle(f"{result.trace}: {result.about} ({result.model}, {result.machine.cpu})")
    figure.savefig(path, dpi=DPI)


def plot_batches(
    results: Mapping[int, TraceResult], peaks: Mapping[str, float], path: Path
) -> None:
    """Tokens a second by the sequences that run at once."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    peers = dict.fromkeys(run.peer for r in results.values() for run in r.runs if not run.error)
    for peer in peers:
        sizes, middles = [], []
        for size, result in results.items():
            best_gflops = peaks[result.machine.cpu]
            good = [r for r in result.runs if r.peer == peer and r.counts(best_gflops)]
            numbers = [number for run in good if (number := speed(run)) is not None]
            axes.plot([size] * len(numbers), numbers, ".", color=colour(peer), alpha=0.5)
            if middle := spread(numbers):
                sizes.append(size)
                middles.append(middle.median)
        variant = VARIANTS[peer]
        style = ":" if variant.pads_prompts else "--" if variant.is_static else "-"
        axes.plot(sizes, middles, style, color=colour(peer), label=peer)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(results), [str(size) for size in results])
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("output tokens a second")
    axes.legend()
    figure.savefig(path, dpi=DPI)
