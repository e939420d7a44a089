"""What was measured, as pictures. Imports matplotlib, which only the `demo` extra brings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sluice.timeline import Row

SHADES = {"warmup": "#eef3f8", "capacity": "#dce9f5", "low": "#f6f6f6", "high": "#fdeaea"}


def timeline_png(
    rows: Sequence[Row], ttft_ms: float | None, itl_ms: float | None, path: Path
) -> None:
    """Four panels over one time axis: arrivals, cap and batch, pods, P99 against targets."""
    start = rows[0].t_s
    t = [r.t_s - start for r in rows]
    figure = Figure(figsize=(11, 10), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    axes[0].plot(t, [r.arrivals_per_s or 0.0 for r in rows], color="#444")
    axes[0].set_ylabel("arrivals / s")
    axes[1].step(t, [r.cap for r in rows], where="post", label="max_num_seqs", color="#1f6fb4")
    batch = [r.effective_batch or 0.0 for r in rows]
    axes[1].plot(t, batch, label="effective batch", color="#e08214", linewidth=1)
    axes[1].set_ylabel("sequences")
    axes[2].step(t, [r.replicas for r in rows], where="post", label="replicas", color="#999")
    axes[2].step(t, [r.ready for r in rows], where="post", label="ready", color="#2a8f4d")
    axes[2].set_ylabel("pods")
    axes[2].set_ylim(0, max(r.replicas for r in rows) + 0.5)
    for values, target, label, colour in (
        ([r.ttft_p99_ms for r in rows], ttft_ms, "first token", "#7b3294"),
        ([r.itl_p99_ms for r in rows], itl_ms, "inter token", "#c2417c"),
    ):
        axes[3].plot(t, [v or float("nan") for v in values], label=f"P99 {label}", color=colour)
        if target:
            axes[3].axhline(target, color=colour, linestyle="--", linewidth=0.8)
    axes[3].set_yscale("log")
    axes[3].set_ylabel("ms (dashed: target)")
    axes[3].set_xlabel("seconds")
    for axis in axes[1:]:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    _shade_phases(axes, rows, start)
    figure.suptitle("One InferenceService: load, cap, pods, P99")
    figure.savefig(path, dpi=110)


def _shade_phases(axes: Sequence[Axes], rows: Sequence[Row], start: float) -> None:
    begin, bands = 0, ("#ffffff", "#f2f2f2")
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i].phase == rows[begin].phase:
            continue
        left, right = rows[begin].t_s - start, rows[min(i, len(rows) - 1)].t_s - start
        for axis in axes:
            axis.axvspan(left, right, color=SHADES.get(rows[begin].phase, bands[0]), zorder=0)
        axes[0].text(
            (left + right) / 2, axes[0].get_ylim()[1], rows[begin].phase, ha="center", va="bottom"
        )
        begin, bands = i, bands[::-1]


def caps_png(result: Mapping[str, Any], path: Path) -> None:
    """Four panels over the cap: throughput and goodput, first token, gap, effective batch."""
    points = result["points"]
    caps = [p["cap"] for p in points]
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    rate, first, batch, gap = axes.flat
    _spread(rate, points)
    goodput = rate.twinx()
    if len(result["targets"]) > 1:
        goodput.plot(caps, [p["goodput_rps"] for p in points], "s--", color="#2a8f4d")
    goodput.set_ylabel("good requests / s (dashed)", color="#2a8f4d")
    goodput.set_ylim(bottom=0)
    for axis, name, label, colour in (
        (first, "ttft_ms", "first token", "#7b3294"),
        (gap, "itl_ms", "gap between tokens", "#c2417c"),
    ):
        for q, style in (("p50", "o:"), ("p99", "o-")):
            values = [p[name][q] or float("nan") for p in points]
            axis.plot(caps, values, style, color=colour, label=f"{q.upper()} {label}")
        if name.removesuffix("_ms") in points[0]["over"]:
            target = points[0]["over"][name.removesuffix("_ms")]["target_ms"]
            axis.axhline(target, color=colour, linestyle="--", linewidth=0.8, label="target")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_ylabel("ms")
    batches = [p["effective_batch"] or float("nan") for p in points]
    batch.plot(caps, batches, "o-", color="#e08214", label="tokens of a step")
    batch.plot(caps, caps, ":", color="#999", label="the cap")
    batch.set_ylabel("sequences")
    for axis in axes.flat:
        axis.axvline(result["recommended"], color="#2a8f4d", linewidth=5, alpha=0.2)
        axis.axvline(result["knee"], color="#444", linewidth=0.8, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_xticks(caps, [str(cap) for cap in caps])
        axis.minorticks_off()
    for axis in (first, batch, gap):
        axis.legend(fontsize=8)
    figure.supxlabel("max_num_seqs (band: recommended; dotted line: knee)")
    figure.suptitle(f"{result['model']}: the same bursts at each cap")
    figure.savefig(path, dpi=110)


def _spread(axis: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Throughput with the quartiles of its waves."""
    rates = [p["tokens_per_s"] for p in points]
    quartiles = [p["tokens_per_s_quartiles"] for p in points]
    below = [max(0.0, rate - q[0]) for rate, q in zip(rates, quartiles, strict=True)]
    above = [max(0.0, q[2] - rate) for rate, q in zip(rates, quartiles, strict=True)]
    caps = [p["cap"] for p in points]
    axis.errorbar(caps, rates, [below, above], fmt="o-", color="#1f6fb4", capsize=3)
    axis.set_ylabel("tokens / s (bars: quartiles of waves)", color="#1f6fb4")
    axis.set_ylim(bottom=0)
