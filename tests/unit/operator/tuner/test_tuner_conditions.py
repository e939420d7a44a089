"""What status says keeps the cap from growing, and when it says that the replicas are all there."""

from dataclasses import replace
from typing import Any

import pytest
from sluice_core import sketch
from sluice_core.contract import StepModel, TokenGaps
from sluice_operator.tuner import Past, decide
from sluice_operator.tuner.types import BreachedCap
from unit.operator.tuner.made import LIMITS, TARGETS, gaps, late, observation, pod, tick

STEEP = StepModel(5.0, 6.0, 0.0, 0.05, 1000, 1.05)
"""A full cap of n takes 5 + 6 n ms and 5 % more at P99: 50 ms, less the margin, hold 5."""
ROOMY = StepModel(5.0, 0.1, 0.0, 0.05, 1000, 1.05)
SNUG = TokenGaps(1000, 0, 0, 1000, 0, {sketch.bucket_of(49.0): 1000})
"""All in time, and so slow that they correct no model."""
BROKEN = gaps(1000, 500)
NO_GAPS = replace(TARGETS, itl_ms=None, e2e_ms=9000)


def limited_by(past: Past, model: StepModel | None = ROOMY, **changes: Any) -> str | None:
    itl = changes.pop("itl", SNUG)
    ticks = [tick(seq, itl=itl) for seq in range(1, 21)]
    return decide(past, observation(pod("a", ticks, model=model), **changes))[1].limited_by


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        (None, {}),
        ("InterTokenLatency", {"model": STEEP}),
        ("Minimum", {"model": None, "itl": BROKEN, "limits": replace(LIMITS, min_num_seqs=8)}),
        (None, {"model": None, "itl": BROKEN, "limits": replace(LIMITS, min_num_seqs=7)}),
        ("User", {"limits": replace(LIMITS, ceiling=8, ceiling_by="User")}),
        ("VRAM", {"limits": replace(LIMITS, ceiling=8)}),
    ],
)
def test_what_keeps_the_cap_from_growing_is_named(
    limit: str | None, changes: dict[str, Any]
) -> None:
    assert limited_by(Past(), **changes) == limit


@pytest.mark.parametrize(
    ("breached", "targets", "limit"),
    [
        (10, TARGETS, "InterTokenLatency"),
        (11, TARGETS, "InterTokenLatency"),
        (12, TARGETS, None),
        (10, NO_GAPS, "EndToEnd"),
    ],
)
def test_a_cap_that_broke_a_target_a_moment_ago_keeps_those_next_below_it_from_growing(
    breached: int, targets: Any, limit: str | None
) -> None:
    """From nine tenths of it on it would be the same one."""
    past = Past(breached_caps=(BreachedCap(breached, 39.0, 0, 164.0),))
    assert limited_by(past, targets=targets) == limit


@pytest.mark.parametrize(
    ("arrivals", "limits", "reason"),
    [
        (40, replace(LIMITS, max_replicas=1), "AtMaxReplicas"),
        (40, replace(LIMITS, max_replicas=2), "TargetMissed"),
        (40, replace(LIMITS, max_replicas=1, replicas_external=True), "TargetMissed"),
        (2, replace(LIMITS, max_replicas=1), "TargetMissed"),
    ],
    ids=["too few", "one more may come", "another's", "enough"],
)
def test_a_missed_target_is_told_as_a_want_of_replicas_where_there_may_be_no_more(
    arrivals: int, limits: Any, reason: str
) -> None:
    """First tokens were late in the epoch before; in this one none is, so that none is asked for
    just now."""
    before = [tick(seq, epoch=0, arrivals=arrivals, ttft=late(10, 10)) for seq in range(1, 31)]
    now = [tick(seq, arrivals=arrivals) for seq in range(31, 61)]
    seen = observation(pod("a", before + now), limits=replace(limits, ceiling=8))
    _, decision = decide(Past(), seen)
    assert decision.replicas_move.reason in ("Steady", "ReplicasExternal")
    assert (decision.slo_met.holds, decision.slo_met.reason) == (False, reason)
