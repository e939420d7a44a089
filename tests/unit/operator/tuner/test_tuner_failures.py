"""Failed requests: told as what they are, and no evidence of speed."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sluice_core.contract import FirstTokens, Requests, StepModel, Tick, TokenGaps
from sluice_operator.tuner import Decision, Past, decide
from unit.operator.tuner.made import LIMITS, TARGETS, late, observation, pod, tick

MODEL = StepModel(5.0, 0.1, 0.0, 0.05, 1000, 1.05)


def failing(seq: int, num: int = 5, kind: str = "500") -> Tick:
    """A tick in which the engine fails all that arrives, at once."""
    return tick(
        seq, arrivals=num, finished=0, good=0, smooth=0, ttft=FirstTokens(), itl=TokenGaps(),
        e2e=Requests(), steps=0, decodes=0, prefill_tokens=0, generated_tokens=0, busy_s=0.0,
        running=0, max_running=1, failed={kind: num},
    )  # fmt: skip


def decided(*ticks: Tick, model: StepModel | None = None, **changes: Any) -> Decision:
    return decide(Past(), observation(pod("a", ticks, model=model), **changes))[1]


def test_an_engine_that_fails_all_is_told_so_and_nothing_moves() -> None:
    """It answered 500 within 40 ms, and was said to need shorter prompts and a faster device."""
    decision = decided(*(failing(seq) for seq in range(1, 61)), replicas=2)
    assert (decision.slo_met.holds, decision.slo_met.reason) == (False, "RequestsFail")
    assert decision.slo_met.message.startswith("300 of 300 requests failed: 500 (300)")
    assert (decision.succeed.holds, decision.succeed.reason) == (False, "RequestsFail")
    assert (decision.slo_feasible.holds, decision.slo_feasible.reason) == (None, "RequestsFail")
    assert decision.failures.is_all
    for move, now in ((decision.cap_move, 8), (decision.replicas_move, 2)):
        assert (move.to, move.reason) == (now, "RequestsFail")
    assert (decision.cause, decision.good_share) == ("none", 0.0)


def test_requests_that_fail_beside_others_move_neither_cap_nor_replicas() -> None:
    for model in (None, MODEL):
        sound = [tick(seq) for seq in range(1, 61)]
        some = [msgspec.structs.replace(one, failed={"500": 1, "cut": 1}) for one in sound]
        without, with_some = decided(*sound, model=model), decided(*some, model=model)
        assert with_some.cap_move == without.cap_move
        assert with_some.replicas_move == without.replicas_move
        assert with_some.verdicts == without.verdicts
        assert with_some.slo_feasible == without.slo_feasible
        assert (without.slo_met.holds, with_some.slo_met.holds) == (True, False)
        assert with_some.slo_met.reason == with_some.succeed.reason == "RequestsFail"
        assert "120 of 720 requests failed: 500 (60), cut (60)" in with_some.slo_met.message
        assert not with_some.failures.is_all


@pytest.mark.parametrize(
    ("num_failed", "num_late", "percentile", "met", "reason", "succeed"),
    [
        (0, 0, "99", True, "TargetsHold", True),
        (5, 0, "99", True, "TargetsHold", True),
        (7, 0, "99", False, "RequestsFail", False),
        (4, 4, "99", False, "RequestsFail", True),
        (4, 7, "99", False, "TargetMissed", True),
        (7, 7, "99", False, "RequestsFail", False),
        (30, 0, "50", True, "TargetsHold", False),
        (1, 0, "99.9", False, "RequestsFail", False),
    ],
)
def test_the_promise_is_over_late_and_failed_requests_together(
    num_failed: int, num_late: int, percentile: str, met: bool, reason: str, succeed: bool
) -> None:
    """Of 600 that are decided for speed: P99 allows 6."""
    ticks = [tick(seq) for seq in range(1, 61)]
    for at in range(num_failed):
        ticks[at] = msgspec.structs.replace(ticks[at], failed={"503": 1})
    for at in range(num_late):
        ticks[-at - 1] = msgspec.structs.replace(ticks[-at - 1], ttft=late(10, 1, "prefill"))
    decision = decided(*ticks, targets=replace(TARGETS, percentile=percentile))
    assert (decision.slo_met.holds, decision.slo_met.reason) == (met, reason)
    assert decision.succeed.holds is succeed
    assert ("requests failed" in decision.slo_met.message) == bool(num_failed)


@pytest.mark.parametrize(
    ("failed", "holds", "reason"),
    [({}, False, "PrefillExceedsTarget"), ({"504": 5}, None, "RequestsFail")],
)
def test_no_faster_device_is_asked_for_while_requests_fail(
    failed: dict[str, int], holds: bool | None, reason: str
) -> None:
    """Those that fail slowly were late before, and booked to prefill."""
    ticks = [
        tick(seq, arrivals=2, ttft=late(10, 5, "prefill"), failed=failed) for seq in range(1, 61)
    ]
    found = decided(*ticks).slo_feasible
    assert (found.holds, found.reason) == (holds, reason)


def test_all_have_failed_once_none_finished_for_a_minute_and_until_one_does() -> None:
    before = [tick(seq) for seq in range(1, 61)]
    for num, is_all in ((5, False), (29, False), (30, True), (60, True)):
        after = [failing(seq, 1) for seq in range(61, 61 + num)]
        assert decided(*before, *after).failures.is_all is is_all
    served = tick(121, arrivals=1, finished=1)
    after = [failing(seq, 1) for seq in range(61, 121)]
    assert not decided(*before, *after, served).failures.is_all


@pytest.mark.parametrize(("num", "is_all"), [(3, False), (9, False), (10, True)])
def test_a_few_failures_are_not_all(num: int, is_all: bool) -> None:
    """One odd request with its client's retries, and nothing else."""
    idle = failing(1, 0)
    ticks = [msgspec.structs.replace(idle, seq=seq, t_s=2.0 * seq, failed={}) for seq in range(99)]
    ticks[50] = msgspec.structs.replace(ticks[50], failed={"500": num})
    decision = decided(*ticks)
    assert decision.failures.is_all is is_all
    assert decision.succeed.holds is False


@pytest.mark.parametrize(("names", "told"), [("b", "; all of them in pod b"), ("ab", "")])
def test_the_only_pod_that_fails_is_named(names: str, told: str) -> None:
    pods = [
        pod(name, [failing(seq) if name in names else tick(seq) for seq in range(1, 61)])
        for name in "ab"
    ]
    decision = decide(Past(), observation(*pods))[1]
    assert decision.succeed.message.partition(")")[2] == f"{told} in 600 s"


def test_without_traffic_nothing_is_said_of_failures() -> None:
    idle = msgspec.structs.replace(failing(1, 0), failed={})
    decision = decided(*(msgspec.structs.replace(idle, seq=n, t_s=2.0 * n) for n in range(1, 61)))
    assert (decision.succeed.holds, decision.succeed.reason) == (None, "NoTraffic")
    assert decision.slo_met.reason == "NoTraffic"


def test_failures_are_told_where_there_is_no_target() -> None:
    targets = replace(TARGETS, ttft_ms=None, itl_ms=None)
    decision = decided(*(failing(seq) for seq in range(1, 61)), targets=targets)
    assert decision.slo_met.reason == "NoTargets"
    assert decision.succeed.holds is False


def test_limits_are_kept_while_all_requests_fail() -> None:
    limits = replace(LIMITS, ceiling=4, max_replicas=2)
    decision = decided(*(failing(seq) for seq in range(1, 61)), limits=limits, replicas=3)
    assert (decision.cap, decision.replicas) == (4, 2)
