"""The figures of `real_caps` as a picture. Imports matplotlib, which the `demo` extra brings."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from bench.real_rows import OURS, Row, best_fixed

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SHADES = {"smooth": "#1f6fb4", "good": "#a9c8e6"}
MARK = "#c2417c"


def real_png(rows: Sequence[Row], path: Path) -> None:
    """A column for each trace: shares by contender, and the caps that ours took."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    size = (5.5 * len(traces), 7)
    figure, axes = plt.subplots(2, len(traces), figsize=size, squeeze=False, layout="constrained")
    for (shares, caps), trace in zip(axes.T, traces, strict=True):
        of_trace = [row for row in rows if row.trace == trace]
        places, names = range(len(of_trace)), [row.contender for row in of_trace]
        for shift, (name, colour) in zip((-0.2, 0.2), SHADES.items(), strict=True):
            values = [100 * getattr(row, f"{name}_share") for row in of_trace]
            shares.bar([at + shift for at in places], values, 0.4, color=colour, label=name)
        shares.set_xticks(places, names, rotation=30)
        shares.set_ylim(0, 103)
        shares.set_title(trace)
        shares.legend(fontsize=8)
        _caps(caps, of_trace)
    axes[0][0].set_ylabel("% of all arrivals")
    axes[1][0].set_ylabel("cap")
    figure.suptitle("One real worker: fixed caps and ours")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _caps(axis: plt.Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.contender == OURS:
            times, caps = zip(*row.cap_path, strict=True)
            axis.step([*times, row.seconds], [*caps, caps[-1]], where="post", color=MARK)
    if best := best_fixed(rows, rows[0].trace):
        axis.axhline(best.cap_path[0][1], color=SHADES["smooth"], linestyle="--", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("seconds (red: ours; dashed: the best fixed cap)")
