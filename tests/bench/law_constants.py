"""How much each constant of the law matters, in the simulated machines of `bench.law`.

PYTHONPATH=tests .venv/bin/python -m bench.law_constants --out docs/slo/law_constants.md
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from types import ModuleType

from bench.law_runs import Cell, Job, Row, load_1_per_s, run
from sluice.numbers import count
from sluice_core import latency, law, ordering

CELLS = (
    Cell("cpuv", "steps", 1.0),
    Cell("cpuv", "bursts", 0.8),
    Cell("cpuv", "bursts", 1.0),
    Cell("cpuv, noise 15 %", "bursts", 1.0),
    Cell("gpu, 50 ms", "bursts", 0.9),
    Cell("gpu, 20 ms", "bursts", 0.9),
)
CONSTANTS: tuple[tuple[ModuleType, str, tuple[float, ...]], ...] = (
    (law, "BREAK_PRICE", (0.0, 0.25, 1.0, 2.0)),
    (law, "SAFE_GAPS", (0.5, 2.0)),
    (law, "MOST_STRETCH", (1.0, 2.0)),
    (law, "LEAST_LONG_TOKENS", (1, 256)),
    (latency, "TAIL_QUANTILE", (0.95, 0.999)),
    (latency, "NORMAL_TAIL", (1.2, 4.8)),
    (ordering, "PATIENCE", (2, 4, 16)),
)
"""Module, name, and the values that are tried beside the one in force."""
HEAD = """\
# The constants of the law

Each figure is good/smooth in % as in [law.md](law.md), the mean of {seeds} seeds. The first row has
the constants as they are. In each other row one has another value. The code says what each means:
`core/sluice_core/law.py`, `latency.py`, `ordering.py`. `python -m bench.law_constants` prints this.

"""


@contextmanager
def changed(module: ModuleType, name: str, value: float) -> Iterator[None]:
    """The constant has another value meanwhile."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def rows_of(cell: Cell, seeds: int) -> list[Row]:
    """Our runs of the cell."""
    per_s = load_1_per_s(cell.machine)
    return [run(Job(cell, "ours", seed, per_s)) for seed in range(seeds)]


def line(label: str, seeds: int) -> str:
    """One row of the table."""
    shares = []
    for cell in CELLS:
        rows = rows_of(cell, seeds)
        good, smooth = (fmean(getattr(row, name) for row in rows) for name in ("good", "smooth"))
        shares.append(f"{100 * good:.0f}/{100 * smooth:.0f}")
    print(label, *shares, file=sys.stderr, flush=True)
    return " | ".join([f"| {label}", *shares]) + " |"


def lines(seeds: int) -> Iterator[str]:
    """The table."""
    yield " | ".join(["| constant", *map(str, CELLS)]) + " |"
    yield "| --- " * (len(CELLS) + 1) + "|"
    yield line("as they are", seeds)
    for module, name, values in CONSTANTS:
        for value in values:
            with changed(module, name, value):
                now = getattr(module, name)
                yield line(f"`{name}` {now:g}", seeds)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes it to --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=count, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/law/law_constants.md"))
    given = parser.parse_args(argv)
    text = HEAD.format(seeds=given.seeds) + "\n".join(lines(given.seeds)) + "\n"
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
