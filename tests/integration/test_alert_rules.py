"""Alert rules over made-up hours, by promtool: windows, limits, and how soon each ends."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import dashboards
import prometheus
import pytest
from sluice_cluster.settings import LocalClusterError
from sluice_cluster.shell import run

PROMTOOL = "/usr/bin/promtool"
FAST, SLOW = "SluiceTargetBurningFast", "SluiceTargetBurningSlow"
MOVES, STATE = "sluice_batch_requests", "sluice_batch_state"
Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if why := prometheus.lacks():
        pytest.skip(why)


def _series(name: str, values: str, **labels: str) -> Json:
    told = ", ".join(f'{k}="{v}"' for k, v in {"namespace": "a", "name": "b", **labels}.items())
    return {"series": f"{name}{{{told}}}", "values": values}


def late(values: str, misses: str, allowed: str = "0.01") -> list[Json]:
    """Requests and late ones, a value each minute."""
    target = {"target": "timeToFirstToken"}
    return [
        _series("sluice_target_values_total", values, **target),
        _series("sluice_target_misses_total", misses, **target),
        _series("sluice_service_target_allowed_ratio", f"{allowed}x900", **target),
    ]


def firing(folder: Path, series: list[Json], minutes: int) -> set[str]:
    """The alerts that fire after so many minutes of `series`."""
    rules = prometheus.rules_of_chart()
    names = [r["alert"] for group in rules["groups"] for r in group["rules"] if "alert" in r]
    (folder / "rules.yaml").write_text(json.dumps(rules))
    queries = [f'count(ALERTS{{alertname="{name}", alertstate="firing"}})' for name in names]
    asked = [{"expr": q, "eval_time": f"{minutes}m", "exp_samples": []} for q in queries]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (folder / "case.yaml").write_text(json.dumps(told))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", folder / "case.yaml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = set(re.findall(r'alertname=\\*"(\w+)', done.stdout + done.stderr))
    assert found or "SUCCESS" in done.stdout, done.stdout + done.stderr
    return found - {"SluiceOperatorDown"}


def test_the_rules_and_each_query_of_a_dashboard_can_be_read(tmp_path: Path) -> None:
    rules = prometheus.CHART / "files/rules.yaml"
    assert "SUCCESS" in run([PROMTOOL, "check", "rules", rules])
    asked = [q for make in dashboards.DASHBOARDS.values() for q in dashboards.queries(make())]
    filled = [
        q.replace("$__rate_interval", "1m").replace("$gpu_price", "1").replace("$cpu_price", "1")
        for q in asked
    ]
    records = [{"record": f"q{i}", "expr": query} for i, query in enumerate(filled)]
    (tmp_path / "queries.yaml").write_text(
        json.dumps({"groups": [{"name": "all", "rules": records}]})
    )
    said = run([PROMTOOL, "check", "rules", tmp_path / "queries.yaml"])
    assert f"{len(records)} rules found" in said
    records[0]["expr"] += ")"
    (tmp_path / "broken.yaml").write_text(
        json.dumps({"groups": [{"name": "all", "rules": records}]})
    )
    with pytest.raises(LocalClusterError):
        run([PROMTOOL, "check", "rules", tmp_path / "broken.yaml"])


GOOD_DAY = "0x360"


@pytest.mark.parametrize(
    ("series", "minutes", "expected"),
    [
        # A fifth is late from the start: P99 allows a hundredth.
        (late("0+100x400", "0+20x400"), 2, set()),
        (late("0+100x400", "0+20x400"), 5, {FAST}),
        (late("0+100x400", "0+20x400"), 30, {FAST, SLOW}),
        # Six in a hundred are too few for the fast one.
        (late("0+100x400", "0+6x400"), 60, {SLOW}),
        (late("0+100x400", "0+5x400"), 400, set()),
        # All are late, after six good hours: in 5 minutes, and for long enough within the hour.
        (late("0+100x900", f"{GOOD_DAY} 100+100x400"), 365, set()),
        (late("0+100x900", f"{GOOD_DAY} 100+100x400"), 372, {FAST}),
        # They end: the short windows forget within minutes, not hours.
        (late("0+100x900", f"{GOOD_DAY} 100+100x60 6100x400"), 421, {FAST, SLOW}),
        (late("0+100x900", f"{GOOD_DAY} 100+100x60 6100x400"), 430, {SLOW}),
        (late("0+100x900", f"{GOOD_DAY} 100+100x60 6100x400"), 460, set()),
        # Nine late ones in an hour are no alert; nor is P50 at three quarters.
        (late("0+1x400", "0x10 1+1x8 9x300"), 20, set()),
        (late("0+100x400", "0+75x400", "0.5"), 400, set()),
        (late("0+100x400", "0+100x400", "0.5"), 30, {FAST, SLOW}),
        (late("0+100x400", "0+80x400", "0.1"), 10, {FAST}),
        # Without arrivals nothing is late.
        (late("0x400", "0x400"), 100, set()),
    ],
)
def test_the_windows_of_a_burning_target(
    tmp_path: Path, series: list[Json], minutes: int, expected: set[str]
) -> None:
    assert firing(tmp_path, series, minutes) == expected


def batch(completed: str, state: str = "in_progress", reason: str = "Running") -> list[Json]:
    condition = {"kind": "InferenceBatch", "type": "Succeeded", "status": "Unknown"}
    return [
        _series(MOVES, completed, state="completed"),
        _series(MOVES, "0x400", state="failed"),
        _series(MOVES, "1000x400", state="total"),
        _series(STATE, "1x400", state=state),
        _series("sluice_condition", "1x400", reason=reason, **condition),
    ]


@pytest.mark.parametrize(
    ("series", "minutes", "fires"),
    [
        (batch("0+1x400"), 200, False),
        (batch("0+1x60 60x300"), 80, False),
        (batch("0+1x60 60x300"), 95, True),
        (batch("0+1x60 60x60 61+1x200"), 125, False),
        (batch("0x400"), 60, True),
        (batch("0x400", reason="Queued"), 60, False),
        (batch("0x400", reason="Suspended"), 60, False),
        (batch("9x400", state="completed", reason="AllSucceeded"), 60, False),
    ],
)
def test_a_batch_that_has_no_result_for_half_an_hour_does_not_move(
    tmp_path: Path, series: list[Json], minutes: int, *, fires: bool
) -> None:
    assert firing(tmp_path, series, minutes) == ({"SluiceBatchNotMoving"} if fires else set())


def condition(kind: str, status: str, values: str = "1x100") -> list[Json]:
    labels = {"kind": "InferenceService", "type": kind, "status": status, "reason": "Why"}
    return [_series("sluice_condition", values, **labels)]


@pytest.mark.parametrize(
    ("series", "minutes", "expected"),
    [
        (condition("SLOFeasible", "False"), 9, set()),
        (condition("SLOFeasible", "False"), 11, {"SluiceTargetInfeasible"}),
        (condition("SLOFeasible", "Unknown"), 60, set()),
        (condition("MetricsAvailable", "False"), 6, {"SluiceNoEvidence"}),
        (condition("MetricsAvailable", "Unknown"), 60, set()),
        (condition("Stalled", "True"), 6, {"SluiceObjectStalled"}),
        (condition("Stalled", "True", "1x10 stale"), 12, set()),
        ([_series("sluice_engine_hung", "0x5 1x5 0x9", pod="p")], 8, {"SluicePodWedged"}),
        ([_series("sluice_engine_hung", "0x5 1x5 0x9", pod="p")], 12, set()),
        ([_series("sluice_service_memory_error_ratio", "-0.11x60")], 11, {"SluiceMemoryPlanOff"}),
        ([_series("sluice_service_memory_error_ratio", "0.09x60")], 60, set()),
    ],
)
def test_a_state_that_lasts_is_an_alert(
    tmp_path: Path, series: list[Json], minutes: int, expected: set[str]
) -> None:
    assert firing(tmp_path, series, minutes) == expected


def test_an_operator_without_metrics_is_an_alert_after_five_minutes(tmp_path: Path) -> None:
    """`firing` leaves it out, as only here it is about the operator."""
    rules = prometheus.rules_of_chart()
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    query = 'count(ALERTS{alertname="SluiceOperatorDown", alertstate="firing"})'
    at = [("4m", []), ("20m", [{"labels": "{}", "value": 1}]), ("40m", [])]
    asked = [{"expr": query, "eval_time": time, "exp_samples": found} for time, found in at]
    series = [_series("sluice_operator_objects", "_x30 3x30")]
    case = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    told = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "case.yaml").write_text(json.dumps(told))
    run([PROMTOOL, "test", "rules", tmp_path / "case.yaml"])
