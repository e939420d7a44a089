"""The comparison as one picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from research.summary import share_at


def comparison_png(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each service, noise and target: smooth shares by fixed cap, a colour for each
    trace: the mean over the seeds as a line, all of them as a band. Ours as dots, by deadline as
    triangles and AIMD as crosses, their mean at the median of the caps that they ended with."""
    across = _in_order((row["cell"]["service"], row["cell"]["noise"]) for row in rows)
    down = _in_order(row["cell"]["target"] for row in rows)
    traces = sorted({row["cell"]["trace"] for row in rows})
    colours = {trace: f"C{number}" for number, trace in enumerate(traces)}
    figure, axes = plt.subplots(
        len(down), len(across), figsize=(4.2 * len(across), 3.4 * len(down)), squeeze=False,
        layout="constrained", sharey=True,
    )  # fmt: skip
    for line, target in zip(axes, down, strict=True):
        line[0].set_ylabel("smooth requests, %")
        for axis, (service, noise) in zip(line, across, strict=True):
            axis.set_title(f"{service}, {target} targets, {noise}", fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_ylim(-3, 103)
            here = {"service": service, "noise": noise, "target": target}
            for trace, colour in colours.items():
                cell = {**here, "trace": trace}
                seeds = [row for row in rows if row["cell"] == cell]
                if seeds:
                    _draw(axis, seeds, colour)
    marks = [Line2D([], [], color=colours[trace], label=trace) for trace in traces]
    marks += [
        Line2D([], [], color="#444", marker=mark, linestyle="", label=name)
        for name, mark in (("ours", "o"), ("ours by deadline", "^"), ("AIMD", "x"))
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=min(len(marks), 3 * len(across)))
    for axis in axes[-1]:
        axis.set_xlabel("fixed cap")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _in_order(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _draw(axis: Axes, seeds: Sequence[dict[str, Any]], colour: str) -> None:
    """One trace. Seeds that did not try a cap count there as between those that they tried."""
    curves = [
        sorted((int(cap), 100 * share) for cap, share in row["oracle"]["smooth_by_cap"].items())
        for row in seeds
    ]
    low, high = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    caps = sorted({cap for curve in curves for cap, _ in curve if low <= cap <= high})
    shares = [[share_at(cap, curve) for curve in curves] for cap in caps]
    axis.plot(caps, [fmean(share) for share in shares], color=colour, linewidth=1.2)
    bounds = [min(share) for share in shares], [max(share) for share in shares]
    axis.fill_between(caps, *bounds, color=colour, alpha=0.12, linewidth=0)
    for policy, mark in (("sluice", "o"), ("deadline", "^"), ("aimd", "x")):
        if not (ended := [row[policy] for row in seeds if policy in row]):
            continue
        share = 100 * fmean(one["smooth_share"] for one in ended)
        axis.plot(median(one["last_cap"] for one in ended), share, mark, color=colour, markersize=5)
