"""Failures that autoscalers of inference are known for, and that no other test here names."""

from dataclasses import replace

import pytest
from sluice_operator.tuner import Past, decide
from sluice_worker.contract import FirstTokens
from unit.operator.tuner.made import TARGETS, late, observation, pod, tick


def test_a_day_of_counts_is_no_rate() -> None:
    """A counter that is read as a gauge: the sum of all ticks held, however old."""
    busy = [tick(seq, arrivals=500) for seq in range(1, 601)]
    idle = [
        tick(seq, arrivals=0, ttft=FirstTokens(), running=0, max_running=0)
        for seq in range(601, 901)
    ]
    _, decision = decide(Past(), observation(pod("a", busy + idle), replicas=1))
    assert decision.arrivals_per_s == 0
    assert decision.desired_replicas == 1


def test_the_same_evidence_read_again_is_no_more_demand() -> None:
    view = pod("a", [tick(seq) for seq in range(1, 61)])
    past, once = decide(Past(), observation(view))
    _, again = decide(past, observation(view))
    assert once.arrivals_per_s == again.arrivals_per_s == 5.0


@pytest.mark.parametrize(("ttft_ms", "verdict"), [(500, "Breach"), (0.5, "Breach"), (500_000, "")])
def test_milliseconds_are_milliseconds_on_both_sides(ttft_ms: float, verdict: str) -> None:
    """Units mixed: counts over target are the pod's, the quantile beside them is in the same ms."""
    misses = late(10, 10) if verdict else late(10, 0)
    view = pod("a", [tick(seq, ttft=misses) for seq in range(1, 61)])
    _, decision = decide(Past(), observation(view, targets=replace(TARGETS, ttft_ms=ttft_ms)))
    judged = decision.verdicts["timeToFirstToken"]
    assert judged.target_ms == ttft_ms
    assert (judged.verdict == "Breach") == bool(verdict)
    assert judged.quantile_ms == pytest.approx(1.02**350 if verdict else 1.02**250, rel=0.02)
