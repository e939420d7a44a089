"""Traces that are made: reproducible, of the shapes that they are named for, and written."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from research import generate
from research.generate import TRACES, capacity_per_s, make_trace, write_trace
from research.services import SERVICES
from sluice.simulate.trace import read_trace

PARAMS = {"a": 12, "b": 0.06, "c": 9e-5, "d": 0.07, "kv_tokens": 160000, "cold_start_s": 5}


@pytest.fixture
def params(tmp_path: Path) -> str:
    path = tmp_path / "P.json"
    path.write_text(json.dumps(PARAMS))
    return str(path)


def test_a_trace_is_written_as_it_was_asked_for(tmp_path: Path, params: str) -> None:
    out = tmp_path / "F.jsonl"
    made = ["--make", "steady-80", "--requests", "150", "--params", params, "--out", str(out)]
    assert generate.main(made) == 0
    assert len(read_trace(out)) == 150


@pytest.mark.parametrize("mean", ["1e-320", "0.5", "1e300"])
def test_a_mean_length_of_no_tokens_is_refused(
    mean: str, tmp_path: Path, params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["--make", "steps", "--params", params, "--out", str(tmp_path / "F.jsonl")]
    with pytest.raises(SystemExit):
        generate.main([*made, "--output-tokens", mean])
    assert f"--output-tokens: {mean!r} is not a number from 1" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_named(
    tmp_path: Path, params: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "nowhere" / "F.jsonl")
    assert generate.main(["--make", "steps", "--params", params, "--out", out]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(TRACES))
def test_each_made_trace_is_reproducible_ordered_and_reads_back(tmp_path: Path, name: str) -> None:
    params, lengths = SERVICES["gpu"]
    trace = make_trace(name, params, 50, lengths, 300, seed=3)
    assert trace == make_trace(name, params, 50, lengths, 300, seed=3)
    assert trace != make_trace(name, params, 50, lengths, 300, seed=4)
    assert len(trace) == 300
    assert all(a.t_s <= b.t_s for a, b in zip(trace, trace[1:], strict=False))
    write_trace(trace, tmp_path / "made.jsonl")
    read = read_trace(tmp_path / "made.jsonl")
    assert [(r.prompt_tokens, r.max_tokens) for r in read] == [
        (r.prompt_tokens, r.max_tokens) for r in trace
    ]
    assert [r.prefix_tokens for r in read] == [r.prefix_tokens for r in trace]


def test_bursts_come_two_hundred_at_once_with_half_a_minute_of_silence() -> None:
    params, lengths = SERVICES["gpu"]
    times = [request.t_s for request in make_trace("bursts", params, 50, lengths, 600, seed=1)]
    assert times == [1.0] * 200 + [31.0] * 200 + [61.0] * 200


def test_overload_is_ten_minutes_of_half_as_many_more_then_twenty_of_half() -> None:
    params, lengths = SERVICES["cpu"]
    per_s = capacity_per_s(params, 100, lengths)
    trace = make_trace("overload", params, 100, lengths, 6000, seed=1)
    for start_s, share in ((0, 1.5), (700, 0.5), (1900, 1.5), (2500, 0.5)):
        num = sum(start_s <= request.t_s < start_s + 500 for request in trace)
        assert num == pytest.approx(500 * share * per_s, rel=0.1)


def test_one_prompt_in_ten_is_eight_times_as_long_and_the_mean_stays() -> None:
    params, lengths = SERVICES["gpu"]
    trace = make_trace("bimodal", params, 50, replace(lengths, sigma=0.0), 4000, seed=1)
    counts = Counter(request.prompt_tokens for request in trace)
    (short, _), (long, num_long) = counts.most_common()
    assert long == pytest.approx(8 * short, rel=0.01)
    assert num_long == pytest.approx(400, rel=0.1)
    mean = sum(request.prompt_tokens for request in trace) / 4000
    assert mean == pytest.approx(lengths.prompt, rel=0.05)
