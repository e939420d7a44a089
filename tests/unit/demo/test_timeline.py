"""The demo's checks: each passes on a story that kept its promise and fails on one that did not."""

from dataclasses import replace
from typing import Any

import pytest
from demo import timeline
from demo.timeline import Row

A, B, C = "uid-a", "uid-b", "uid-c"


def row(t: float, phase: str, cap: int, ready: int, verdict: str = "Hold", **pods: int) -> Row:
    names = {"a": A, "b": B, "c": C}
    return Row(
        t_s=t,
        phase=phase,
        arrivals_per_s=10.0,
        cap=cap,
        effective_batch=2.0,
        replicas=ready,
        ready=ready,
        ttft_p99_ms=120.0,
        itl_p99_ms=9.5,
        verdict=verdict,
        cause="cap",
        reason="",
        pods={names[k]: v for k, v in (pods or {"a": 0}).items()},
    )


STORY = [
    row(0, "warmup", 2, 1),
    row(2, "warmup", 8, 1),
    row(4, "high", 8, 1, "Breach"),
    row(30, "high", 8, 2, a=0, b=0),
    row(60, "ebb", 8, 1),
]


def phase(name: str, ok: int, by_pod: dict[str, int], **results: int) -> dict[str, Any]:
    sent = ok + sum(results.values())
    return {
        "phase": name,
        "sent": sent,
        "results": {"ok": ok, **results},
        "retries": 0,
        "by_pod": by_pod,
    }


HIGH = phase("high", 100, {"p": 70, "q": 30}) | {"p99_ttft_ms": 900.0, "p99_itl_ms": 12.0}
PHASES = [phase("low", 50, {"p": 50}), HIGH]
TARGETS = {"p99_ttft_ms": 500.0, "p99_itl_ms": 50.0}


def test_story_that_kept_every_promise_passes_every_check() -> None:
    assert [c.claim for c in timeline.checks(STORY, PHASES, TARGETS) if not c.seen] == []


def test_load_that_keeps_within_the_targets_has_broken_none() -> None:
    within = HIGH | {"p99_ttft_ms": 400.0}
    assert not timeline.broken(STORY, [within], TARGETS).seen


def test_held_share_counts_looks_with_both_p99s_within_their_targets() -> None:
    late, slow = replace(STORY[0], ttft_p99_ms=501), replace(STORY[0], itl_p99_ms=51)
    unmeasured = replace(STORY[0], itl_p99_ms=None)
    rows = [STORY[0], late, slow, STORY[1], unmeasured]
    assert timeline.held_share(rows, 500, 50) == 0.5


def test_broken_target_without_a_cause_is_not_told() -> None:
    silent = [replace(row, cause="-") for row in STORY]
    assert not timeline.broken(silent, PHASES, TARGETS).seen


def test_restart_between_raises_is_not_a_live_raise() -> None:
    rows = [STORY[0], replace(STORY[1], pods={A: 1})]
    assert not timeline.raised_live(rows).seen


def test_raise_seen_on_other_pods_is_not_a_live_raise() -> None:
    rows = [STORY[0], replace(STORY[1], pods={B: 0})]
    assert not timeline.raised_live(rows).seen


def test_new_pod_below_a_fifth_of_the_requests_is_not_real_capacity() -> None:
    assert not timeline.shared([phase("high", 100, {"p": 81, "q": 19})]).seen


@pytest.mark.parametrize("result", ["failed", "cut"])
def test_one_request_without_full_answer_is_a_loss(result: str) -> None:
    assert not timeline.nothing_lost([phase("low", 99, {"p": 100}, **{result: 1})]).seen


def test_second_pod_that_stays_is_not_scaled_in() -> None:
    assert not timeline.scaled_in(STORY[:4]).seen


def test_status_without_samples_is_a_row_of_dashes() -> None:
    line = timeline.row(3.0, "warmup", {"status": {}}, []).line(0.0)
    assert line.split() == ["3s", "warmup", "-", "0", "-", "0/0", "-ms", "-ms", "NoTraffic", "-"]


def test_worst_verdict_of_the_targets_is_shown() -> None:
    slo = {
        "timeToFirstToken": {"verdict": "Headroom", "measured": "1.5s"},
        "interTokenLatency": {"verdict": "Breach", "measured": "31ms"},
    }
    seen = timeline.row(0.0, "high", {"status": {"slo": slo}}, [])
    assert (seen.verdict, seen.ttft_p99_ms, seen.itl_p99_ms) == ("Breach", 1500.0, 31.0)


ROLL = [
    *STORY,
    row(70, "roll", 8, 1, a=0),
    row(80, "roll", 8, 2, a=0, c=0),
    row(90, "roll", 8, 1, c=0),
]


def test_rollout_under_load_is_seen_and_the_second_pod_left_before_it() -> None:
    phases = [*PHASES, phase("roll", 40, {"p": 20, "r": 20})]
    told = timeline.checks(ROLL, phases, TARGETS)
    assert len(told) == 7
    assert [c.claim for c in told if not c.seen] == []


def test_first_look_at_a_rollout_may_find_its_new_pod_there() -> None:
    assert timeline.rolled([*STORY, *ROLL[-2:]]).seen


def test_rollout_that_ends_after_the_load_is_not_seen() -> None:
    late = [*ROLL[:-1], replace(ROLL[-1], phase="idle")]
    assert not timeline.rolled(late).seen


def test_old_pod_that_stays_is_no_rollout() -> None:
    assert not timeline.rolled(ROLL[:-1]).seen


def test_second_pod_that_leaves_with_the_rollout_was_not_drained_by_the_ebb() -> None:
    assert not timeline.scaled_in([r for r in ROLL if r.phase != "ebb"]).seen


def test_restart_of_a_sidecar_counts() -> None:
    sidecar = {
        "containerStatuses": [{"restartCount": 0}],
        "initContainerStatuses": [{"restartCount": 2}],
    }
    seen = timeline.row(0, "low", {}, [{"metadata": {"uid": A}, "status": sidecar}])
    assert seen.pods == {A: 2}
