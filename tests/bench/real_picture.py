"""The figures of `real_caps` as a picture."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.real_rows import OURS, Row, best_fixed, by_contender, runs
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SHADES = {"smooth": "#1f6fb4", "good": "#a9c8e6"}
MARK = "#c2417c"


def real_png(rows: Sequence[Row], path: Path) -> None:
    """A column for each trace: shares by contender, and the caps that ours took."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    size = (5.5 * len(traces), 7)
    figure = Figure(size, layout="constrained")
    axes = figure.subplots(2, len(traces), squeeze=False)
    for (top, caps), trace in zip(axes.T, traces, strict=True):
        shares(top, by_contender(rows, trace))
        top.set_title(trace)
        _caps(caps, rows, trace)
    axes[0][0].set_ylabel("% of all arrivals")
    axes[1][0].set_ylabel("cap")
    figure.suptitle("One real worker: fixed caps and ours")
    figure.savefig(path, dpi=110)


def shares(axis: Axes, found: dict[str, list[Row]]) -> None:
    """Bars are medians over the repeats, which are the dots."""
    for shift, (name, colour) in zip((-0.2, 0.2), SHADES.items(), strict=True):
        for place, done in enumerate(found.values()):
            values = [100 * getattr(row, f"{name}_share") for row in done]
            label = name if place == 0 else None
            axis.bar(place + shift, median(values), 0.4, color=colour, label=label)
            if len(values) > 1:
                axis.plot([place + shift] * len(values), values, ".", color=MARK, markersize=4)
    axis.set_xticks(range(len(found)), list(found), rotation=30)
    axis.set_ylim(0, 118)
    axis.legend(fontsize=8, loc="upper left", ncols=2)


def _caps(axis: Axes, rows: Sequence[Row], trace: str) -> None:
    for row in runs(rows, trace, OURS):
        times, caps = zip(*row.cap_path, strict=True)
        axis.step([*times, row.seconds], [*caps, caps[-1]], where="post", color=MARK, alpha=0.7)
    if best := best_fixed(rows, trace):
        cap = runs(rows, trace, best)[0].cap_path[0][1]
        axis.axhline(cap, color=SHADES["smooth"], linestyle="--", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("seconds (red: ours; dashed: the best fixed cap)")
