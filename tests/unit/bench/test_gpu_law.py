"""The law's part of the GPU bench: a lease is too short for typos."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from bench import gpu
from bench.gpu_law import CELLS, CONTENDERS, EVERY_S, LAW, RUN_S, Cell, made
from bench.real_rows import OURS, Row, make_row
from sluice.measure.client import Outcome
from sluice_core.contract import StepModel
from sluice_operator.tuner import Targets

MODEL = StepModel(a=5.0, b=0.05, c=0.0, d=0.0213, n=100, resid_q=1.2)
ANSWERED = Outcome("ok", "", 0.2, 0.3, 3, (0.01, 0.015), 0)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_all_contenders_of_a_cell_meet_its_share_of_the_capacity(cell: Cell) -> None:
    trace = made(cell, 20.0)
    assert trace == made(cell, 20.0)
    assert len(trace) == pytest.approx(cell.load * 20.0 * RUN_S)
    assert len({one.t_s for one in trace}) == RUN_S / EVERY_S


def row(name: str, num_good: int) -> Row:
    targets = Targets("99", 1000.0, 20.0, None)
    outcomes = [ANSWERED if place < num_good else None for place in range(10)]
    told = (outcomes, targets, 30.0, 5.0, [(0.0, 69)], 12.0, 10)
    return replace(make_row(str(CELLS[0]), name, 0, *told), profile=MODEL, fitted=MODEL)


def test_the_page_has_each_cell_with_the_profile_and_the_best_fixed_setting(tmp_path: Path) -> None:
    rows = [row(name, num_good) for name, num_good in zip(CONTENDERS, (10, 9, 4), strict=True)]
    results = gpu.Results("A GPU", law=rows)
    gpu.write_report(results, tmp_path)
    again = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=gpu.Results)
    assert [row.profile for row in again.law] == [MODEL] * 3
    told = (tmp_path / "gpu-measured.md").read_text()
    assert f"**{LAW}**" in told
    assert f"{OURS} over {LAW}: good 1.11, smooth 1.11, good in the first 10 s 1.11" in told
    assert f"smooth 1.11 times that of {LAW}, at least 1 wanted: met" in told
    assert "0.0 changes" in told
    assert "predicted a cap of 69" in told
    assert (tmp_path / "gpu-law.png").read_bytes().startswith(b"\x89PNG")
