"""The curve of `sluice bench` as a picture. Imports matplotlib: the `plots` extra brings it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator


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
        log_scale(axis)
        axis.set_ylabel("ms")
    batches = [p["effective_batch"] or float("nan") for p in points]
    batch.plot(caps, batches, "o-", color="#e08214", label="tokens of a step")
    batch.plot(caps, caps, ":", color="#999", label="the cap")
    batch.set_ylabel("sequences")
    for axis in axes.flat:
        _mark_caps(axis, result)
    for axis in (first, batch, gap):
        axis.legend(fontsize=8)
    figure.supxlabel("max_num_seqs (band: recommended; dotted line: knee)")
    figure.suptitle(f"{result['model']}: the same bursts at each cap")
    figure.savefig(path, dpi=110)


def log_scale(axis: Axes) -> None:
    """Make the y axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:g}")


def _mark_caps(axis: Axes, result: Mapping[str, Any]) -> None:
    axis.axvline(result["recommended"], color="#2a8f4d", linewidth=5, alpha=0.2)
    axis.axvline(result["knee"], color="#444", linewidth=0.8, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks([point["cap"] for point in result["points"]])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()


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
