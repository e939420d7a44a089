"""A timeline as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo.timeline import Row, is_held
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WORDS = {
    "warmup": "few clients",
    "capacity": "many",
    "low": "half of that load",
    "high": "1.3 times of it",
    "ebb": "a third",
    "idle": "",
}
"""What the load does in each phase of the demo."""
SHADES = {"warmup": "#eef3f8", "capacity": "#dce9f5", "low": "#f6f6f6", "high": "#fdeaea"}


def timeline_png(
    rows: Sequence[Row],
    ttft_ms: float,
    itl_ms: float,
    title: str,
    path: Path,
    phases: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Four panels over one time axis: load, cap and batch, pods, P99 against targets. `phases`:
    what the load's clients tell of each, for the line of what they sent."""
    start = rows[0].t_s
    t = [r.t_s - start for r in rows]
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplots(4, 1, sharex=True)
    _draw_sent(axes[0], phases, start)
    arrivals = [r.arrivals_per_s or 0.0 for r in rows]
    axes[0].plot(t, arrivals, color="#444", linewidth=1, label="seen by the operator")
    axes[0].set_ylabel("requests / s")
    axes[1].step(t, [r.cap for r in rows], where="post", label="cap", color="#1f6fb4")
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
        axes[3].axhline(target, color=colour, linestyle="--", linewidth=0.8)
        over = [v is not None and v > target for v in values]
        highs = [v or target for v in values]
        axes[3].fill_between(t, target, highs, where=over, color=colour, alpha=0.15, linewidth=0)
    axes[3].set_yscale("log")
    axes[3].set_ylabel("ms (dashed: target)")
    axes[3].set_xlabel("seconds")
    _shade_phases(axes, rows, start)
    _mark_second_pod(axes, rows, start)
    _mark_recovery(axes[3], rows, ttft_ms, itl_ms)
    for axis in axes:
        axis.legend(loc="upper right")
    figure.suptitle(f"{title}: load, cap, pods, P99 of the last window")
    figure.savefig(path, dpi=110)


def _mark_second_pod(axes: Sequence[Axes], rows: Sequence[Row], start: float) -> None:
    at_s = next((row.t_s - start for row in rows if row.ready >= 2), None)
    if at_s is None:
        return
    for axis in axes:
        axis.axvline(at_s, color="#2a8f4d", linestyle=":", linewidth=1.2)
    axes[2].annotate("second pod ready", (at_s, 0.1), (6, 0), textcoords="offset points")


def _mark_recovery(axis: Axes, rows: Sequence[Row], ttft_ms: float, itl_ms: float) -> None:
    """The look from which on both P99s stay within their targets, after a second pod was ready."""
    late = [row for row in rows if not is_held(row, ttft_ms, itl_ms)]
    if not late or late[-1] is rows[-1] or not any(r.ready >= 2 for r in rows):
        return
    at_s = rows[rows.index(late[-1]) + 1].t_s - rows[0].t_s
    axis.axvline(at_s, color="#444", linestyle=":", linewidth=1.2)
    axis.annotate(
        "both within their targets again", (at_s, 0.6), (6, 0), ("data", "axes fraction"),
        textcoords="offset points",
    )  # fmt: skip


def _draw_sent(axis: Axes, phases: Sequence[Mapping[str, Any]], start: float) -> None:
    """A line a phase at the rate that its clients sent."""
    for number, phase in enumerate(phases):
        end_s, rate = phase["t_s"] - start, phase["requests_per_s"]
        label = "sent by the clients" if number == 0 else None
        times = (end_s - phase["seconds"], end_s)
        axis.plot(times, (rate, rate), color="#1f6fb4", linewidth=3, alpha=0.5, label=label)


def _shade_phases(axes: Sequence[Axes], rows: Sequence[Row], start: float) -> None:
    begin, bands = 0, ("#ffffff", "#f2f2f2")
    for i in range(1, len(rows) + 1):
        if i < len(rows) and rows[i].phase == rows[begin].phase:
            continue
        left, right = rows[begin].t_s - start, rows[min(i, len(rows) - 1)].t_s - start
        for axis in axes:
            axis.axvspan(left, right, color=SHADES.get(rows[begin].phase, bands[0]), zorder=0)
        axes[0].text(
            (left + right) / 2,
            axes[0].get_ylim()[1],
            WORDS.get(rows[begin].phase, rows[begin].phase),
            ha="center",
            va="bottom",
        )
        begin, bands = i, bands[::-1]
