"""What the comparison of static and continuous batches makes of its answers."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from bench.static_page import advice, formula, page, table
from bench.static_rows import (
    BLOCK,
    CONTINUOUS,
    Answer,
    Row,
    Timed,
    batches_of,
    bursts,
    padding_share,
    row_of,
    unused_share,
)
from sluice.measure.client import Outcome

BASE = Row("a trace", CONTINUOUS, 0, 10.0, 1000.0, 100.0, 500.0, 800.0, 1000.0, 0.1, 0.9)


def answer(start_s: float, first_s: float, end_s: float, prompt: int = 10, output: int = 5) -> Any:
    outcome = Outcome("ok", "pod", first_s - start_s, end_s - start_s, output, (), 0)
    return Answer(Timed(start_s, prompt, output), outcome)


def test_batches_are_told_apart_by_their_ends() -> None:
    first = [answer(0.0, 0.3, 1.0), answer(0.0, 0.31, 2.0)]
    second = [answer(0.0, 2.1, 3.0), answer(1.9, 2.1, 2.2)]
    assert list(batches_of([*second, *first])) == [first, second]


def test_slots_are_unused_behind_the_last_token_and_in_rows_that_have_ended() -> None:
    full = answer(0, 1, 2, prompt=BLOCK - 1, output=1)
    assert unused_share([[full]], lambda _: BLOCK) == 0
    assert (
        unused_share([[answer(0, 1, 2, prompt=BLOCK // 2 - 1, output=1)]], lambda _: BLOCK) == 0.5
    )
    # The short one holds a block for two more steps, in which the long one fills its own.
    long = answer(0, 1, 2, prompt=BLOCK - 3, output=3)
    alone = unused_share([[long], [full]], lambda _: BLOCK)
    together = unused_share([[long, full]], lambda _: BLOCK)
    assert together == pytest.approx((3 + 2 * BLOCK) / (6 * BLOCK))
    assert alone == pytest.approx(3 / (4 * BLOCK))


def test_padding_is_a_share_of_all_that_steps_compute() -> None:
    made = {"decode": 50.0, "prefill": 30.0, "draft": 0.0, "padding": 20.0, "steps": 9.0}
    assert padding_share(made) == 0.2


def test_bursts_come_at_the_rate_that_was_asked_for() -> None:
    starts = bursts(Random(1), 1000, 10.0)
    assert len(starts) == 1000
    assert starts == sorted(starts)
    sizes = [starts.count(at) for at in sorted(set(starts))]
    assert all(8 <= size <= 40 for size in sizes[:-1])
    gaps = [late - early for early, late in pairwise(sorted(set(starts)))]
    assert gaps == pytest.approx([size / 10 for size in sizes[:-1]])


def test_a_row_has_what_the_client_sees() -> None:
    answers = [answer(0.0, 1.0, 2.0), answer(1.0, 1.5, 3.0)]
    row = row_of("t", CONTINUOUS, 0, answers, 4.0)
    assert row.tokens_per_s == 10 / 4
    assert (row.p50_first_ms, row.p99_first_ms) == (500, 1000)
    assert (row.p50_end_ms, row.p99_end_ms) == (2000, 2000)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"tokens_per_s": 950.0},
            "Static batches lose little on a trace.\n\n- a trace: static 8 has 95%",
        ),
        (
            {"tokens_per_s": 600.0, "padding_share": 0.4},
            "Continuous batches win on a trace.\n\n- a trace: static 8 has 60%",
        ),
        ({"tokens_per_s": 600.0, "padding_share": 0.4}, "40% of its computed tokens are padding"),
        ({"p99_end_ms": 3000.0, "p50_first_ms": 700.0}, "take over 0.70 s, not 0.10 s"),
        ({"tokens_per_s": 500.0}, "its steps take longer"),
        ({"tokens_per_s": 1300.0, "p99_end_ms": 700.0}, "Static batches win on a trace"),
    ],
)
def test_the_advice_follows_the_figures(changes: dict[str, Any], says: str) -> None:
    theirs = replace(BASE, contender="static 8", **changes)
    worst = replace(theirs, contender="static 32", tokens_per_s=1.0)
    assert says in advice([BASE, worst, theirs])


def test_the_page_names_its_command_and_what_the_formula_said() -> None:
    theirs = replace(BASE, contender="static 32, full", cpu_s=4.0)
    rows = [replace(BASE, cpu_s=3.0, formula_gain=-0.35), theirs]
    assert "-35% and -25% (a trace)" in formula(rows)
    told = {"date": "2026-01-01", "cpu": "a CPU", "commit": "0123abcd", "prompts": 8, "repeats": 1}
    text = page(told, rows, " --prompts 8")
    assert "-m bench.static_batches --out docs/benchmarks --prompts 8\n" in text
    assert "at commit 0123abcd" in text
    assert formula([BASE]) == ""


def test_the_table_has_medians_and_the_spread_of_throughput() -> None:
    rows = [replace(BASE, repeat=n, tokens_per_s=speed) for n, speed in enumerate((900, 1000, 950))]
    assert "| continuous | 950 (900 to 1,000) |" in table(rows)
