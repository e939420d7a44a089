"""The comparison as one picture. Imports matplotlib, which only the `demo` extra brings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = 4


def comparison_png(
    summary: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], path: Path
) -> None:
    """A panel for each cell: the smooth share by fixed cap, and ours and AIMD as lines."""
    height = -(-len(summary) // COLUMNS)
    figure, axes = plt.subplots(
        height, COLUMNS, figsize=(14, 2.9 * height), squeeze=False, layout="constrained",
        sharey=True,
    )  # fmt: skip
    for axis in axes.flat[len(summary) :]:
        axis.set_visible(False)
    for axis, cell in zip(axes.flat, summary, strict=False):
        keys = ("service", "target", "noise", "trace")
        for row in rows:
            if all(row["cell"][key] == cell[key] for key in keys):
                by_cap = {int(c): s for c, s in row["oracle"]["smooth_by_cap"].items()}
                shares = [100 * share for share in by_cap.values()]
                axis.plot(list(by_cap), shares, color="#8fa8bf", linewidth=0.9)
        for name, colour, style in (("sluice", "#c2417c", "-"), ("aimd", "#777", ":")):
            axis.axhline(100 * cell["smooth"][name], color=colour, linestyle=style)
        axis.set_xscale("log", base=2)
        axis.set_ylim(-3, 103)
        axis.set_title(", ".join(cell[key] for key in keys), fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("smooth requests, %")
    figure.supxlabel("fixed cap, one line a seed (ours: red; AIMD: dotted)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
