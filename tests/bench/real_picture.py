"""The figures of `real_caps` as a picture. Imports matplotlib, which the `demo` extra brings."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from bench.real_rows import OURS, Row, best_fixed

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SMOOTH, GOOD, MARK = "#1f6fb4", "#a9c8e6", "#c2417c"


def real_png(rows: Sequence[Row], path: Path) -> None:
    """A column for each trace: shares by contender, and the caps that ours took."""
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure, axes = plt.subplots(
        2, len(traces), figsize=(5.5 * len(traces), 7), squeeze=False, layout="constrained"
    )
    for (shares, steps), trace in zip(axes.T, traces, strict=True):
        of_trace = [row for row in rows if row.trace == trace]
        _shares(shares, of_trace)
        shares.set_title(trace)
        _caps(steps, of_trace)
    axes[0][0].set_ylabel("% of all arrivals")
    axes[1][0].set_ylabel("cap")
    figure.suptitle("One real worker: fixed caps and ours (bars: means of the rounds)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shares(axis: plt.Axes, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.contender for row in rows))
    for place, name in enumerate(names):
        mine = [row for row in rows if row.contender == name]
        for shift, colour, values in (
            (-0.2, SMOOTH, [100 * row.smooth_share for row in mine]),
            (0.2, GOOD, [100 * row.good_share for row in mine]),
        ):
            share = sum(values) / len(values)
            edge = MARK if name == OURS else "none"
            axis.bar(place + shift, share, 0.4, color=colour, edgecolor=edge, linewidth=1.5)
            axis.plot([place + shift] * len(values), values, "k.", markersize=4)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (SMOOTH, GOOD)]
    axis.legend(handles, ["smooth", "good"], fontsize=8)
    axis.set_xticks(range(len(names)), names, rotation=30)
    axis.set_ylim(0, 103)


def _caps(axis: plt.Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        if row.contender == OURS:
            times, caps = zip(*row.cap_path, strict=True)
            axis.step([*times, row.seconds], [*caps, caps[-1]], where="post", color=MARK)
            if best := best_fixed(rows, row.trace, row.round):
                axis.axhline(best.first_cap, color=SMOOTH, linestyle="--", linewidth=0.8)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("seconds (red: ours; dashed: the best fixed cap)")
