"""What the tuner does to the cap, in the simulated world."""

from dataclasses import replace

import pytest
from sluice.simulate.trace import Request
from unit.operator.tuner.loop import SMALL_CPU, TARGETS, Loop, limits, shaped
from unit.operator.tuner.traces import bursts, poisson
from unit.operator.tuner.world import World


@pytest.mark.parametrize("reports_model", [True, False])
def test_a_queue_for_the_cap_raises_it_at_once_by_a_model_and_else_by_doubling(
    reports_model: bool,
) -> None:
    shape = shaped(reports_model=reports_model)
    world = World(shape, TARGETS, poisson([(120, 9)]), cap=2)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(120)
    caps = [2, *(cap for _, cap, _ in loop.cap_changes)]
    if reports_model:
        assert max(cap for at, cap, _ in loop.cap_changes if at <= 8) >= 16
    else:
        steps = list(zip(caps, caps[1:], strict=False))
        assert all(sooner < later <= 2 * sooner for sooner, later in steps)
        assert len(steps) >= 3


@pytest.mark.parametrize("reports_model", [True, False])
def test_stalls_of_the_first_minute_lower_the_cap_for_seconds_only(reports_model: bool) -> None:
    """A tenth of the steps stall while kernels compile. The cap was remembered as one that breaks,
    and 9 to 44 % of the first tokens of ten minutes came too late."""
    start = shaped(noise=0.05, hiccup_ms=100, hiccup_share=0.1, reports_model=reports_model)
    world = World(start, TARGETS, poisson([(10, 3), (590, 9)]), cap=32)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(40)
    for pod in world.pods:
        pod.quota.is_over = True
    loop.run(600)
    broken = [at for at, d in loop.decisions if d.verdicts["interTokenLatency"].verdict == "Breach"]
    assert broken, "the stalls did break the target"
    assert all(at <= 60 for at, _, _ in loop.cap_changes)
    assert world.cap >= 16
    assert loop.past.breached_caps == ()
    ticks = world.pods[0].ticks
    assert sum(t.good for t in ticks) > 0.9 * sum(t.finished for t in ticks)


def test_light_load_does_not_raise_an_unused_cap() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(600, 1)]), cap=8)
    loop = Loop(world, limits())
    loop.run(600)
    assert loop.cap_changes == loop.replica_changes == []
    assert loop.last.cap_move.reason == "CapUnused"


def test_broken_gaps_lower_the_cap_to_the_models_best() -> None:
    targets = replace(TARGETS, itl_ms=30)
    world = World(SMALL_CPU, targets, poisson([(120, 12)]), cap=32)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(120)
    at, cap, reason = loop.cap_changes[0]
    assert reason == "InterTokenLatencyBreached"
    assert cap == dict(loop.decisions)[at].predicted_cap
    assert at <= 30


def test_draining_from_a_high_cap_does_not_lower_it_a_second_time() -> None:
    long_ones = [Request(0.1 + 0.01 * i, 16, 1500) for i in range(32)]
    targets = replace(TARGETS, itl_ms=30)
    world = World(SMALL_CPU, targets, long_ones, cap=32)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(50)
    assert len(loop.cap_changes) == 1
    assert world.pods[0].num_running > world.cap


def test_a_cap_without_a_step_model_is_lowered_by_a_fifth_of_what_ran() -> None:
    shape = shaped(reports_model=False, ceiling=256, kv_tokens=400_000)
    long_ones = [Request(0.1 + 0.01 * i, 16, 3000) for i in range(40)]
    world = World(shape, replace(TARGETS, itl_ms=30), long_ones, cap=256)
    loop = Loop(world, limits(ceiling=256, max_replicas=1))
    loop.run(20)
    assert loop.cap_changes[0][1] == 32


def test_long_prompts_that_break_the_first_token_do_not_raise_the_cap() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(300, 0.2)], prompt=3000), cap=4)
    loop = Loop(world, limits())
    loop.run(300)
    assert loop.cap_changes == []
    infeasible = [d for _, d in loop.decisions if d.slo_feasible.holds is False]
    assert {d.slo_feasible.reason for d in infeasible} == {"PrefillExceedsTarget"}


def test_waiting_for_kv_memory_adds_pods_and_leaves_the_cap() -> None:
    shape = shaped(kv_tokens=1600)
    world = World(shape, TARGETS, poisson([(200, 5)], prompt=256, output=64), cap=16)
    loop = Loop(world, limits())
    loop.run(200)
    assert loop.cap_changes == []
    assert loop.replica_changes
    assert any(d.cause == "kv" for _, d in loop.decisions)


def test_throttling_that_breaks_even_one_sequence_is_infeasible_and_named() -> None:
    shape = shaped(hiccup_ms=50, hiccup_share=0.3)
    world = World(shape, replace(TARGETS, itl_ms=40), poisson([(120, 4)]), cap=8)
    loop = Loop(world, limits(max_replicas=3))
    loop.run(120)
    assert loop.cap_changes == []
    assert loop.last.slo_feasible.holds is False
    assert loop.last.slo_feasible.reason == "CPUThrottled"


def test_throttled_pods_become_as_many_as_the_arrivals_need() -> None:
    shape = shaped(hiccup_ms=50, hiccup_share=0.3)
    world = World(shape, replace(TARGETS, itl_ms=40), poisson([(120, 4)]), cap=8)
    loop = Loop(world, limits(max_replicas=3))
    loop.run(120)
    assert [to for _, to, _ in loop.replica_changes] == [2]


def test_a_pod_that_is_always_throttled_somewhat_is_tuned_like_any_other() -> None:
    shape = shaped(hiccup_ms=50, hiccup_share=0.1)
    world = World(shape, replace(TARGETS, itl_ms=150), poisson([(120, 7)]), cap=2)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(120)
    assert world.cap >= 16
    assert loop.last.slo_feasible.holds


def test_nothing_finishes_and_the_breach_is_still_seen() -> None:
    shape = shaped(kv_tokens=1_000_000)
    world = World(shape, TARGETS, poisson([(60, 1)], output=100_000), cap=4)
    loop = Loop(world, limits(max_replicas=1, ceiling=4))
    loop.run(60)
    assert len(world.pods[0].done) <= 2
    assert loop.last.verdicts["timeToFirstToken"].verdict == "Breach"
    assert loop.last.slo_met.holds is False


def test_one_slow_pod_of_three_is_named_and_the_cap_left_alone() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(200, 9)]), cap=8, replicas=3)
    world.pods[1].slowness = 6.0
    loop = Loop(world, limits(min_replicas=3))
    loop.run(200)
    assert loop.last.noisy_pods == ("pod-2",)
    assert not any(reason == "InterTokenLatencyBreached" for _, _, reason in loop.cap_changes)


def test_a_cap_that_breached_is_not_retried_for_ten_minutes() -> None:
    shape = shaped(reports_model=False)
    world = World(shape, replace(TARGETS, itl_ms=30), poisson([(700, 12)]), cap=32)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(600)
    lowered = [at for at, _, why in loop.cap_changes if why == "InterTokenLatencyBreached"]
    breached = min(known.cap for known in loop.past.breached_caps)
    assert lowered
    assert world.cap < breached
    assert not any(at > lowered[-1] for at, cap, _ in loop.cap_changes if cap >= breached)


def test_edited_targets_void_the_evidence_and_what_was_learnt() -> None:
    load = poisson([(130, 3), (400, 12)])
    world = World(SMALL_CPU, replace(TARGETS, itl_ms=30), load, cap=32)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(190)
    assert loop.past.breached_caps
    world.set_targets(replace(TARGETS, itl_ms=100))
    edited = loop.turn()
    assert edited.verdicts["interTokenLatency"].epoch_n == 0
    assert loop.past.breached_caps == ()
    loop.run(330)
    assert world.cap > 16


@pytest.mark.parametrize(("percentile", "by_s"), [("90", 60), ("99", 120), ("99.9", 1200)])
def test_three_nines_at_one_request_a_second_change_nothing_for_want_of_samples(
    percentile: str, by_s: float
) -> None:
    """Three gaps a request are 1,800 in ten minutes. Headroom takes at least 2,145 for P99.9, 214
    for P99. Nothing is predicted, nothing late, and the one sequence that may run is in use."""
    targets = replace(TARGETS, percentile=percentile, window_s=600)
    shape = shaped(reports_model=False)
    one_a_second = (Request(float(second), 64, 4) for second in range(1200))
    world = World(shape, targets, one_a_second, cap=1)
    loop = Loop(world, limits(ceiling=2))
    loop.run(min(600, by_s))
    if by_s > 600:
        assert loop.cap_changes == []
        said = {d.cap_move.reason for _, d in loop.decisions}
        assert said == {"CollectingEvidence", "CapUnused"}
        judged = loop.last.verdicts["interTokenLatency"]
        assert judged.samples_needed >= 2145 - 1800
        assert f"headroom needs {judged.samples_needed} more samples" in loop.last.cap_move.message
    loop.run(by_s)
    assert [(cap, reason) for _, cap, reason in loop.cap_changes] == [(2, "Headroom")]
    assert loop.replica_changes == []


def test_rare_traffic_is_said_to_be_unverifiable() -> None:
    targets = replace(TARGETS, percentile="99.9", window_s=600)
    world = World(SMALL_CPU, targets, poisson([(600, 0.1)]), cap=8)
    loop = Loop(world, limits())
    loop.run(600)
    assert not loop.last.verdicts["timeToFirstToken"].verifiable


def test_a_cap_that_is_not_used_makes_no_target_unverifiable() -> None:
    """No gap is one at the cap, and hundreds a second come."""
    world = World(SMALL_CPU, TARGETS, poisson([(120, 3)]), cap=32)
    loop = Loop(world, limits())
    loop.run(120)
    judged = loop.last.verdicts["interTokenLatency"]
    assert loop.last.cap_move.reason == "CapUnused"
    assert judged.samples_needed > 0
    assert judged.verifiable


def test_an_infeasible_first_token_target_never_lowers_the_cap() -> None:
    targets = replace(TARGETS, ttft_ms=5)
    world = World(SMALL_CPU, targets, poisson([(300, 5)]), cap=8)
    loop = Loop(world, limits())
    loop.run(300)
    assert min([8, *(cap for _, cap, _ in loop.cap_changes)]) == 8


def test_advisory_mode_reports_and_changes_nothing() -> None:
    targets = replace(TARGETS, mode="Advisory")
    world = World(SMALL_CPU, targets, poisson([(60, 9)]), cap=2)
    loop = Loop(world, limits())
    loop.run(60)
    assert (world.cap, world.replicas) == (2, 1)
    assert (loop.last.cap, loop.last.cap_move.to) == (2, 11)
    assert loop.last.cap_move.message


def test_bursts_raise_the_cap_within_the_ceiling_and_the_gaps_hold() -> None:
    world = World(SMALL_CPU, TARGETS, bursts(100, 30, 20), cap=2)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(600)
    assert 16 <= world.cap <= 32
    assert loop.last.verdicts["interTokenLatency"].verdict != "Breach"


def test_a_noisy_minute_that_broke_the_gaps_does_not_keep_the_cap_down() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(700, 9)]), cap=16)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(60)
    for pod in world.pods:
        pod.slowness = 5.0
    loop.run(120)
    assert loop.last.verdicts["interTokenLatency"].verdict == "Breach"
    for pod in world.pods:
        pod.slowness = 1.0
    loop.run(680)
    assert world.cap >= 16
    assert loop.last.verdicts["timeToFirstToken"].verdict != "Breach"
