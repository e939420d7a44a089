"""The figures of `vllm_gate`: who is best, what is compared with what, table and picture."""

from collections.abc import Callable, Iterator, Sequence
from math import nan
from pathlib import Path
from statistics import median

from bench.real_picture import MARK, SHADES, shares
from bench.real_rows import Row, by_contender, ranked, runs, spread, table_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sluice.measure.plot import log_scale

STOCK, GATE, INNER = "stock", "gate", "gate + inner"


def best(rows: Sequence[Row], trace: str, num: int) -> list[str]:
    """The pairs C/B that are best in hindsight."""
    found = by_contender(rows, trace)
    return ranked({name: done for name, done in found.items() if "/" in name})[:num]


def table(rows: Sequence[Row]) -> str:
    """A line of Markdown for each contender on each trace; the best pair in bold."""
    return table_of(in_order(rows), lambda trace: next(iter(best(rows, trace, 1)), None))


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Traces as they were run, then stock, pairs by budget and cap, the gates."""
    traces = list(dict.fromkeys(row.trace for row in rows))

    def place(row: Row) -> tuple[int, int, int, int, int]:
        cap, _, budget = row.contender.partition("/")
        kind = 1 if budget else [STOCK, "", GATE, INNER].index(cap)
        pair = (int(budget), int(cap)) if budget else (0, 0)
        return traces.index(row.trace), kind, *pair, row.repeat

    return sorted(rows, key=place)


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each comparison, each of runs of one repeat: median, least and most."""
    for trace in dict.fromkeys(row.trace for row in rows):

        def each(ours: str, other: str, of: Callable[[Row, Row], float], trace: str = trace) -> str:
            found = {row.repeat: row for row in runs(rows, trace, other)}
            mine = [row for row in runs(rows, trace, ours) if row.repeat in found]
            return spread([of(row, found[row.repeat]) for row in mine], ".2f")

        def smooth(row: Row, other: Row) -> float:
            return row.smooth_share / other.smooth_share if other.smooth_share else nan

        of_pair = "".join(
            f"{each(INNER, pair, smooth)} times the smooth share of {pair}, the best fixed pair; "
            for pair in best(rows, trace, 1)
        )
        yield (
            f"{trace}: {INNER} has {of_pair}{each(INNER, STOCK, _gaps)} times stock's P99 between "
            f"tokens at {each(INNER, STOCK, _tokens)} of its tokens/s. {GATE} has "
            f"{each(GATE, STOCK, _points)} points of smooth requests more than stock, "
            f"{each(GATE, STOCK, _good_points)} of good ones."
        )


def _gaps(row: Row, other: Row) -> float:
    return row.p99_itl_ms / other.p99_itl_ms if row.p99_itl_ms and other.p99_itl_ms else nan


def _tokens(row: Row, other: Row) -> float:
    return row.tokens_per_s / other.tokens_per_s


def _points(row: Row, other: Row) -> float:
    return 100 * (row.smooth_share - other.smooth_share)


def _good_points(row: Row, other: Row) -> float:
    return 100 * (row.good_share - other.good_share)


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
    for name, colour in ((GATE, SHADES["smooth"]), (INNER, MARK)):
        for repeat, row in enumerate(runs(rows, trace, name)):
            times, caps = zip(*row.cap_path, strict=True)
            ends = [*times, row.seconds], [*caps, caps[-1]]
            axis.step(*ends, where="post", color=colour, alpha=0.7, label="" if repeat else name)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("seconds")
    axis.legend(fontsize=8)
