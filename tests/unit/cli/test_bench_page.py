"""`sluice bench`: its flags, the counters that it reads, and what it tells of the curve."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from sluice import bench
from sluice.__main__ import main
from sluice.measure import curve
from sluice.measure.client import Outcome
from sluice.measure.curve import CurveTally, StepCosts
from sluice.measure.endpoint import ServerCounters, read_counters
from sluice.measure.targets import read_targets
from sluice.page import page, table, text_table

TARGETS = read_targets("ttft=1s,itl=50ms")
COSTS = StepCosts(a=5.0, b=1.0, c=0.001, d=0.1, chunk=512)


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["--url", "http://h", *argv])


def test_default_traffic_is_the_sources_and_scale_makes_it_smaller() -> None:
    sources = bench.Traffic.of(arguments())
    assert (sources.wave, sources.waves, sources.silence_s) == (200, 100, 30.0)
    assert sources.prompt_tokens == (1024, 3072)
    small = bench.Traffic.of(arguments("--scale", "0.05"))
    assert (small.wave, small.waves, small.silence_s) == (10, 5, 1.5)
    assert small.prompt_tokens == (51, 154)


@pytest.mark.parametrize(
    "flags",
    [
        *(("--scale", text) for text in ("0", "inf", "nan", "x")),
        *(("--silence", text) for text in ("-1", "inf", "nan")),
        ("--wave", "-1"),
        ("--wave", "1"),
        ("--max-tokens", "0", "8"),
        ("--max-tokens", "1", "8"),
        ("--vocab-size", "8"),
    ],
)
def test_traffic_that_is_none_is_refused(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(*flags)
    assert f"argument {flags[0]}: {flags[1]!r} is not a " in capsys.readouterr().err


def test_only_scale_rounds_a_wave_and_an_output_up_to_two() -> None:
    small = bench.Traffic.of(arguments("--scale", "0.001"))
    assert (small.wave, small.max_tokens) == (2, (2, 2))
    least = bench.Traffic.of(arguments("--wave", "2", "--max-tokens", "2", "3"))
    assert (least.wave, least.max_tokens) == (2, (2, 3))


def test_flags_of_the_admin_port_are_refused_beside_client_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        arguments("--client-side", "--admin-url", "http://h:8001")
    assert stop.value.code == 2
    assert "not allowed with argument --client-side" in capsys.readouterr().err
    token = ["--client-side", "--admin-token-file", str(tmp_path)]
    assert main(["bench", "--url", "http://127.0.0.1:1", *token]) == 2
    assert "--admin-token-file says nothing with --client-side" in capsys.readouterr().err


def test_a_file_of_bytes_holds_no_bearer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    token = ("--admin-token-file", str(tmp_path / "token"))
    assert main(["bench", "--url", "http://127.0.0.1:1", *token]) == 2
    assert "cannot be read: it is no text" in capsys.readouterr().err


def test_caps_are_a_list_of_numbers_from_1_on() -> None:
    assert bench.caps("8,1,4,4") == [1, 4, 8]
    for text in ("", "a", "0,1", "1;2"):
        with pytest.raises(argparse.ArgumentTypeError, match="list of caps"):
            bench.caps(text)


def test_counters_are_summed_over_engines_and_a_page_without_them_is_none() -> None:
    text = """vllm:generation_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="1"} 50.0
vllm:generation_tokens_created{engine="0"} 1.7e9
vllm:iteration_tokens_total_count{engine="0"} 40.0
sluice_step_model{coefficient="a",engine="0"} 4.5
sluice_step_model{coefficient="resid_q",engine="0"} 1.5"""
    found = read_counters(text, 2048)
    assert found is not None
    assert (found.tokens, found.steps) == (150.0, 40.0)
    assert found.costs == StepCosts(4.5, 0.0, 0.0, 0.0, 2048)
    for plain in (read_counters("\n".join(text.splitlines()[:4]), 1), read_counters(text)):
        assert plain is not None
        assert plain.costs is None, "nor without the most prompt tokens of a step"
    assert read_counters("up 1", 1) is None


def test_what_a_wave_brought_is_known_only_of_counters_of_one_process() -> None:
    before = ServerCounters(1000.0, 100.0, (5.0,))
    assert ServerCounters(1400.0, 200.0, (5.0,)).batch_since(before) == (100.0, 4.0)
    assert ServerCounters(1000.0, 100.0, (5.0,)).batch_since(before) == (0.0, None)
    assert ServerCounters(1400.0, 200.0, (6.0,)).batch_since(before) == (None, None), "another pod"
    assert ServerCounters(900.0, 200.0, (5.0,)).batch_since(before) == (None, None)
    assert ServerCounters(1400.0, 90.0).batch_since(ServerCounters(1000.0, 100.0)) == (None, None)
    assert ServerCounters(1400.0, 90.0).batch_since(None) == (None, None)


def result(**changes: Any) -> dict[str, Any]:
    points = []
    for cap, ttft_s in ((1, 3.0), (4, 0.4), (8, 0.3)):
        tally, gap_s = CurveTally(cap), 0.004 * cap
        ok = Outcome("ok", "p", ttft_s, ttft_s + 10 * gap_s, 11, (gap_s,) * 10, 0)
        for seconds in (8.0 / cap, 9.0 / cap):
            tally.add([ok] * 8, [100] * 8, seconds, TARGETS, 88.0 / cap, float(cap))
        points.append(curve.point(tally, TARGETS, COSTS))
    made: dict[str, Any] = {
        "url": "http://h", "route": "/generate", "model": "<demo>", "client": {"cpu": "c"},
        "caps_are": "changed live", "ceiling": 8, "left_out": [16], "traffic": {}, "seed": 0,
        "targets": {"percentile": "99", **TARGETS.by_name()}, "rules": curve.RULES,
        "knee": curve.knee(points), "points": points,
        "recommended": curve.recommend(points, has_targets=True),
    }  # fmt: skip
    return {**made, **changes}


def test_findings_name_the_cap_its_rule_those_that_hold_and_those_left_out() -> None:
    said = bench.findings(result())
    assert said[0].startswith("Recommended cap: 8 (of the caps that hold every target")
    assert said[1] == "Every target holds at P99 at: 4, 8."
    assert any("over the server's ceiling of 8: 16" in text for text in said)
    assert "0% of their rows away as padding" in said[-1]
    assert "a formula, no run" in said[-1]


def test_files_are_one_picture_one_page_with_it_inside_and_one_json(tmp_path: Path) -> None:
    made = result()
    bench.write(made, tmp_path / "out")
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    html = (tmp_path / "out/bench.html").read_text()
    assert "data:image/png;base64," in html
    assert "http://" not in html.replace("http://h", ""), "nothing beside it is fetched"
    assert "&lt;demo&gt;" in html
    assert json.loads((tmp_path / "out/bench.json").read_text()) == json.loads(json.dumps(made))


def test_tables_escape_what_they_hold_and_line_up() -> None:
    rows = [["name", "n"], ["<b>", "100"]]
    assert "<td>&lt;b&gt;</td>" in page("t", table(rows))
    assert text_table(rows) == "name    n\n<b>   100"
