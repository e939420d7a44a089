"""The comparison: that it goes on where it was stopped, and what it makes of its rows."""

import json
import os
import signal
import subprocess
import sys
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from research.compare import main
from research.summary import _paired, reach, summarise, table

TESTS = Path(__file__).parents[2]


def hear_ctrl_c() -> None:
    """Where the tests run in the background, SIGINT is ignored, and so it would be in the child."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_ends_a_comparison_and_its_processes_in_one_line(tmp_path: Path) -> None:
    what = ["--jobs", "2", "--services", "gpu", "--requests", "300", "--seeds", "99"]
    with subprocess.Popen(
        [sys.executable, "-m", "research.compare", *what, "--out", str(tmp_path)],
        stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hear_ctrl_c,
        cwd=TESTS,
    ) as process:  # fmt: skip
        assert process.stderr
        assert process.stderr.readline().startswith("1/")
        os.killpg(process.pid, signal.SIGINT)
        told = [line for line in process.stderr if "seed" not in line]
    assert (process.returncode, told) == (130, ["research.compare: interrupted\n"])


def test_caps_that_are_all_over_the_ceiling_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--caps", "300,400"]) == 2
    assert "--caps '300,400': the ceiling of gpu is 256." in capsys.readouterr().err


def test_the_comparison_goes_on_and_runs_ours_once_for_all_caps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--traces", "steady-50", "--services", "gpu", "--requests", "300", "--seeds", "1"]
    arguments = ["--out", str(tmp_path), *asked]
    for caps in ([], ["--caps", "2,64"], ["--caps", "2,64"]):
        assert main([*arguments, *caps]) == 0
    searched, listed = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    for name in ("sluice", "deadline", "aimd", "ceiling", "times_real"):
        assert searched[name] == listed[name]
    assert {"2", "64"} < set(listed["oracle"]["smooth_by_cap"])
    assert listed["oracle"]["smooth_share"] <= searched["oracle"]["smooth_share"]
    told = capsys.readouterr()
    assert told.err.count("1/1") == 2
    assert told.out.count("| gpu, default, independent | steady-50 | 1 |") == 3
    assert (tmp_path / "comparison.png").stat().st_size > 1000


def test_a_row_that_was_cut_while_it_was_written_is_run_again(tmp_path: Path) -> None:
    asked = ["--traces", "steady-50", "--services", "gpu", "--requests", "300", "--seeds", "1"]
    arguments = ["--out", str(tmp_path), *asked]
    path = tmp_path / "rows.jsonl"
    assert main(arguments) == 0
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert main(arguments) == 0
    again, before = json.loads(path.read_text()), json.loads(whole)
    assert again["sluice"] == before["sluice"]
    path.write_text("{no row}\n")
    assert main(arguments) == 2


def test_with_another_law_ours_is_run_anew_and_fixed_caps_are_not(tmp_path: Path) -> None:
    asked = ["--traces", "steady-50", "--services", "gpu", "--requests", "300", "--seeds", "1"]
    arguments = ["--out", str(tmp_path), *asked]
    assert main(arguments) == 0
    path = tmp_path / "rows.jsonl"
    first = json.loads(path.read_text())
    other = {name: first[name] | {"marked": True} for name in ("sluice", "oracle", "aimd")}
    path.write_text(json.dumps(first | other | {"law": "another"}) + "\n")
    assert main(arguments) == 0  # there is a row
    for _ in range(2):
        assert main([*arguments, "--again"]) == 0
    anew = json.loads(path.read_text())  # in place of the one before
    assert anew["law"] == first["law"]
    assert anew["sluice"] == first["sluice"]
    assert anew["oracle"]["marked"]
    assert anew["aimd"]["marked"]
    for name in ("aimd", "deadline"):
        without = {key: value for key, value in anew.items() if key != name}
        path.write_text(json.dumps(without) + "\n")
        assert main(arguments) == 0
        assert json.loads(path.read_text()) == anew | {name: first[name]}  # run alone


@pytest.mark.parametrize(("num", "factor"), [(2, 12.706), (4, 3.182), (13, 2.179), (20, 2.093)])
def test_half_an_interval_of_few_seeds_is_students(num: int, factor: float) -> None:
    differences = [float(value) for value in range(num)]
    mean, half = _paired(differences)
    assert mean == (num - 1) / 2
    assert half == pytest.approx(factor * stdev(differences) / sqrt(num), rel=3e-3)


def test_the_comparison_is_paired_over_the_seeds() -> None:
    def result(smooth: float) -> dict[str, Any]:
        return {
            "smooth_share": smooth, "good_share": smooth, "ttft_over_share": 0.01,
            "goodput_rps": 2.0,
            "itl_over_share": None, "cap": 8, "last_cap": 8, "cap_changes": 1,
            "last_cap_change_s": 10.0, "gpu_seconds_per_1k_tokens": 1.0, "first_cap": 2,
            "cap_path": [(6.0, 4), (10.0, 7), (50.0, 8)], "simulated_s": 100.0,
            "smooth_by_cap": {"2": 0.5, "8": smooth, "256": 0.8},
        }  # fmt: skip

    cell = {"service": "cpu", "target": "tight", "noise": "interference", "trace": "steps"}
    rows = [
        {
            "cell": cell, "seed": seed, "times_real": 1.0, "sluice": result(0.9 + 0.01 * seed),
            "oracle": result(0.95), "ceiling": result(0.8 + 0.01 * seed), "aimd": result(0.1),
            **({"deadline": result(0.99)} if seed == 1 else {}),
        }
        for seed in (1, 2, 3)
    ]  # fmt: skip
    (summary,) = summarise(rows)
    assert summary["above_ceiling_points"] == pytest.approx((10.0, 0.0))
    assert summary["converged_s"] == 50.0, "7 would have 0.875, which is not 95 % of 0.95"
    told = reach([summary])
    assert (
        "| 95% of the oracle, others | 1 of 1 | 0.968 (cpu, tight, interference, steps) |" in told
    )
    assert "| at most 2 points below cap = max | 1 of 1 | 10 (" in told
    assert "| at least 50 points above it, where any cap is | none | |" in told
    inner = {**summary, "smooth": {**summary["smooth"], "ceiling": 0.3}}
    told = reach([{**inner, "above_ceiling_points": (60.0, 0.0)}])
    assert "| at least 50 points above it, where any cap is | 1 of 1 | 60 (" in told
    assert summary["reach"] == pytest.approx(0.92 / 0.95)
    assert (
        "| cpu, tight, interference | steps | 3 | 92.0 | 99.0 (+8.0; 1) | 95.0 (8-8) | 96.8 % |"
        in table([summary])
    )
    assert "| by deadline at most 1 point below ours | 1 of 1 | 8 (" in told
    assert "| by deadline 105% of the oracle, all together | 0 of 1 | 1.04 |" in told
