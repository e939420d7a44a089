"""`sluice simulate`: what it prints, that it is reproducible, and what it refuses."""

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest
from sluice.__main__ import main
from sluice.measure.targets import read_targets
from sluice.simulate import command

PARAMS = {"a": 12, "b": 0.06, "c": 9e-5, "d": 0.07, "kv_tokens": 160000, "cold_start_s": 5,
          "ceiling": 12}  # fmt: skip
KEYS = {
    "good_share", "smooth_share", "goodput_rps", "gpu_seconds_per_1k_tokens", "cap_changes",
    "replica_changes", "p99_ttft_ms", "p99_itl_ms",
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    params, trace = tmp_path / "P.json", tmp_path / "F.jsonl"
    params.write_text(json.dumps(PARAMS))
    lines = ({"t_s": 0.2 * n, "prompt_tokens": 300, "max_tokens": 60} for n in range(60))
    trace.write_text("\n".join(map(json.dumps, lines)))
    return str(trace), str(params)


def run(files: tuple[str, str], policy: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    trace, params = files
    arguments = ["--trace", trace, "--params", params, "--policy", policy]
    assert main(["simulate", *arguments, "--seed", "7", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    del result["cpu_s"]
    return result


@pytest.mark.parametrize("policy", ["sluice", "deadline", "fixed:8", "fixed:max"])
def test_every_policy_prints_the_same_keys_twice_alike(
    files: tuple[str, str], policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(files, policy, capsys)
    assert result.keys() >= KEYS
    assert result == run(files, policy, capsys)
    assert result["finished"] == result["requests"] == 60
    assert 0 <= result["smooth_share"] <= 1


def test_a_fixed_cap_is_the_one_that_was_asked_for(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    caps = [run(files, policy, capsys)["last_cap"] for policy in ("fixed:2", "fixed:max")]
    assert caps == [2, PARAMS["ceiling"]]


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
    [
        ("noise", 1000),
        ("a", 1e300),
        ("interference_every_s", 1e99),
        ("kv_tokens", 10**9),
        ("hiccup_share", 1.5),
    ],
)
def test_a_parameter_that_no_service_has_is_named(
    name: str, value: float, files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, params = files
    Path(params).write_text(json.dumps(PARAMS | {name: value}))
    assert main(["simulate", "--trace", trace, "--params", params]) == 2
    assert name in capsys.readouterr().err


@pytest.mark.parametrize(
    "machine",
    [
        {"hiccup_share": 0.02},
        {"chunk_ms": 12},
        {"stall_every_s": 1, "stall_ms": [50, 300]},
        {"first_size_ms": 50},
    ],
)
def test_delays_of_single_steps_make_a_service_slower(
    machine: dict[str, Any], files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(files, "fixed:8", capsys)
    Path(files[1]).write_text(json.dumps(PARAMS | machine))
    slower = run(files, "fixed:8", capsys)
    plain_ms, slower_ms = (r["longest_ttft_ms"] + r["p99_itl_ms"] for r in (plain, slower))
    assert slower_ms > plain_ms + 10
    assert slower["finished"] == plain["finished"]


def test_a_long_run_tells_how_far_it_is_beside_its_result(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--trace", files[0], "--params", files[1], "--policy", "fixed:8", "--json"]
    assert main(["simulate", *given]) == 0
    quick = capsys.readouterr()
    assert quick.err == "", "none where it is done within a few seconds"
    monkeypatch.setattr(command, "SAY_EVERY_SECONDS", 1e-6)
    assert main(["simulate", *given]) == 0
    slow = capsys.readouterr()
    assert json.loads(slow.out).keys() == json.loads(quick.out).keys()
    assert slow.err
    for line in slow.err.splitlines():
        assert re.fullmatch(r"fixed:8: \d+ of \d+ s simulated after \d+ s", line)


def test_unknown_parameters_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "P.json"
    path.write_text(json.dumps(PARAMS | {"gpus": 3}))
    assert main(["simulate", "--trace", str(path), "--params", str(path)]) == 2
    assert "gpus" in capsys.readouterr().err


def test_a_target_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="tpot=1s"):
        read_targets("tpot=1s")
    assert read_targets("itl=50ms,percentile=99.9").allowed_share == pytest.approx(0.001)
