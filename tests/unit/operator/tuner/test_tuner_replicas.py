"""What the tuner does to the replicas, in the simulated world."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from random import Random
from statistics import median
from typing import Any

import msgspec
import pytest
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.trace import Request
from sluice_core.contract import FirstTokens, Requests, StepModel, Waiting
from sluice_operator.tuner import Past, Targets, decide
from sluice_operator.tuner.demand import Arrivals, Backlog, Capacity, plan_demand, read_arrivals
from sluice_operator.tuner.evidence import HeardPod
from sluice_operator.tuner.types import ReplicaChange
from unit.operator.tuner.loop import SMALL_CPU, TARGETS, Loop, limits, shaped
from unit.operator.tuner.made import LIMITS as MADE_LIMITS
from unit.operator.tuner.made import TARGETS as MADE_TARGETS
from unit.operator.tuner.made import late, observation, pod, tick
from unit.operator.tuner.traces import bursts, poisson
from unit.operator.tuner.world import World


def to_the_oldest(pods: Sequence[SimulatedPod], random: Random) -> SimulatedPod:
    """Keep-alive clients that never reconnect."""
    return pods[0]


def test_a_load_over_one_pod_adds_one_and_a_low_load_takes_it_back() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(60, 5), (200, 13), (200, 3)]), cap=2)
    loop = Loop(world, limits())
    loop.run(460)
    (out_s, out, _), (in_s, back, _) = loop.replica_changes
    assert (out, back) == (2, 1)
    assert 60 < out_s <= 120
    assert 290 <= in_s <= 330
    assert loop.last.slo_met.holds


def test_a_queue_that_rises_for_ten_seconds_adds_a_pod() -> None:
    """The median of chunks takes 14 to 16 s. It may here, too, where a raise drains the queue."""
    shape = shaped(a=1.4, b=0.33, c=0.0002, d=0.1)  # 30/s
    added_s = []
    for seed in range(6):
        world = World(shape, TARGETS, poisson([(60, 9), (20, 40)], seed=seed), cap=16)
        loop = Loop(world, limits())
        loop.run(80)
        out_s, out, _ = loop.replica_changes[0]
        assert (60 < out_s <= 76, out) == (True, 2)
        added_s.append(out_s)
    assert median(added_s) <= 70


def test_the_queue_that_a_pod_left_behind_rises_no_more() -> None:
    rising = [tick(seq, arrivals=seq, waiting=Waiting(cap=10 * seq)) for seq in range(20, 40)]
    calm = [tick(seq) for seq in range(20, 140)]
    gone, there = HeardPod(pod("a", rising), rising), HeardPod(pod("b", calm), calm)
    assert read_arrivals([gone], 79.0, 1.0).newest_per_s == 37 / 2
    assert read_arrivals([there, gone], 280.0, 1.0).newest_per_s == 0


def test_a_burst_in_a_queue_that_rises_is_not_the_rate() -> None:
    waits = [Waiting(cap=10 * seq) for seq in range(40)]
    ticks = [tick(seq, arrivals=100 if seq == 38 else 12, waiting=waits[seq]) for seq in range(40)]
    arrivals = read_arrivals([HeardPod(pod("a", ticks), ticks)], 79.0, 1.0)
    assert (arrivals.newest_per_s, arrivals.per_s) == (6, 6)


def test_without_a_step_model_the_cap_is_raised_first_and_then_a_pod_added() -> None:
    shape = shaped(reports_model=False)
    world = World(shape, TARGETS, poisson([(30, 3), (200, 14)]), cap=2)
    loop = Loop(world, limits())
    loop.run(230)
    reached_s = next(at for at, cap, _ in loop.cap_changes if cap == 32)
    assert loop.replica_changes[0][0] >= reached_s
    assert loop.replica_changes[0][1] == 2


def test_pods_that_a_quota_slows_only_when_busy_do_not_swing() -> None:
    """The model promises 10/s a pod; busy ones do 5. Idle ones look able to take it all."""
    shape = shaped(slow_when_busy=2.0)
    targets = replace(TARGETS, itl_ms=120)
    world = World(shape, targets, poisson([(600, 6)]), cap=32)
    loop = Loop(world, limits())
    loop.run(600)
    assert [replicas for _, replicas, _ in loop.replica_changes] == [2]


@pytest.mark.parametrize("per_s", [2.0, 7.0, 12.0])
@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_do_not_swing_at_constant_load(per_s: float, replicas: int) -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(600, per_s)]), cap=16, replicas=replicas)
    loop = Loop(world, limits(), every_s=4)
    loop.run(600)
    assert len(loop.replica_changes) <= 1


def test_recurring_bursts_change_the_replicas_at_most_twice() -> None:
    world = World(SMALL_CPU, TARGETS, bursts(200, 30, 40), cap=16)
    loop = Loop(world, limits(), every_s=4)  # meets the bursts at all their phases
    loop.run(1200)
    assert len(loop.replica_changes) <= 2


def test_one_burst_that_a_pod_drains_by_itself_adds_no_pod() -> None:
    trace = chain(poisson([(100, 3)]), (Request(100, 64, 64) for _ in range(120)))
    tail = (Request(r.t_s + 100, r.prompt_tokens, r.max_tokens) for r in poisson([(100, 3)]))
    world = World(SMALL_CPU, TARGETS, chain(trace, tail), cap=16)
    loop = Loop(world, limits())
    loop.run(200)
    assert loop.replica_changes == []
    assert any(d.verdicts["timeToFirstToken"].verdict == "Breach" for _, d in loop.decisions)


def test_a_backlog_after_a_scale_out_adds_no_further_pod() -> None:
    shape = shaped(cold_start_s=60)
    world = World(shape, TARGETS, poisson([(30, 3), (400, 14)]), cap=30)
    loop = Loop(world, limits(max_replicas=6))
    loop.run(430)
    assert [replicas for _, replicas, _ in loop.replica_changes] == [2]


def test_load_that_rose_again_does_not_wait_for_the_first_scale_out() -> None:
    shape = shaped(cold_start_s=120)
    world = World(shape, TARGETS, poisson([(30, 3), (40, 14), (100, 40)]), cap=30)
    loop = Loop(world, limits(max_replicas=6))
    loop.run(150)
    assert len(loop.replica_changes) >= 2
    assert loop.replica_changes[1][0] < loop.replica_changes[0][0] + 120


@pytest.mark.parametrize("overload", ["Queue", "Shed"])
def test_overload_at_the_maximum_keeps_the_promise_broken_and_says_why(overload: str) -> None:
    targets = replace(TARGETS, overload=overload)  # type: ignore[arg-type]
    shape = shaped(max_num_queued=20)
    world = World(shape, targets, poisson([(200, 60)]), cap=30)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(200)
    late = [decision for at, decision in loop.decisions if at > 30]
    assert {decision.slo_met.holds for decision in late} == {False}
    assert late[-1].slo_met.reason == "AtMaxReplicas"
    assert world.replicas == 1


def test_all_shed_at_the_maximum_keeps_the_promise_broken_and_counts_each_once() -> None:
    """Four answers without end hold all places of the ceiling, and the queue behind them is full:
    for four minutes and more, nobody who comes is served."""
    shape = shaped(ceiling=4, max_num_queued=20, kv_tokens=1_000_000)
    targets = replace(TARGETS, overload="Shed")
    endless = [Request(60 + 0.1 * number, 16, 200_000) for number in range(4)]
    shed = (replace(request, t_s=request.t_s + 65) for request in poisson([(300, 5)], seed=3))
    trace = chain(poisson([(50, 2)]), endless, shed)
    loop = Loop(World(shape, targets, trace, cap=4), limits(ceiling=4, max_replicas=1))
    loop.run(365)
    minutes = [t for serving in loop.world.pods for t in serving.ticks if t.t_s > 80]
    assert sum(t.refused for t in minutes) >= sum(t.arrivals for t in minutes) > 1000
    assert sum(t.finished + t.ttft.n - t.ttft.over for t in minutes) == 0
    for at, decision in loop.decisions:
        if at > 140:
            assert (decision.slo_met.holds, decision.slo_met.reason) == (False, "AtMaxReplicas")
            judged = decision.verdicts["timeToFirstToken"]
            refused = sum(t.refused for t in minutes if at - targets.window_s < t.t_s <= at)
            assert judged.n == pytest.approx(refused, abs=4)  # some are shed on their way
            assert (judged.over, judged.verdict) == (judged.n, "Breach")
            assert (decision.good_share, decision.smooth_share) == (0, 0)
    assert loop.cap_changes == loop.replica_changes == []
    assert (loop.last.cause, loop.last.limited_by) == ("cap", "VRAM")


def test_zero_traffic_scales_in_to_the_minimum() -> None:
    world = World(SMALL_CPU, TARGETS, (), cap=8, replicas=4)
    loop = Loop(world, limits())
    loop.run(120)
    assert world.replicas == 1
    assert loop.last.slo_met.holds is None
    assert loop.last.slo_met.reason == "NoTraffic"


def test_demand_is_read_from_arrivals_when_completions_saturate() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(60, 40)]), cap=30)
    loop = Loop(world, limits(max_replicas=8))
    loop.run(60)
    assert loop.replica_changes[-1][1] >= 4


def test_dropping_prefix_hits_add_a_pod_and_leave_the_cap() -> None:
    def hits() -> list[Request]:
        arrivals = poisson([(400, 5)], prompt=512, output=32)
        prefix = {True: ("system",), False: ()}
        return [replace(r, prefix=prefix[r.t_s < 150], prefix_unit=464) for r in arrivals]

    world = World(SMALL_CPU, TARGETS, hits(), cap=16)
    loop = Loop(world, limits())
    loop.run(400)
    assert all(at > 150 for at, _, _ in loop.replica_changes)
    assert loop.replica_changes[0][1] == 2
    assert world.cap >= 16


def test_keep_alive_clients_on_the_old_pod_do_not_add_pods_beyond_demand() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(300, 13)]), cap=30, route=to_the_oldest)
    loop = Loop(world, limits(max_replicas=6))
    loop.run(300)
    assert max(replicas for _, replicas, _ in loop.replica_changes) == 2


def test_scaling_in_mid_stream_is_one_step_after_its_window() -> None:
    """Of the decision alone: it names a number and no pod, goes there once, after the demand has
    asked for it for the whole window, and stays there while the pod that leaves drains. That no
    answer is cut off is the Deployment's and the worker's doing, and proved with them."""
    long_ones = [Request(60, 16, 6000) for _ in range(6)]
    usual = poisson([(60, 5), (100, 0.5)], output=200)
    trace = sorted([*usual, *long_ones], key=lambda request: request.t_s)
    world = World(SMALL_CPU, TARGETS, trace, cap=30, replicas=2)
    loop = Loop(world, limits(scale_down_window_s=8))
    loop.run(105)
    ((at, replicas, reason),) = loop.replica_changes
    assert (replicas, reason) == (1, "ScaledIn")
    waited = [d.replicas_move.reason for before, d in loop.decisions if at - 8 <= before < at]
    assert waited == ["ScaleDownWindow"] * 4
    assert all(pod.num_running for pod in world.pods), "no longer in mid-stream"
    assert sum(pod.terminating for pod in world.pods) == 1


def test_an_infeasible_first_token_at_the_ceiling_does_not_pin_replicas() -> None:
    targets = replace(TARGETS, ttft_ms=5)
    world = World(SMALL_CPU, targets, poisson([(300, 5)]), cap=32)
    loop = Loop(world, limits(max_replicas=8))
    loop.run(300)
    assert world.replicas == 1, "which the load asks for"
    assert {d.desired_replicas for _, d in loop.decisions} == {1}


def test_idle_replicas_leave_although_the_target_is_infeasible() -> None:
    targets = replace(TARGETS, ttft_ms=5)
    world = World(SMALL_CPU, targets, poisson([(300, 1)]), cap=32, replicas=4)
    loop = Loop(world, limits())
    loop.run(300)
    assert world.replicas == 1


def test_an_outside_owner_of_the_replicas_is_respected() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(120, 13)]), cap=2)
    loop = Loop(world, limits(replicas_external=True))
    loop.run(120)
    assert loop.replica_changes == []
    assert world.cap > 2


def test_an_outside_owner_attached_later_takes_over_at_once() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(200, 13)]), cap=30)
    loop = Loop(world, limits())
    loop.run(100)
    world.set_replicas(3)
    loop.limits = limits(replicas_external=True, max_replicas=2)
    loop.run(200)
    assert world.replicas == 3


def test_replicas_follow_edited_limits() -> None:
    world = World(SMALL_CPU, TARGETS, (), cap=8, replicas=1)
    loop = Loop(world, limits(min_replicas=3))
    loop.run(4)
    assert world.replicas == 3


def test_scale_up_waits_for_its_window() -> None:
    world = World(SMALL_CPU, TARGETS, poisson([(120, 13)]), cap=30)
    loop = Loop(world, limits(scale_up_window_s=30))
    loop.run(120)
    wanted_s = next(at for at, d in loop.decisions if d.replicas_move.reason == "ScaleUpWindow")
    assert loop.replica_changes[0][0] >= wanted_s + 30


def test_prompts_that_would_wait_for_each_other_keep_their_pods() -> None:
    """0.3 s of prefill each, 2/s: one pod has sequences for them all, and prefill for no more."""
    targets = replace(TARGETS, ttft_ms=1000)
    trace = poisson([(400, 2)], prompt=1000, output=16)
    loop = Loop(World(SMALL_CPU, targets, trace, cap=16, replicas=3), limits())
    loop.run(400)
    assert loop.replica_changes == []
    assert loop.last.slo_met.holds
    assert {decision.slo_feasible.holds for _, decision in loop.decisions[5:]} == {True}


def test_prompts_that_wait_for_each_other_add_pods_and_are_not_called_infeasible() -> None:
    targets = replace(TARGETS, ttft_ms=1000)
    trace = poisson([(400, 2.5)], prompt=1000, output=16)
    loop = Loop(World(SMALL_CPU, targets, trace, cap=16), limits())
    loop.run(400)
    assert [replicas for _, replicas, _ in loop.replica_changes][:1] == [3]
    assert not any(d.slo_feasible.reason == "PrefillExceedsTarget" for _, d in loop.decisions)


def test_short_prompts_that_wait_behind_long_ones_add_a_pod_that_stays() -> None:
    """Of prompts of one length, as busy a prefill would let none wait for a second."""
    targets, random = replace(TARGETS, ttft_ms=1000, window_s=120), Random(3)
    trace = [
        replace(request, prompt_tokens=2000 if random.random() < 0.1 else 100)
        for request in poisson([(900, 4)], output=16)
    ]
    alone, helped = (
        World(SMALL_CPU, targets, trace, cap=16),
        World(SMALL_CPU, targets, trace, cap=16),
    )
    one, more = Loop(alone, limits(max_replicas=1)), Loop(helped, limits())
    one.run(900)
    more.run(900)
    assert [replicas for _, replicas, _ in more.replica_changes] == [2]
    late, left = (loop.last.verdicts["timeToFirstToken"].over_share for loop in (one, more))
    assert left < 0.6 * late


def test_a_target_close_to_one_prefill_asks_for_idle_prefills_at_most() -> None:
    queue = Backlog(wait_s=0.05, allowed=0.01, drain_s=600, waiting=0, prefill_s=0.3)
    arrivals, pod_of = Arrivals(2.0, 1.0, 0), Capacity(64, 1.0)
    demand = plan_demand(arrivals, pod_of, queue, replicas=3, minimum=1)
    assert (demand.needed, demand.needed_with_margin, demand.for_prefill) == (3, 5, True)
    alone = replace(queue, wait_s=0.0)
    assert plan_demand(arrivals, pod_of, alone, replicas=3, minimum=1).needed == 1


def test_prompts_too_long_for_the_target_do_not_add_pod_after_pod() -> None:
    """Half of them take 450 of 400 ms alone: more pods cure nothing."""
    targets = replace(TARGETS, ttft_ms=400, window_s=600)
    trace = [
        replace(request, prompt_tokens=500 + 1000 * (number % 2))
        for number, request in enumerate(poisson([(900, 0.3)], output=16))
    ]
    loop = Loop(World(SMALL_CPU, targets, trace, cap=16), limits(max_replicas=32))
    loop.run(900)
    assert max([1, *(replicas for _, replicas, _ in loop.replica_changes)]) <= 2
    said = Counter(decision.slo_feasible.reason for at, decision in loop.decisions if at > 200)
    assert said.most_common(1)[0][0] == "PrefillExceedsTarget"


def test_pods_that_are_on_their_way_are_waited_for() -> None:
    shape = shaped(cold_start_s=120)
    pulse = poisson([(30, 3), (60, 14), (400, 3)])
    loop = Loop(World(shape, TARGETS, pulse, cap=30), limits(scale_down_window_s=30))
    loop.run(400)
    (out_s, out, _), (in_s, back, _) = loop.replica_changes
    assert (out, back) == (2, 1)
    assert in_s > out_s + 120


def test_a_quiet_fleet_goes_to_one_pod() -> None:
    """One request a minute over eight pods: none of them has finished five."""
    targets = replace(TARGETS, window_s=600)
    loop = Loop(World(SMALL_CPU, targets, poisson([(2400, 1 / 60)]), cap=8, replicas=8), limits())
    loop.limits = limits(max_replicas=8)
    loop.run(1500)
    assert loop.world.replicas == 1


def test_an_end_that_is_late_for_want_of_pods_adds_them() -> None:
    """Nothing waits; too many run at once for each to end in time."""
    targets = replace(TARGETS, ttft_ms=None, itl_ms=None, e2e_ms=3000, window_s=300)
    loop = Loop(World(SMALL_CPU, targets, poisson([(600, 9)]), cap=32), limits())
    loop.run(600)
    assert [replicas for _, replicas, _ in loop.replica_changes] == [2]
    assert loop.decisions[-1][1].verdicts["endToEnd"].verdict != "Breach"


def test_an_end_that_no_pod_can_reach_is_infeasible_and_adds_none() -> None:
    targets = replace(TARGETS, ttft_ms=None, itl_ms=None, e2e_ms=200)
    loop = Loop(World(SMALL_CPU, targets, poisson([(200, 3)]), cap=32), limits())
    loop.run(200)
    assert loop.replica_changes == []
    assert loop.last.slo_feasible.reason == "EndToEndInfeasible"
    assert loop.last.slo_feasible.holds is False


def test_replicas_shrink_although_one_that_was_asked_for_never_comes() -> None:
    idle = [tick(seq, arrivals=1, finished=1, max_running=1, running=1) for seq in range(1, 200)]
    never = pod("never", [], ready=False, evidence=None, config=None, started_s=None)
    seen = observation(pod("a", idle), pod("b", idle), never)
    past, waits = decide(Past(), seen)
    assert waits.replicas_move.reason == "ScaleDownWindow"
    past = msgspec.structs.replace(past, scale_in_since_s=0.0)
    assert decide(past, seen)[1].replicas == 2


def test_a_queue_that_is_gone_before_a_pod_is_there_asks_for_none() -> None:
    """24 wait and one pod takes three a second more than come: gone in eight seconds."""
    arrivals, one = Arrivals(7.0, 1.0, 0), Capacity(10, 1.0)
    brief = Backlog(wait_s=inf, allowed=0.01, drain_s=5.0, waiting=24)
    assert plan_demand(arrivals, one, brief, replicas=1, minimum=1).needed == 2
    seen = [tick(seq, ttft=late(10, 10), waiting=Waiting(cap=30)) for seq in range(1, 40)]
    targets = replace(MADE_TARGETS, window_s=5)
    model = StepModel(10, 1, 0, 0, 1000, 1.1)
    observed = observation(pod("a", seen, model=model), targets=targets, cap=64)
    assert decide(Past(), observed)[1].desired_replicas == 1
    assert decide(Past(cold_start_s=1.0), observed)[1].desired_replicas == 2


def test_pods_whose_queue_is_full_and_who_refuse_all_the_rest_get_help() -> None:
    """Endless answers: nothing has finished, so nobody knows what a pod can do."""
    seen = [
        tick(seq, arrivals=80, refused=80, finished=0, good=0, smooth=0, waiting=Waiting(cap=20),
             ttft=FirstTokens(80, 80), e2e=Requests())
        for seq in range(1, 31)
    ]  # fmt: skip
    limits = replace(MADE_LIMITS, ceiling=8)
    _, decision = decide(Past(), observation(pod("a", seen), limits=limits))
    assert (decision.replicas, decision.replicas_reason) == (2, "ScaledOut")
    held = [msgspec.structs.replace(t, refused=0, ttft=FirstTokens()) for t in seen]
    assert decide(Past(), observation(pod("a", held), limits=limits))[1].replicas == 1


@pytest.mark.parametrize(("running", "left"), [(4, 1), (5, 2), (8, 2)])
def test_pods_that_are_full_of_long_requests_stay_though_none_comes_any_more(
    running: int, left: int
) -> None:
    """A cap of 8 on two pods: nobody's answer is cut for a rate that reads as nothing."""
    quiet = [
        tick(seq, arrivals=0, finished=0, good=0, smooth=0, running=running, max_running=running)
        for seq in range(1, 200)
    ]
    past = Past(scale_in_since_s=0.0)
    assert decide(past, observation(pod("a", quiet), pod("b", quiet)))[1].replicas == left


def test_the_cold_start_is_that_of_the_pod_and_not_its_wait_for_a_node() -> None:
    asked = ReplicaChange(0.0, 1, 2, "ScaledOut", 1.0, 0.0)
    usual = [tick(seq) for seq in range(9_000, 9_050)]
    there = [pod("a", usual), pod("b", usual, started_s=18_000.0)]
    past, _ = decide(Past(scale_history=(asked,)), observation(*there, now=18_098.0))
    assert past.cold_start_s == 98.0
    there = [pod("a", usual), pod("b", usual, started_s=None)]
    past, _ = decide(Past(scale_history=(asked,)), observation(*there, now=18_098.0))
    assert past.cold_start_s == 18_098.0


def test_what_was_wanted_before_a_silence_has_to_be_wanted_anew() -> None:
    idle = [tick(seq, arrivals=1, finished=1, max_running=1, running=1) for seq in range(1, 200)]
    heard = observation(pod("a", idle), pod("b", idle))
    wanted = Past(scale_in_since_s=0.0)
    assert decide(wanted, heard)[1].replicas == 1
    silent = replace(heard, now=heard.now + 60)
    past, held = decide(wanted, silent)
    assert (held.replicas, held.replicas_move.reason) == (2, "MetricsUnavailable")
    assert decide(past, heard)[1].replicas_move.reason == "ScaleDownWindow"


FEW: dict[str, Any] = {"arrivals": 1, "finished": 1, "running": 1, "max_running": 1}
FEW |= {"generated_tokens": 100, "decodes": 100, "steps": 100, "prefill_tokens": 64}
LATE_OUTSIDE = FEW | {"ttft": late(10, 3, "outside")}
ENDS_LATE = FEW | {"e2e": Requests(10, 3, {400: 7, 500: 3})}
ENDS = replace(MADE_TARGETS, ttft_ms=None, e2e_ms=8000.0)


@pytest.mark.parametrize(
    ("work", "newest", "targets", "left"),
    [
        (LATE_OUTSIDE, LATE_OUTSIDE, MADE_TARGETS, 3),
        (ENDS_LATE, ENDS_LATE, ENDS, 3),
        (LATE_OUTSIDE, FEW, MADE_TARGETS, 2),
        (LATE_OUTSIDE, LATE_OUTSIDE | {"arrivals": 0}, MADE_TARGETS, 2),
        (ENDS_LATE, ENDS_LATE, replace(ENDS, e2e_ms=1.0), 2),
    ],
    ids=["first tokens", "ends", "no longer", "nobody comes", "out of reach"],
)
def test_no_pod_is_taken_away_while_a_target_breaks_that_pods_can_hold(
    work: dict[str, Any], newest: dict[str, Any], targets: Targets, left: int
) -> None:
    ticks = [tick(seq, **(work if seq <= 285 else newest)) for seq in range(1, 301)]
    model = StepModel(5.0, 0.5, 0.0, 0.02, 1000, 1.05)
    pods = [pod(name, ticks, model=model) for name in "abc"]
    seen = observation(*pods, targets=targets)
    _, decision = decide(Past(scale_in_since_s=0.0), seen)
    assert decision.replicas == left
