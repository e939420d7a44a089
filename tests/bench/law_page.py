"""Tables and picture of `bench.law`. Pure."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from bench.law_runs import EARLY_S, MACHINES, STOCK, Cell, Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

EXPLAINED = f"""\
Each figure is the mean of the seeds, with the least and the most in brackets. Shares are of all
requests, from a cold start; "first {EARLY_S:g} s" are shares of what came in them. A request is
*good* if its first token and the mean of its gaps are in time, and *smooth* if its first token is
and at most 1 % of its gaps are late.

- **stock** is vLLM as it comes: 128 sequences, 2,048 tokens a step, by arrival.
- **best ...** is the best of its kind by smooth requests, chosen for each row after the runs: a
  *pair* of cap and budget of stock, a *cap* of ours without the tuner, or a cap with *whole*
  chunks, which is ours without a target for gaps.
- **ours** has the law of a step: inside of stock vLLM on the CPU, with worker and tuner on the GPU.
- **before** is the older commit, on the same requests.
"""
HEAD = ("load", "contender", "good, %", "smooth, %")
EARLY_HEAD = (f"first {EARLY_S:g} s: good, %", "smooth, %")
REST_HEAD = ("first token P50, s", "P99, s", "gap P99, ms", "tokens/s", "cap changes")
FAMILIES = ("pair", "whole", "cap")
BEFORE = "before"
COLOURS = {STOCK: "C7", "best pair": "C0", "best whole": "C2", "best cap": "C1", "ours": "C3",
           "before": "C4", "before, best cap": "C5"}  # fmt: skip


class Shown(NamedTuple):
    """A line of a table: the runs of one contender in one cell."""

    label: str
    kind: str
    rows: Sequence[Row]

    def mean(self, figure: Callable[[Row], float]) -> float:
        return fmean(map(figure, self.rows))


def shown(now: Sequence[Row], before: Sequence[Row]) -> dict[Cell, list[Shown]]:
    """The contenders of each cell that a reader compares, in the order of the cells."""
    of_cells: dict[Cell, list[Shown]] = {}
    for cell in dict.fromkeys(row.cell for row in now):
        lines = [*_of_checkout([row for row in now if row.cell == cell], "")]
        lines[-1:-1] = _of_checkout([row for row in before if row.cell == cell], BEFORE)
        of_cells[cell] = lines
    return of_cells


def _of_checkout(rows: Sequence[Row], checkout: str) -> Iterator[Shown]:
    """Stock, the best of each family, ours."""
    named = {name: list(runs) for name, runs in groupby(sorted(rows, key=_name), _name)}
    prefix = f"{checkout}, " if checkout else ""
    if STOCK in named:
        yield Shown(STOCK, STOCK, named[STOCK])
    for family in FAMILIES:
        members = [name for name in named if name.split()[0] == family]
        if members:
            best = max(members, key=lambda name: _rank(named[name]))
            kind = f"{prefix}best {family}"
            yield Shown(f"{kind} ({best.split()[1]})", kind, named[best])
    if "ours" in named:
        label = checkout or "ours"
        yield Shown(label, label, named["ours"])


def _name(row: Row) -> str:
    return row.contender


def _rank(rows: Sequence[Row]) -> tuple[float, float]:
    return fmean(row.smooth for row in rows), fmean(row.good for row in rows)


def page(now: Sequence[Row], before: Sequence[Row], per_s: dict[str, float]) -> str:
    """Everything in Markdown."""
    of_cells = shown(now, before)
    parts = [EXPLAINED, "## In short\n\n" + _summary(of_cells)]
    for machine in dict.fromkeys(cell.machine for cell in of_cells):
        parts.append(f"## {machine}\n\n{_described(machine, per_s[machine])}\n\n")
        early_head = EARLY_HEAD if _is_gpu(machine) else ()
        parts[-1] += _table((*HEAD, *early_head, *REST_HEAD), _lines(of_cells, machine))
    return "\n".join(parts)


def _described(name: str, per_s: float) -> str:
    machine = MACHINES[name]
    p, lengths, due_s = machine.params, machine.lengths, machine.ttft_ms / 1e3
    launch = f" + {p.chunk_ms:g} with a prompt chunk" if p.chunk_ms else ""
    extras = [f"noise of {p.noise:.0%}"]
    if p.hiccup_share:
        extras.append(f"{p.hiccup_ms:g} ms more in {p.hiccup_share:.0%} of the steps")
    if p.stall_every_s:
        least, most = p.stall_ms
        extras.append(f"stalls of {least:g} to {most:g} ms about every {p.stall_every_s:g} s")
    if p.first_size_ms:
        extras.append(f"about {p.first_size_ms:g} ms more in the first step of each size")
    return (
        f"A step takes {p.a:g} + {p.b:g} decodes + {p.c:g} KV tokens + {p.d:g} prompt tokens"
        f"{launch} ms; {', '.join(extras)}.\nDue are first tokens in {due_s:g} s and"
        f" gaps in {machine.itl_ms:g} ms; {lengths.prompt:g} tokens come and {lengths.output:g} go,"
        f" for {machine.seconds:g} s.\nLoad 1 is {per_s:.2f} requests/s, which {machine.clients}"
        f" clients in a closed loop get."
    )


def _is_gpu(machine: str) -> bool:
    return MACHINES[machine].burst_s is not None


def _lines(of_cells: dict[Cell, list[Shown]], machine: str) -> Iterator[list[str]]:
    for cell, lines in of_cells.items():
        if cell.machine == machine:
            load = f"{cell.trace} {cell.load:g}"
            for index, line in enumerate(lines):
                yield ["" if index else load, *_figures(line, has_early=_is_gpu(machine))]


def _figures(line: Shown, *, has_early: bool) -> list[str]:
    early = (lambda r: 100 * r.early_good, lambda r: 100 * r.early_smooth)
    return [
        line.label,
        _spread(line, lambda r: 100 * r.good),
        _spread(line, lambda r: 100 * r.smooth),
        *(_spread(line, figure) for figure in early if has_early),
        f"{line.mean(lambda r: r.p50_ttft_ms) / 1e3:.2f}",
        _spread(line, lambda r: r.p99_ttft_ms / 1e3, 1),
        f"{line.mean(lambda r: r.p99_itl_ms):.0f}",
        f"{line.mean(lambda r: r.tokens_per_s):.0f}",
        f"{line.mean(lambda r: r.cap_changes):.1f}",
    ]


def _spread(line: Shown, figure: Callable[[Row], float], digits: int = 0) -> str:
    values = [figure(row) for row in line.rows]
    least, most = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return f"{fmean(values):.{digits}f} ({least}-{most})"


def _summary(of_cells: dict[Cell, list[Shown]]) -> str:
    """How ours stands to the others, for each machine: the mean of its cells, and the least."""
    head = ("machine", "good of stock's", "smooth of the best fixed setting's",
            "good of its", "tokens/s of stock's", "good, points over before", "smooth")  # fmt: skip
    lines = []
    for machine in dict.fromkeys(cell.machine for cell in of_cells):
        stood = [_stood(found) for cell, found in of_cells.items() if cell.machine == machine]
        columns = list(zip(*(found for found in stood if found), strict=True))
        if columns:
            ratios = [f"{fmean(c):.2f} ({min(c):.2f})" for c in columns[:4]]
            points = [f"{fmean(c):+.0f} ({min(c):+.0f})" for c in columns[4:]]
            lines.append([machine, *ratios, *(points or ["", ""])])
    return _table(head, lines)


def _stood(lines: Sequence[Shown]) -> list[float] | None:
    """Ours over stock and over the best fixed setting; points over `before` where that ran."""
    of = {line.kind: line for line in lines}
    fixed = [line for kind, line in of.items() if kind == STOCK or kind.startswith("best")]
    if "ours" not in of or STOCK not in of:
        return None
    ours, stock, best = of["ours"], of[STOCK], max(fixed, key=lambda line: _rank(line.rows))
    figures = (lambda r: r.good, lambda r: r.smooth)
    found = [
        _ratio(ours, stock, lambda r: r.good), _ratio(ours, best, lambda r: r.smooth),
        _ratio(ours, best, lambda r: r.good), _ratio(ours, stock, lambda r: r.tokens_per_s),
    ]  # fmt: skip
    if BEFORE in of:
        found += [100 * (ours.mean(figure) - of[BEFORE].mean(figure)) for figure in figures]
    return found


def _ratio(one: Shown, other: Shown, figure: Callable[[Row], float]) -> float:
    return one.mean(figure) / max(other.mean(figure), 1e-3)


def _table(head: Sequence[str], lines: Iterator[list[str]] | list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def picture(now: Sequence[Row], before: Sequence[Row], path: Path) -> None:
    """Good (hollow) and smooth (full) shares with the spread of the seeds, CPUs over GPUs."""
    of_cells = shown(now, before)
    kinds = {"CPU": False, "GPU": True}
    panels = {
        kind: [cell for cell in of_cells if _is_gpu(cell.machine) == is_gpu]
        for kind, is_gpu in kinds.items()
    }
    panels = {kind: chosen for kind, chosen in panels.items() if chosen}
    figure = Figure(figsize=(13, 5.5 * len(panels)), layout="constrained")
    for axis, (kind, chosen) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True
    ):
        _panel(axis, {cell: of_cells[cell] for cell in chosen})
        axis.set_title(kind)
    figure.suptitle("% of requests smooth (full) and good (hollow), with the seeds' spread")
    figure.savefig(path, dpi=100)


def _panel(axis: Axes, of_cells: dict[Cell, list[Shown]]) -> None:
    labelled: set[str] = set()
    for place, lines in enumerate(of_cells.values()):
        for index, line in enumerate(lines):
            x = place + 0.8 * (index / max(len(lines) - 1, 1) - 0.5)
            smooth = [100 * row.smooth for row in line.rows]
            good, mean = 100 * line.mean(lambda r: r.good), fmean(smooth)
            colour = COLOURS[line.kind]
            spread = [[mean - min(smooth)], [max(smooth) - mean]]
            axis.errorbar(
                x, mean, spread, fmt="o", color=colour, markersize=5,
                label=None if line.kind in labelled else line.kind,
            )  # fmt: skip
            axis.plot(x, good, "o", color=colour, markersize=5, fillstyle="none")
            labelled.add(line.kind)
    axis.set_xticks(range(len(of_cells)), [str(c) for c in of_cells], rotation=60, ha="right")
    axis.tick_params(axis="x", labelsize=7)
    axis.set_ylim(-2, 102)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize=8, ncols=len(labelled), loc="lower left", bbox_to_anchor=(0, 1.06))
