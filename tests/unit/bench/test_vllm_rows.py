"""What the bench of vLLM tells of its targets."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench.real_rows import BEFORE, Row, make_row
from bench.vllm_rows import GATE, INNER, STOCK, best, findings, in_order, rows_png, table
from sluice.measure.client import Outcome
from sluice_operator.tuner import Targets

SMOOTH = Outcome("ok", "", 0.2, 0.3, 3, (0.04, 0.045), 0)
ROUGH = Outcome("ok", "", 0.2, 0.3, 3, (0.01, 0.06), 0)
PAIRS = ("8/64", "16/64")


def row(name: str, repeat: int, good: int, smooth: int, gap_ms: float = 50.0) -> Row:
    outcomes = [SMOOTH] * smooth + [ROUGH] * (good - smooth) + [None] * (20 - good)
    targets = Targets("99", 2000.0, 50.0, None)
    made = make_row("bursts", name, repeat, outcomes, targets, 10.0, 5.0, [(0.0, 4)], 2.0)
    return replace(made, p99_itl_ms=gap_ms, tokens_per_s=100.0, drift=0.1)


def measured(ours: list[tuple[int, int]]) -> list[Row]:
    """Ours beside stock (16 good, 4 smooth, gaps of 500 ms) and pairs, of which 16/64 is best."""
    rows = []
    for repeat, shares in enumerate(ours):
        rows += [row(STOCK, repeat, 16, 4, 500.0), row("16/64", repeat, 8, 6, 60.0)]
        rows += [row("8/64", repeat, 8, 5), row(INNER, repeat, *shares, 60.0)]
        rows.append(row(BEFORE, repeat, 8, 4, 60.0))
    return rows


def verdicts(rows: list[Row]) -> dict[str, str]:
    told = [line for line in findings(rows) if "wanted" in line]
    return {line.split(" wanted")[0]: line for line in told}


def test_each_target_is_told_with_its_median_and_spread_and_what_was_before() -> None:
    found = verdicts(measured([(16, 12), (18, 14), (15, 10)]))
    assert list(found) == [
        "bursts: good 1.00 (0.94 to 1.12) times that of stock, at least 1",
        "bursts: smooth 3.00 (2.50 to 3.50) times that of stock, at least 2.5",
        "bursts: smooth 2.00 (1.67 to 2.33) times that of 16/64, at least 2",
        "bursts: tokens/s 1.00 (1.00 to 1.00) times that of stock, at least 0.98",
        "bursts: P99 gap 0.12 (0.12 to 0.12) times that of stock, at most 0.2",
    ]
    assert all(": met" in line for line in found.values())
    assert "(before: 0.50 (0.50 to 0.50))" in next(iter(found.values()))


@pytest.mark.parametrize(
    ("ours", "missed"),
    [((15, 12), "good 0.94"), ((16, 9), "smooth 2.25"), ((16, 11), "smooth 1.83")],
)
def test_a_target_that_is_not_reached_is_told_as_missed(ours: tuple[int, int], missed: str) -> None:
    lines = [line for line in verdicts(measured([ours])).values() if "MISSED" in line]
    assert any(missed in line for line in lines)
    slow = [
        replace(r, p99_itl_ms=101.0) if r.contender == INNER else r for r in measured([(16, 12)])
    ]
    assert any("P99 gap 0.20" in line and "MISSED" in line for line in verdicts(slow).values())


def test_a_repeat_that_was_cut_compares_only_what_it_has() -> None:
    rows = measured([(16, 12), (2, 1)])
    rows = [r for r in rows if (r.contender, r.repeat) != (STOCK, 1)]
    assert "bursts: good 1.00 times that of stock, at least 1" in verdicts(rows)


def test_first_tokens_cpu_and_drift_are_told_beside() -> None:
    told = list(findings(measured([(16, 12), (16, 12)])))
    beside = next(line for line in told if f"{INNER} over {STOCK}" in line)
    assert "P99 first token" in beside
    assert "CPU-seconds 1.00 (1.00 to 1.00)" in beside
    assert any(f"{INNER} over {BEFORE}" in line for line in told)
    assert not any(GATE in line.split(INNER)[0] for line in told)
    assert told[-1].endswith("+10 %, +10 %.")


def test_all_contenders_have_a_place_in_table_and_picture(tmp_path: Path) -> None:
    rows = [*measured([(16, 12)]), row(GATE, 0, 10, 4)]
    names = [one.contender for one in in_order(rows)]
    assert names == [STOCK, "8/64", "16/64", GATE, BEFORE, INNER]
    assert best(rows, "bursts", 1) == ["16/64"]
    assert "**16/64**" in table(rows)
    rows_png(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
