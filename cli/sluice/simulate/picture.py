"""The comparison as one picture. Imports matplotlib, which only the `demo` extra brings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D


def comparison_png(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for each service, noise and target: smooth shares by fixed cap, a colour for each
    trace and a line for each seed; ours as dots and AIMD as crosses, at the cap each ended with."""
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
            for row in rows:
                if here.items() <= row["cell"].items():
                    _draw(axis, row, colours[row["cell"]["trace"]])
    marks = [Line2D([], [], color=colours[trace], label=trace) for trace in traces]
    marks += [
        Line2D([], [], color="#444", marker=mark, linestyle="", label=name)
        for name, mark in (("ours", "o"), ("AIMD", "x"))
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks))
    for axis in axes[-1]:
        axis.set_xlabel("fixed cap")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _in_order(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _draw(axis: Axes, row: dict[str, Any], colour: str) -> None:
    by_cap = {int(cap): 100 * share for cap, share in row["oracle"]["smooth_by_cap"].items()}
    axis.plot(list(by_cap), list(by_cap.values()), color=colour, linewidth=1.0)
    for policy, mark in (("sluice", "o"), ("aimd", "x")):
        ended = row[policy]
        axis.plot(ended["last_cap"], 100 * ended["smooth_share"], mark, color=colour, markersize=5)
