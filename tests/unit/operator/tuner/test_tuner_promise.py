"""What a decision makes of targets that are absent, rare or strict, of refusals and of memory."""

from dataclasses import replace

import msgspec
from sluice_core.contract import FirstTokens, MemoryReport, StepModel, Waiting
from sluice_operator.tuner import Past, Targets, decide
from unit.operator.tuner.made import TARGETS, gaps, late, observation, pod, tick


def test_without_targets_the_cap_goes_to_what_memory_allows() -> None:
    none = Targets("99", None, None, None)
    ticks = [tick(seq, waiting=Waiting(cap=50)) for seq in range(1, 40)]
    _, decision = decide(Past(), observation(pod("a", ticks), targets=none))
    assert decision.cap == 16
    assert (decision.slo_met.holds, decision.slo_met.reason) == (None, "NoTargets")


def test_a_cap_that_the_kv_memory_bounds_is_limited_by_it() -> None:
    view = pod("a", [tick(seq, waiting=Waiting(cap=9)) for seq in range(1, 40)])
    assert view.evidence is not None
    small = msgspec.structs.replace(view.evidence, memory=MemoryReport({}, {}, 900))
    _, decision = decide(Past(), observation(replace(view, evidence=small)))
    assert decision.cap_move.reason == "KVMemory"
    assert decision.limited_by == "VRAM"


def test_what_was_refused_was_not_good() -> None:
    ticks = [tick(seq, arrivals=20, refused=10, ttft=late(20, 10)) for seq in range(1, 40)]
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert (decision.good_share, decision.smooth_share) == (0.5, 0.5)


def test_a_breach_of_three_nines_is_seen_where_two_hold() -> None:
    ticks = [tick(seq, itl=gaps(1000, 5)) for seq in range(1, 200)]
    for percentile, verdict in (("99", "Headroom"), ("99.9", "Breach")):
        targets = replace(TARGETS, percentile=percentile)
        _, decision = decide(Past(), observation(pod("a", ticks), targets=targets))
        assert decision.verdicts["interTokenLatency"].verdict in (verdict, "Hold")
        assert decision.verdicts["interTokenLatency"].cap_breached == (verdict == "Breach")


def test_pods_with_little_to_do_leave() -> None:
    """One request in twenty seconds at each: half a minute says nothing of their lengths."""
    sparse = [
        tick(seq, arrivals=int(seq % 10 == 0), finished=int(seq % 10 == 0), itl=gaps(6, 0),
             generated_tokens=6, prefill_tokens=6, steps=6, decodes=6, running=0, max_running=1,
             ttft=FirstTokens(n=int(seq % 10 == 0)))
        for seq in range(1, 900)
    ]  # fmt: skip
    pods = [pod(name, sparse, model=StepModel(5.0, 2.0, 0.0, 0.05, 1000, 1.05)) for name in "abcd"]
    _, decision = decide(Past(), observation(*pods))
    assert decision.desired_replicas == 1
    assert decision.replicas_move.reason == "ScaleDownWindow"


def test_advice_to_scale_in_stays_while_it_holds() -> None:
    past, advised = Past(), []
    for end in range(60, 400, 10):
        idle = [tick(seq, arrivals=0, finished=0, running=0) for seq in range(1, end)]
        pods = [pod(name, idle) for name in "abc"]
        targets = replace(TARGETS, mode="Advisory")
        past, decision = decide(past, observation(*pods, targets=targets))
        advised.append(decision.replicas_move.to < 3)
        assert decision.replicas == 3
    first = advised.index(True)
    assert all(advised[first:])


def test_what_a_pod_served_before_it_fell_silent_stays_in_the_promise() -> None:
    """In the middle of an outage, "no traffic" would be a lie."""
    missed = [tick(seq, ttft=late(10, 3)) for seq in range(1, 100)]
    seen = observation(pod("a", missed))
    assert decide(Past(), seen)[1].slo_met.holds is False
    silent = replace(seen, now=seen.now + 60)
    decision = decide(Past(), silent)[1]
    assert decision.silent_pods == ("a",)
    assert (decision.slo_met.holds, decision.slo_met.reason) == (False, "TargetMissed")
    long_ago = decide(Past(), replace(seen, now=seen.now + 2 * TARGETS.window_s))[1]
    assert (long_ago.slo_met.holds, long_ago.slo_met.reason) == (None, "MajoritySilent")
