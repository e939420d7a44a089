"""`bench.law`: its loads and runs, a product of another folder, what the page compares."""

from pathlib import Path

import msgspec
import pytest
from bench import law, law_runs
from bench.law_page import page, picture, shown
from bench.law_runs import GPU, MACHINES, Cell, Job, Row, cells, contenders, load_1_per_s, trace_of
from hypothesis import given
from hypothesis import strategies as st

BUSY = Cell("cpuv", "bursts", 1.0)
BURSTS = Cell("gpu, 20 ms", "bursts", 0.6)


def row(
    contender: str, seed: int = 0, cell: Cell = BUSY, good: float = 1.0, smooth: float = 0.5
) -> Row:
    return Row(
        cell, contender, seed, good, smooth, good, smooth,
        p50_ttft_ms=500, p99_ttft_ms=1500, p99_itl_ms=60, tokens_per_s=180, first_cap=128,
        cap_changes=0, root="",
    )  # fmt: skip


def test_load_1_is_what_a_closed_loop_of_clients_gets_whatever_the_variant() -> None:
    """16 clients, each with 400 tokens of prompt and 80 decodes beside 15 others: 5.3 s."""
    assert load_1_per_s("cpuv") == pytest.approx(16 / 5.3, rel=0.03)
    assert load_1_per_s("cpuv, hiccups") == load_1_per_s("cpuv, noise 15 %") == load_1_per_s("cpuv")


@given(st.floats(1, 40), st.integers(0, 9))
def test_bursts_of_a_gpu_bring_all_of_their_load(per_s: float, seed: int) -> None:
    trace = trace_of(GPU, "bursts", per_s, seed)
    assert len(trace) / GPU.seconds == pytest.approx(per_s, abs=0.25)
    assert {request.t_s % 2 for request in trace} == {1.0}
    assert trace == trace_of(GPU, "bursts", per_s, seed)


def test_a_stock_engine_breaks_gaps_in_bursts_and_the_least_chunks_first_tokens() -> None:
    """The page that the machine was fitted to: 90 % good and 22 % smooth, a pair of 16/64 36/33."""
    per_s = load_1_per_s("cpuv")
    stock, pair = (law_runs.run(Job(BUSY, name, 0, per_s)) for name in ("stock", "pair 16/64"))
    assert 0.8 < stock.good <= 1
    assert 0.1 < stock.smooth < 0.4
    assert 0.25 < pair.smooth <= pair.good < 0.5
    assert pair.p99_itl_ms < 65 < stock.p99_itl_ms
    assert stock.p99_ttft_ms < pair.p99_ttft_ms
    assert stock.tokens_per_s == pytest.approx(pair.tokens_per_s, rel=0.05)


def test_processes_give_the_rows_that_a_run_here_gives() -> None:
    jobs = [Job(BUSY, name, seed, 1.0) for name in ("stock", "ours") for seed in (0, 1)]
    told: list[Row] = []
    found = law.run_all(jobs, law.HERE, 2, told.append)

    def key(row: Row) -> tuple[str, int]:
        return row.contender, row.seed

    here = sorted((law_runs.run(job) for job in jobs), key=key)
    assert sorted(found, key=key) == sorted(told, key=key) == here


def test_a_folder_without_the_product_is_refused_and_not_silently_this_one(tmp_path: Path) -> None:
    with pytest.raises(law.RunError, match="does not run these machines"):
        law.run_all([Job(BUSY, "stock", 0, 0.5)], tmp_path, 1)


def test_another_checkout_runs_its_own_product(tmp_path: Path) -> None:
    for package in law.PACKAGES:
        (tmp_path / package).symlink_to(law.HERE / package)
    copied = tmp_path / "core"
    copied.unlink()
    copied.mkdir()
    (copied / "sluice_core").mkdir()
    for path in (law.HERE / "core/sluice_core").iterdir():
        if path.name != "sketch.py" and path.name != "__init__.py":
            (copied / "sluice_core" / path.name).symlink_to(path)
    for name in ("__init__.py", "sketch.py"):
        (copied / "sluice_core" / name).write_bytes(
            (law.HERE / "core/sluice_core" / name).read_bytes()
        )
    (found,) = law.run_all([Job(BUSY, "ours", 0, 1.0)], tmp_path, 1)
    assert found.root == str(tmp_path)
    assert msgspec.structs.replace(found, root=str(law.HERE)) == law_runs.run(
        Job(BUSY, "ours", 0, 1.0)
    )


def test_the_table_has_every_machine_and_its_whole_family_of_fixed_settings() -> None:
    assert {cell.machine for cell in cells()} == MACHINES.keys()
    assert sum(name.startswith("pair") for name in contenders("cpuv")) == 20
    jobs = law.jobs_of(2, ["gpu, 20 ms: *"], ["ours", "cap *"])
    assert {job.cell.load for job in jobs} == {0.2, 0.6, 0.9}
    assert len(jobs) == 3 * 5 * 2


def test_the_best_of_a_family_is_chosen_by_smooth_requests_over_all_seeds() -> None:
    now = [
        row("stock"), row("ours", smooth=0.8),
        row("pair 8/64", 0, smooth=0.9), row("pair 8/64", 1, smooth=0.1),
        row("pair 16/64", 0, smooth=0.6), row("pair 16/64", 1, smooth=0.6),
    ]  # fmt: skip
    (lines,) = shown(now, [row("ours", smooth=0.3)]).values()
    assert [line.label for line in lines] == ["stock", "best pair (16/64)", "before", "ours"]


def test_each_checkout_has_the_best_of_its_own_caps() -> None:
    now = [
        row("cap 32", cell=BURSTS, smooth=0.2),
        row("cap 64", cell=BURSTS),
        row("ours", 0, BURSTS),
    ]
    old = [
        row("cap 32", cell=BURSTS),
        row("cap 64", cell=BURSTS, smooth=0.2),
        row("ours", 0, BURSTS),
    ]
    (lines,) = shown(now, old).values()
    kinds = ["best cap (64)", "before, best cap (32)", "before", "ours"]
    assert [line.label for line in lines] == kinds


def test_the_page_says_how_ours_stands_and_its_spread(tmp_path: Path) -> None:
    now = [row("stock", good=0.8), row("pair 16/64"), row("ours", smooth=0.75), row("ours", 1)]
    text = page(now, [row("ours", good=0.4), row("ours", 1, good=0.4)], {"cpuv": 3.0})
    assert (
        "| cpuv | 1.25 (1.25) | 1.25 (1.25) | 1.00 (1.00) | 1.00 (1.00) | +60 (+60) | +12 (+12) |"
        in text
    )
    assert "|  | ours | 100 (100-100) | 62 (50-75) |" in text
    assert "Load 1 is 3.00 requests/s" in text
    picture(now, [], tmp_path / "law.png")
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")


shares = st.floats(0, 1)
names = st.sampled_from(["stock", "pair 8/64", "whole 64", "cap 32", "cap 64", "ours"])


@given(
    st.lists(
        st.tuples(names, st.integers(0, 2), st.sampled_from([BUSY, BURSTS]), shares, shares),
        min_size=1,
        unique_by=lambda drawn: drawn[:3],
    ),
    st.booleans(),
)
def test_every_line_of_a_table_has_its_columns_whoever_ran(
    drawn: list[tuple[str, int, Cell, float, float]], has_before: bool
) -> None:
    rows = [row(*values) for values in drawn]
    text = page(rows, rows if has_before else [], {"cpuv": 3.0, "gpu, 20 ms": 26.0})
    widths = None
    for line in text.splitlines():
        is_table = line.startswith("|")
        assert not (is_table and widths) or line.count("|") == widths
        widths = line.count("|") if is_table else None
