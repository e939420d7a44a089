"""`sluice simulate`: what it prints, that it is reproducible, and what the tuner does in it."""

import json
import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from math import log2, sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

import msgspec
import pytest
from sluice.__main__ import main
from sluice.simulate import command
from sluice.simulate.compare import CPU, GPU, SERVICES
from sluice.simulate.generate import Lengths, make_trace
from sluice.simulate.runs import Case, best_near, best_of, caps_to_try, simulate
from sluice.simulate.score import score
from sluice.simulate.summary import _paired, reach, summarise, table
from sluice.simulate.trace import Request
from sluice.simulate.world import World
from sluice.targets import read_targets

PARAMS = {"a": 12, "b": 0.06, "c": 9e-5, "d": 0.07, "kv_tokens": 160000, "cold_start_s": 5,
          "ceiling": 12}  # fmt: skip
KEYS = {
    "good_share", "smooth_share", "goodput_rps", "gpu_seconds_per_1k_tokens", "cap_changes",
    "replica_changes", "p99_ttft_ms", "p99_itl_ms",
}  # fmt: skip
SLO = read_targets("ttft=2s,itl=100ms")


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    params, trace = tmp_path / "P.json", tmp_path / "F.jsonl"
    params.write_text(json.dumps(PARAMS))
    made = ["--make", "steady-80", "--requests", "150", "--out", str(trace)]
    assert main(["simulate", *made, "--params", str(params)]) == 0
    return str(trace), str(params)


def run(files: tuple[str, str], policy: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    trace, params = files
    arguments = [
        "--trace",
        trace,
        "--params",
        params,
        "--policy",
        policy,
        "--slo",
        "ttft=1s,itl=100ms",
    ]
    assert main(["simulate", *arguments, "--seed", "7", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    del result["cpu_s"]
    return result


@pytest.mark.parametrize(
    "policy", ["sluice", "deadline", "fixed:8", "fixed:max", "best-fixed", "oracle", "aimd"]
)
def test_every_policy_prints_the_same_keys_twice_alike(
    files: tuple[str, str], policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(files, policy, capsys)
    assert result.keys() >= KEYS
    assert result == run(files, policy, capsys)
    assert result["finished"] == result["requests"] == 150
    assert 0 <= result["smooth_share"] <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        ["--policy", "fixed:0"],
        ["--policy", "fixed:257"],
        ["--policy", "fixed:" + "9" * 5000],
        ["--policy", "best"],
        ["--slo", "ttft=1"],
    ],
)
def test_what_cannot_be_run_is_refused_with_a_sentence(
    files: tuple[str, str], wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, params = files
    assert main(["simulate", "--trace", trace, "--params", params, *wrong]) == 2
    told = capsys.readouterr().err
    assert "sluice simulate: --" in told
    assert len(told) < 200


@pytest.mark.parametrize(
    ("name", "value"),
    [("noise", 1000), ("a", 1e300), ("spell_every_s", 1e99), ("kv_tokens", 10**9)],
)
def test_a_parameter_that_no_service_has_is_named(
    name: str, value: float, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, params = files
    Path(params).write_text(json.dumps(PARAMS | {name: value}))
    assert main(["simulate", "--trace", trace, "--params", params]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize("mean", ["1e-320", "0.5", "1e300"])
def test_a_mean_length_of_no_tokens_is_refused(
    mean: str, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["--make", "steps", "--params", files[1], "--out", files[0]]
    with pytest.raises(SystemExit):
        main(["simulate", *made, "--output-tokens", mean])
    assert f"--output-tokens: {mean!r} is not a number from 1" in capsys.readouterr().err


def hear_ctrl_c() -> None:
    """Where the tests run in the background, SIGINT is ignored, and so it would be in the child."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_ends_a_comparison_and_its_processes_in_one_line(tmp_path: Path) -> None:
    what = ["--compare", "--jobs", "2", "--services", "gpu", "--requests", "300", "--seeds", "99"]
    with subprocess.Popen(
        [sys.executable, "-m", "sluice", "simulate", *what, "--out", str(tmp_path)],
        stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hear_ctrl_c,
    ) as process:  # fmt: skip
        assert process.stderr
        assert process.stderr.readline().startswith("1/")
        os.killpg(process.pid, signal.SIGINT)
        told = [line for line in process.stderr if "seed" not in line]
    assert (process.returncode, told) == (130, ["sluice simulate: interrupted\n"])


def test_caps_that_are_all_over_the_ceiling_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = ["--compare", "--out", str(tmp_path), "--caps", "300,400"]
    assert main(["simulate", *compare]) == 2
    assert "--caps '300,400': the ceiling of gpu is 256." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--trace", "T", "--out", "x"], "--out says nothing with --trace"),
        (["--trace", "T", "--seeds", "2"], "--seeds says nothing with --trace"),
        (["--make", "steps", "--policy", "aimd"], "--policy says nothing with --make"),
        (["--make", "steps", "--json"], "--json says nothing with --make"),
        (["--compare", "--slo", "ttft=1s"], "--slo says nothing with --compare"),
        (["--compare", "--seed", "2"], "--seed says nothing with --compare"),
        (["--make", "steps"], "--make needs --out"),
    ],
)
def test_a_flag_of_another_mode_is_refused(
    files: tuple[str, str], given: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    params = [] if "--compare" in given else ["--params", files[1]]
    assert main(["simulate", *given, *params]) == 2
    assert named in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "nowhere" / "F.jsonl")
    assert main(["simulate", "--make", "steps", "--params", files[1], "--out", out]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("sluice", {"sluice"}),
        ("fixed:8", {"fixed:8"}),
        ("best-fixed", {"best-fixed, fixed:1", "best-fixed, fixed:12"}),
    ],
)
def test_a_long_run_tells_how_far_it_is_beside_its_result(
    files: tuple[str, str],
    policy: str,
    told: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = ["--trace", files[0], "--params", files[1], "--policy", policy, "--json"]
    assert main(["simulate", *given]) == 0
    quick = capsys.readouterr()
    assert quick.err == "", "none where it is done within a few seconds"
    monkeypatch.setattr(command, "SAY_EVERY_SECONDS", 1e-6)
    assert main(["simulate", *given]) == 0
    slow = capsys.readouterr()
    assert json.loads(slow.out).keys() == json.loads(quick.out).keys()
    lines = [line.rpartition(": ") for line in slow.err.splitlines()]
    assert told <= {whose for whose, _, _ in lines}
    assert all(re.fullmatch(r"\d+ of \d+ s simulated after 0 s", far) for _, _, far in lines)


def test_unknown_parameters_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "P.json"
    path.write_text(json.dumps(PARAMS | {"gpus": 3}))
    assert main(["simulate", "--trace", str(path), "--params", str(path)]) == 2
    assert "gpus" in capsys.readouterr().err


def test_a_target_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="tpot=1s"):
        read_targets("tpot=1s")
    assert read_targets("itl=50ms,percentile=99.9").allowed_share == pytest.approx(0.001)


def test_the_search_finds_a_best_cap_between_those_it_tried_first() -> None:
    def run_cap(cap: int) -> dict[str, Any]:
        share = 1 - abs(cap - 10) / 100
        return {"cap": cap, "smooth_share": share, "good_share": 1, "gpu_seconds_per_1k_tokens": 1}

    assert caps_to_try(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert best_of(run_cap, caps_to_try(64))["cap"] in (9, 10, 11)


@pytest.mark.parametrize("start", [1, 3, 8, 60, 256])
def test_the_search_outward_finds_the_peak_wherever_it_starts(start: int) -> None:
    tried: list[int] = []

    def run_cap(cap: int) -> dict[str, Any]:
        tried.append(cap)
        share = 1 - abs(cap - 24) / 300
        return {"smooth_share": share, "good_share": 1, "gpu_seconds_per_1k_tokens": 1}

    found = best_near(run_cap, start, 256)
    assert max(found["smooth_by_cap"], key=found["smooth_by_cap"].__getitem__) in range(20, 29)
    assert 256 in tried
    assert len(tried) <= 14


@pytest.mark.parametrize("start", [1, 2])
def test_the_search_outward_is_not_held_up_by_a_ceiling_that_is_better_than_low_caps(
    start: int,
) -> None:
    def run_cap(cap: int) -> dict[str, Any]:
        share = 0.65 if cap == 256 else 0.9 - 0.12 * abs(log2(cap / 24))
        return {"cap": cap, "smooth_share": share, "good_share": 1, "gpu_seconds_per_1k_tokens": 1}

    assert best_near(run_cap, start, 256)["cap"] in range(20, 29)


def test_aimd_lowers_the_cap_for_gaps_and_not_for_late_first_tokens() -> None:
    """More comes than the pod can do: each lower cap would make more first tokens late."""
    trace = make_trace("steady-95", CPU, 100, Lengths(128, 48), 300, seed=1)
    crowd = [replace(request, t_s=request.t_s / 3) for request in trace]
    late = simulate(CPU, read_targets("ttft=1s,itl=10s"), crowd, "aimd", 1)
    assert late["ttft_over_share"] > 0.5
    assert late["last_cap"] >= late["first_cap"]
    for tight in ("ttft=1s,itl=30ms", "e2e=1s"):
        lowered = simulate(CPU, read_targets(tight), crowd, "aimd", 1)
        assert lowered["last_cap"] < late["last_cap"]
    assert simulate(CPU, read_targets("ttft=1s"), crowd, "aimd", 1)["last_cap"] >= 8


@pytest.mark.parametrize("name", ["steady-80", "bursts"])
def test_what_comes_of_a_cap_that_is_never_filled_comes_of_those_above_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[World] = []

    def counted(world: World) -> dict[str, Any]:
        ran.append(world)
        return score(world)

    monkeypatch.setattr("sluice.simulate.runs.score", counted)
    trace = make_trace(name, CPU, 100, SERVICES["cpu"][1], 150, seed=2)
    searched = Case(CPU, SLO, trace, 2)
    caps = [2, 16, 256, 64, 100, 200, 255]
    found = {cap: searched.replayed(cap) for cap in caps}
    assert len(ran) < len(caps)
    assert found == {cap: Case(CPU, SLO, trace, 2).replayed(cap) for cap in caps}
    assert found[2]["smooth_share"] != found[255]["smooth_share"]


def test_on_a_small_cpu_the_tuner_finds_the_interior_cap() -> None:
    """The reproducer of a law that took the prediction for a bound: it stayed at 5, with 57 %."""
    trace = make_trace("steady-80", CPU, 100, SERVICES["cpu"][1], 1000, seed=1)
    ours = simulate(CPU, SLO, trace, "sluice", 1, every_s=4.0)
    best = simulate(CPU, SLO, trace, "fixed:8", 1)
    ceiling = simulate(CPU, SLO, trace, "fixed:max", 1)
    assert ours["smooth_share"] >= 0.95 * best["smooth_share"]
    assert ours["smooth_share"] >= ceiling["smooth_share"] + 0.05
    assert ours["cap_changes"] <= 3


def test_a_second_pod_raises_goodput_under_overload() -> None:
    calm = [Request(1.2 * i, 128, 48) for i in range(250)]
    busy = [Request(calm[-1].t_s + 0.55 * i, 128, 48) for i in range(1, 500)]
    alone = simulate(CPU, SLO, [*calm, *busy], "fixed:4", 2)
    params = msgspec.structs.replace(CPU, max_replicas=2)
    both = simulate(params, SLO, [*calm, *busy], "fixed:4", 2, every_s=4.0)
    assert both["replica_changes"] == 1
    assert alone["good_share"] < 0.5
    assert both["good_share"] > 0.85


def test_the_knee_is_a_cliff_for_a_fixed_cap_and_not_for_the_tuner() -> None:
    """A tenth more arrivals than a fixed cap can do, and its P99 first token goes from under one
    second to minutes; the tuner raises the cap."""
    calm = [Request(0.95 * i, 128, 48) for i in range(400)]
    busy = [Request(0.75 * i, 128, 48) for i in range(400)]
    below, beyond = (simulate(CPU, SLO, trace, "fixed:2", 1) for trace in (calm, busy))
    ours = simulate(CPU, SLO, busy, "sluice", 1, every_s=4.0)
    assert below["p99_ttft_ms"] < 1000
    assert beyond["p99_ttft_ms"] > 20_000
    assert ours["p99_ttft_ms"] < 1000


def test_slow_spells_cost_something_and_are_not_blamed_on_the_cap_for_ever() -> None:
    spells = {"spell_every_s": 40.0, "spell_mean_s": 4.0, "spell_factor": 4.0}
    params = msgspec.structs.replace(GPU, **spells)
    targets = read_targets("ttft=1s,itl=50ms")
    trace = make_trace("steady-50", GPU, 50, SERVICES["gpu"][1], 1500, seed=1)
    calm = simulate(GPU, targets, trace, "fixed:max", 1)
    ours = simulate(params, targets, trace, "sluice", 1, every_s=4.0)
    held = simulate(params, targets, trace, "fixed:max", 1)
    assert held["itl_over_share"] > calm["itl_over_share"]
    assert ours["smooth_share"] >= held["smooth_share"] - 0.02


def test_requests_that_end_too_late_are_not_good() -> None:
    trace = make_trace("steady-80", CPU, 100, Lengths(128, 48), 100, seed=1)
    held = simulate(CPU, SLO, trace, "fixed:4", 1)
    late = simulate(CPU, replace(SLO, e2e_ms=500.0), trace, "fixed:4", 1)
    assert held["e2e_over_share"] is None
    assert late["e2e_over_share"] > 0.9
    assert late["good_share"] < held["good_share"] / 2


def test_the_comparison_goes_on_and_runs_ours_once_for_all_caps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--traces", "steady-50", "--services", "gpu", "--requests", "300", "--seeds", "1"]
    arguments = ["simulate", "--compare", "--out", str(tmp_path), *asked]
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
    arguments = ["simulate", "--compare", "--out", str(tmp_path), *asked]
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
    arguments = ["simulate", "--compare", "--out", str(tmp_path), *asked]
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

    cell = {"service": "cpu", "target": "tight", "noise": "spells", "trace": "steps"}
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
    assert "| 95% of the oracle, others | 1 of 1 | 0.968 (cpu, tight, spells, steps) |" in told
    assert "| at most 2 points below cap = max | 1 of 1 | 10 (" in told
    assert "| at least 50 points above it, where any cap is | none | |" in told
    inner = {**summary, "smooth": {**summary["smooth"], "ceiling": 0.3}}
    told = reach([{**inner, "above_ceiling_points": (60.0, 0.0)}])
    assert "| at least 50 points above it, where any cap is | 1 of 1 | 60 (" in told
    assert summary["reach"] == pytest.approx(0.92 / 0.95)
    assert (
        "| cpu, tight, spells | steps | 3 | 92.0 | 99.0 (+8.0; 1) | 95.0 (8-8) | 96.8 % |"
        in table([summary])
    )
    assert "| by deadline at most 1 point below ours | 1 of 1 | 8 (" in told
    assert "| by deadline 105% of the oracle, all together | 0 of 1 | 1.04 |" in told
