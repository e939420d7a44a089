"""What the tuner remembers: caps that breached, and scale-outs that have not settled."""

from dataclasses import replace

import msgspec
import pytest
from sluice_core.contract import Lengths, StepModel, Waiting
from sluice_operator.tuner import Decision, Past, decide
from sluice_operator.tuner.types import BreachedCap, CapChange, ReplicaChange
from unit.operator.tuner.made import LIMITS, TARGETS, gaps, late, observation, pod, tick

FIRST_30 = range(1, 31)
QUEUED = [tick(seq, ttft=late(10, 10), waiting=Waiting(cap=9)) for seq in FIRST_30]
NOW = 60.0


@pytest.mark.parametrize(
    ("age_s", "times", "mean_tokens", "cap"),
    [
        (599, 0, 164, 13),
        (601, 0, 164, 16),
        (1199, 1, 164, 13),
        (1201, 1, 164, 16),
        (599, 0, 250, 16),
        (599, 0, 150, 13),
    ],
)
def test_a_breached_cap_is_avoided_for_a_time_that_doubles_unless_lengths_shifted(
    age_s: float, times: int, mean_tokens: float, cap: int
) -> None:
    past = Past(breached_caps=(BreachedCap(16, NOW - age_s, times, mean_tokens),))
    _, decision = decide(past, observation(pod("a", QUEUED)))
    assert decision.cap == cap


def test_breaching_the_same_cap_again_doubles_its_time() -> None:
    broken = pod("a", [tick(seq, itl=gaps(1000, 500)) for seq in range(1, 71)])
    first, _ = decide(Past(), observation(broken))
    second, _ = decide(first, observation(broken))
    assert [(known.cap, known.times) for known in first.breached_caps] == [(8, 0)]
    assert [(known.cap, known.times) for known in second.breached_caps] == [(8, 1)]


@pytest.mark.parametrize(("sigma", "cap"), [(10.0, 16), (80.0, 13)])
def test_lengths_that_only_seem_to_have_shifted_leave_it_blocked(sigma: float, cap: int) -> None:
    """164 tokens on average of a hundred requests, where 130 had been: beyond a fifth by 8."""
    past = Past(breached_caps=(BreachedCap(16, NOW - 1, 0, 130.0),))
    seen = pod("a", QUEUED)
    assert seen.evidence is not None
    evidence = msgspec.structs.replace(seen.evidence, lengths=Lengths(164.0, sigma, 100))
    _, decision = decide(past, observation(replace(seen, evidence=evidence)))
    assert decision.cap == cap


def test_a_cap_that_broke_in_a_spell_that_lasts_is_not_remembered() -> None:
    broken = [tick(seq, itl=gaps(1000, 500), slow_steps=125) for seq in range(1, 31)]
    past, decision = decide(Past(), observation(pod("a", broken)))
    assert decision.cap < 8
    assert not past.breached_caps


@pytest.mark.parametrize(("edited_s", "cap"), [(0.0, 8), (20.0, 4)])
def test_headroom_under_other_targets_proves_nothing(edited_s: float, cap: int) -> None:
    """The model sees 4 hold 12 ms; 8 had shown headroom, under these targets or under others."""
    targets = replace(TARGETS, itl_ms=12.0)
    raised = CapChange(10.0, 8, 16, epoch=1, reason="Headroom")
    past = Past(targets="99|500|12.0|None", targets_since_s=edited_s, last_change=raised)
    broken = [tick(seq, cap=16, max_running=16, itl=gaps(1000, 900)) for seq in FIRST_30]
    view = pod("a", broken, model=StepModel(5.0, 1.0, 0.0, 0.02, 1000, 1.05))
    assert decide(past, observation(view, cap=16, targets=targets))[1].cap == cap


def overloaded(past: Past, num_starting: int = 0) -> Decision:
    """10 arrivals/s where a pod at its ceiling does 5, `num_starting` pods on their way."""
    busy = [tick(t.seq, ttft=t.ttft, waiting=t.waiting, arrivals=20) for t in QUEUED]
    starting = [
        pod(f"new-{index}", [], ready=False, evidence=None, config=None)
        for index in range(num_starting)
    ]
    limits = replace(LIMITS, ceiling=8, max_replicas=8)
    _, decision = decide(past, observation(pod("a", busy), *starting, limits=limits))
    return decision


def scaled(arrivals_per_s: float, drain_s: float = 0.0, settled_s: float | None = None) -> Past:
    """One scale-out from 1 to 2 at second 20."""
    change = ReplicaChange(20.0, 1, 2, "ScaledOut", arrivals_per_s, drain_s, settled_s)
    return Past(scale_history=(change,))


def test_more_arrivals_than_the_pods_can_do_add_what_the_rate_needs() -> None:
    assert overloaded(Past()).replicas >= 3


def test_no_second_scale_out_before_the_first_is_ready() -> None:
    decision = overloaded(scaled(10.0), num_starting=1)
    assert (decision.replicas, decision.replicas_move.reason) == (2, "AwaitingReplicas")
    assert not decision.cap_reason
    assert decision.pending_replicas == 1


def test_no_second_scale_out_before_the_backlog_has_drained() -> None:
    draining = Past(scale_history=(ReplicaChange(5.0, 0, 1, "ScaledOut", 10.0, 70.0, 10.0),))
    decision = overloaded(draining)
    assert (decision.cap_reason, decision.replicas_move.reason) == ("", "AwaitingReplicas")
    drained = Past(scale_history=(ReplicaChange(5.0, 0, 1, "ScaledOut", 10.0, 30.0, 10.0),))
    assert overloaded(drained).replicas >= 3


def test_arrivals_that_rose_by_a_fifth_do_not_wait() -> None:
    assert overloaded(scaled(8.0), num_starting=1).replicas > 2
    assert overloaded(scaled(9.0), num_starting=1).replicas == 2


def test_the_cold_start_is_measured_when_the_new_pods_are_ready() -> None:
    pods = [pod(name, QUEUED) for name in "ab"]
    past, _ = decide(scaled(10.0), observation(*pods))
    assert past.cold_start_s == 40.0
    assert past.scale_history[-1].settled_s == NOW


def test_a_breached_cap_is_avoided_also_while_nothing_has_finished_since_a_restart() -> None:
    past = Past(breached_caps=(BreachedCap(16, NOW - 1, 0, 500.0),))
    seen = pod("a", QUEUED)
    assert seen.evidence is not None
    evidence = msgspec.structs.replace(seen.evidence, lengths=Lengths(0, 0, 0))
    _, decision = decide(past, observation(replace(seen, evidence=evidence)))
    assert decision.cap == 13


def test_a_scale_out_that_somebody_else_undid_is_over_and_measures_no_cold_start() -> None:
    out = ReplicaChange(NOW - 30, 1, 3, "ScaledOut", 5.0)
    past, _ = decide(Past(scale_history=(out,)), observation(pod("a", QUEUED), replicas=1))
    assert past.scale_history[0].settled_s == NOW
    assert past.cold_start_s is None
