"""The tables of a page from one run, or from two side by side. Pure but for `write`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.attacks.table import KINDS
from msgspec import Struct

BEGIN, END = "<!-- python -m bench.attacks writes from here -->", "<!-- to here -->"
FIGURES = {
    "held_worst_ms": "loop held, ms",
    "loop_worst_ms": "a probe waited, ms",
    "most_mib": "memory, MiB",
    "most_files": "descriptors",
    "cpu_s": "CPU, s",
    "second_share_percent": "second key, %",
}
FIGURED = "B"
"""The kind whose rows are about figures."""


class Row(Struct):
    """An attack as it is written."""

    kind: str
    name: str
    input: str
    wanted: str
    came: str
    ok: bool
    seconds: float
    figures: dict[str, float]


class Run(Struct):
    """One run of the program."""

    processor: str
    num_cpus: int
    rows: list[Row]


def markdown(rows: Sequence[Row], before: Sequence[Row] = ()) -> str:
    """All tables; with an earlier run each has both."""
    earlier = {row.name: row for row in before}
    parts = [_table(kind, rows, earlier) for kind in KINDS]
    return "\n\n".join([summary(rows, before), *parts, _figures(rows, earlier)])


def summary(rows: Sequence[Row], before: Sequence[Row] = ()) -> str:
    """How many of each kind came out right."""
    shown = []
    for kind in KINDS:
        was = f"{_right(kind, before)} -> " if before else ""
        num = sum(row.kind == kind for row in rows)
        shown.append(f"{kind}: {was}{_right(kind, rows)} of {num}")
    return "Right, by kind: " + ", ".join(shown) + "."


def _right(kind: str, rows: Sequence[Row]) -> int:
    return sum(row.ok for row in rows if row.kind == kind)


def _table(kind: str, rows: Sequence[Row], earlier: Mapping[str, Row]) -> str:
    heads = ["attack", "input", "wanted", *(["before", "now"] if earlier else ["came"])]
    lines = [_line(*heads), _line(*["---"] * len(heads))]
    for row in rows:
        if row.kind == kind:
            was = [_cell(earlier.get(row.name))] if earlier else []
            lines.append(_line(f"`{row.name}`", row.input, row.wanted, *was, _cell(row)))
    return f"### {kind}. {KINDS[kind]}\n\n" + "\n".join(lines)


def _figures(rows: Sequence[Row], earlier: Mapping[str, Row]) -> str:
    lines = [_line("attack", *FIGURES.values()), _line(*["---"] * (1 + len(FIGURES)))]
    for row in rows:
        if row.kind == FIGURED and not row.figures.keys().isdisjoint(FIGURES):
            was = earlier[row.name].figures if row.name in earlier else {}
            cells = [_figure(name, was, row.figures) for name in FIGURES]
            lines.append(_line(f"`{row.name}`", *cells))
    return f"### Figures of {FIGURED}\n\n" + "\n".join(lines)


def _figure(name: str, was: Mapping[str, float], now: Mapping[str, float]) -> str:
    if name not in now:
        return ""
    digits = 1 if name == "cpu_s" else 0
    shown = f"{now[name]:.{digits}f}"
    return f"{was[name]:.{digits}f} -> {shown}" if name in was else shown


def _cell(row: Row | None) -> str:
    if row is None:
        return "not tried"
    return row.came if row.ok else f"**no**: {row.came}"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write(page: Path, tables: str) -> None:
    """Put the tables between the two marks of a page. Raises ValueError without them."""
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n\n{tables}\n\n{END}{tail}")
