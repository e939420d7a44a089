"""The figures of `vllm_gate`: who is best, what is compared with what, table and picture."""

from collections.abc import Iterator, Sequence
from math import nan
from pathlib import Path
from statistics import median

from bench.real_picture import MARK, SHADES, shares
from bench.real_rows import (
    BEFORE,
    Row,
    Wanted,
    by_contender,
    compared,
    drifts,
    ranked,
    runs,
    table_of,
    verdict,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sluice.measure.plot import log_scale

STOCK, GATE, INNER = "stock", "gate", "gate + inner"
PAIR = "the best pair"
COLOURS = {GATE: SHADES["smooth"], BEFORE: SHADES["good"], INNER: MARK}
"""Of lines of caps."""


WANTED = {
    "bursts": (
        Wanted("good_share", STOCK, 1.0),
        Wanted("smooth_share", STOCK, 2.5),
        Wanted("smooth_share", PAIR, 2.0),
        Wanted("tokens_per_s", STOCK, 0.98),
        Wanted("p99_itl_ms", STOCK, 0.2, is_least=False),
    ),
    "steps": (Wanted("good_share", STOCK, 1.0), Wanted("smooth_share", PAIR, 1.0)),
}
"""What our scheduler is to reach in the median of the repeats."""


def best(rows: Sequence[Row], trace: str, num: int) -> list[str]:
    """The pairs C/B that are best in hindsight."""
    found = by_contender(rows, trace)
    return ranked({name: done for name, done in found.items() if "/" in name})[:num]


def table(rows: Sequence[Row]) -> str:
    """A line of Markdown for each contender on each trace; the best pair in bold."""
    return table_of(in_order(rows), lambda trace: next(iter(best(rows, trace, 1)), None))


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Traces as they were run, then stock, pairs by budget and cap, what is tuned."""
    traces = list(dict.fromkeys(row.trace for row in rows))

    def place(row: Row) -> tuple[int, int, int, int, int]:
        cap, _, budget = row.contender.partition("/")
        kind = 1 if budget else [STOCK, "", GATE, BEFORE, INNER].index(cap)
        pair = (int(budget), int(cap)) if budget else (0, 0)
        return traces.index(row.trace), kind, *pair, row.repeat

    return sorted(rows, key=place)


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """For each trace a line for each target, then what else is compared, each as ratios within a
    repeat: median, least and most."""
    for trace in dict.fromkeys(row.trace for row in rows):
        pair = next(iter(best(rows, trace, 1)), "")
        for wanted in WANTED.get(trace, ()):
            against = wanted._replace(other=pair) if wanted.other == PAIR else wanted
            yield from verdict(rows, trace, INNER, against)
        tuned = [name for name in (INNER, BEFORE, GATE) if runs(rows, trace, name)]
        for name in tuned:
            for other in (STOCK, pair, *tuned[tuned.index(name) + 1 :]):
                if runs(rows, trace, other) and (name == INNER or other == STOCK):
                    yield compared(rows, trace, name, other)
        yield from drifts(rows, trace)


def rows_png(rows: Sequence[Row], path: Path) -> None:
    """A column for each trace: shares and P99 between tokens by contender, caps over time."""
    rows = in_order(rows)
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure = Figure((6 * len(traces), 9), layout="constrained")
    axes = figure.subplots(3, len(traces), squeeze=False)
    for column, trace in zip(axes.T, traces, strict=True):
        shares(column[0], by_contender(rows, trace))
        column[0].set_title(trace)
        _gaps_of(column[1], by_contender(rows, trace))
        _caps_of(column[2], rows, trace)
    for axis, label in zip(axes[:, 0], ("% of all arrivals", "P99 gap, ms", "cap"), strict=True):
        axis.set_ylabel(label)
    figure.suptitle("One real vLLM: as it comes, at fixed cap/budget, and behind the gate")
    figure.savefig(path, dpi=110)


def _gaps_of(axis: Axes, found: dict[str, list[Row]]) -> None:
    """Bars are medians over the repeats, which are the dots; dashed: the target."""
    for place, done in enumerate(found.values()):
        values = [row.p99_itl_ms or nan for row in done]
        axis.bar(place, median(values), 0.6, color=SHADES["smooth"])
        axis.plot([place] * len(values), values, ".", color=MARK, markersize=4)
        axis.hlines(median(row.itl_target_ms for row in done), place - 0.4, place + 0.4, "k", "--")
    axis.set_xticks(range(len(found)), list(found), rotation=30)
    log_scale(axis)
    axis.minorticks_off()


def _caps_of(axis: Axes, rows: Sequence[Row], trace: str) -> None:
    for name, colour in COLOURS.items():
        for repeat, row in enumerate(runs(rows, trace, name)):
            times, caps = zip(*row.cap_path, strict=True)
            ends = [*times, row.seconds], [*caps, caps[-1]]
            axis.step(*ends, where="post", color=colour, alpha=0.7, label="" if repeat else name)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("seconds")
    axis.legend(fontsize=8)
