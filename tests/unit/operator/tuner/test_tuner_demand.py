"""What requests are like, what a full pod does, and how many of them: read from awkward ticks."""

import random
from dataclasses import replace
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.contract import FirstTokens, Requests, StepModel, Tick, Waiting
from sluice_core.latency import StepLaw, StepTime
from sluice_operator.tuner import Past, decide
from sluice_operator.tuner.constants import MAX_DISPERSION
from sluice_operator.tuner.demand import (
    Arrivals,
    Backlog,
    Capacity,
    plan_demand,
    read_arrivals,
    share_late_in_prefill,
    share_too_late,
)
from sluice_operator.tuner.evidence import HeardPod, Workload, describe_work
from sluice_operator.tuner.model import calibration
from sluice_operator.tuner.types import ReplicaChange
from unit.operator.tuner.made import LIMITS, TARGETS, late, observation, pod, tick


def first(num: int) -> FirstTokens:
    """So many first tokens, all in time."""
    return FirstTokens(num, sketch={250: num})


def heard(ticks: list[Tick], name: str = "a", shift_s: float = 0.0) -> HeardPod:
    return HeardPod(pod(name, ticks), ticks, shift_s)


def work_of(ticks: list[Tick]) -> Workload:
    return describe_work([heard(ticks)])


def test_who_cancels_has_part_in_what_was_generated_and_computed() -> None:
    """Of ten that begin two finish, with 40 tokens each; the others leave after ten."""
    work = work_of(
        [
            tick(seq, finished=2, ttft=first(10), generated_tokens=160, prefill_tokens=1280)
            for seq in range(1, 40)
        ]
    )
    assert work.output_tokens == pytest.approx(16, rel=0.03)
    assert work.prompt_tokens == 128


def test_the_first_that_finish_do_not_have_the_tokens_of_all_that_run() -> None:
    """64 begin at once and make 150 tokens a tick each; after 1,500 the first five have ended."""
    idle: dict[str, Any] = {"finished": 0, "generated_tokens": 0, "ttft": FirstTokens()}
    busy = idle | {"running": 64, "generated_tokens": 64 * 150}
    ticks = [tick(seq, **idle, running=0) for seq in range(1, 30)]
    ticks.append(tick(30, **(busy | {"ttft": first(64)})))
    ticks += [tick(seq, **busy) for seq in range(31, 39)]
    ticks.append(tick(39, **(busy | {"finished": 5, "running": 59})))
    work = work_of(ticks)
    assert work.lengths_known
    assert 1500 < work.output_tokens < 3000, "of all that was generated each would have 19,200"


def test_steps_that_bring_several_tokens_are_fewer_than_the_tokens() -> None:
    """300 tokens in 75 steps of 13 ms: one alone takes a second, and three were allowed."""
    drafted: dict[str, Any] = {"decodes": 74, "steps": 75, "generated_tokens": 300, "finished": 1}
    drafted |= {"ttft": first(1), "running": 1, "max_running": 1, "e2e": Requests(4, 1)}
    ticks = [tick(seq, **drafted) for seq in range(1, 60)]
    assert work_of(ticks).output_steps == 75
    targets = replace(TARGETS, ttft_ms=None, itl_ms=None, e2e_ms=3000)
    model = StepModel(12.0, 0.5, 0.0, 0.01, 1000, 1.05)
    seen = observation(pod("a", ticks, model=model), targets=targets)
    assert decide(Past(), seen)[1].slo_feasible.reason != "EndToEndInfeasible"
    plain = [msgspec.structs.replace(t, decodes=299) for t in ticks]
    seen = observation(pod("a", plain, model=model), targets=targets)
    assert decide(Past(), seen)[1].slo_feasible.reason == "EndToEndInfeasible"


@pytest.mark.parametrize("shift_s", [0.0, 0.7])
def test_a_burst_on_two_pods_is_one_burst_whatever_the_phase_of_their_ticks(shift_s: float) -> None:
    def counts(at: int) -> list[Tick]:
        return [tick(s, arrivals=100 if s % 15 == at else 0) for s in range(1, 300)]

    # 1.3 s later its ticks end: half of the burst is in the one that ends after the other's.
    pods = (heard(counts(3)), heard(counts(3 + round(shift_s)), "b", shift_s))
    assert 180 < read_arrivals(pods, 600.0, 1.0).burst <= 200


def test_what_comes_for_longer_is_no_burst_that_was_cut() -> None:
    waves = [tick(s, arrivals=30 if s % 15 in (3, 4, 5) else 0) for s in range(1, 300)]
    one = read_arrivals((heard(waves),), 600.0, 1.0)
    two = read_arrivals((heard(waves), heard(waves, "b")), 600.0, 0.5 + 0.5)
    assert (one.burst, two.burst) == (30, 60)


def test_a_load_that_rose_for_a_minute_is_no_burst_once_it_has_ebbed() -> None:
    """Uneven, and above three times the mean of ten minutes here and there: on a cluster two pods
    were kept for ten minutes after it, as "bursts of 107" would need seven."""
    rng = random.Random(3)
    rose = [rng.randint(30, 70) for _ in range(40)]
    before, after = [0] * 100 + [14] * 5 + [0] * 20, [6] * 25 + [0] * 60
    for end in range(150, 250):
        counts = (before + rose + after)[:end]
        ticks = [tick(seq, arrivals=count) for seq, count in enumerate(counts, 1)]
        assert read_arrivals((heard(ticks),), 2.0 * end, 1.0).burst == 0


def test_of_a_burst_none_ends_before_its_whole_time() -> None:
    one = Capacity(concurrency=128, service_s=2.2)
    arrivals = Arrivals(6.7, 1.0, burst=200)
    queue = Backlog(wait_s=2.0, allowed=0.01, drain_s=600.0, waiting=0)
    assert plan_demand(arrivals, one, queue, replicas=1, minimum=1).needed == 2
    assert plan_demand(arrivals, one, replace(queue, wait_s=2.2), 1, 1).needed == 1
    assert plan_demand(arrivals, one, replace(queue, wait_s=inf), 1, 1).needed == 1


@pytest.mark.parametrize(
    ("counts", "dispersion"),
    [([0, 20] * 75, MAX_DISPERSION), ([5] * 75 + [20] * 75, 1.0), ([0, 20] * 7, 1.0)],
    ids=["comes in lots", "a step of the load", "too few to tell"],
)
def test_arrivals_that_come_in_lots_are_told_from_a_load_that_rose(
    counts: list[int], dispersion: float
) -> None:
    ticks = [tick(seq, arrivals=count) for seq, count in enumerate(counts, 1)]
    assert read_arrivals((heard(ticks),), 2.0 * len(ticks), 1.0).dispersion == dispersion


def test_arrivals_that_come_in_lots_need_more_pods() -> None:
    one, queue = Capacity(concurrency=8, service_s=2.0), Backlog(0.5, 0.01, 600.0, waiting=0)
    even, in_lots = (Arrivals(20.0, dispersion, burst=0) for dispersion in (1.0, MAX_DISPERSION))
    assert (
        plan_demand(even, one, queue, 1, 1).needed < plan_demand(in_lots, one, queue, 1, 1).needed
    )


@given(st.floats(0.1, 40), st.integers(1, 64), st.floats(0, 20), st.floats(0.05, 5))
def test_an_order_leaves_fewer_late_and_no_fewer_than_if_the_late_were_not_served(
    per_s: float, concurrency: int, wait_s: float, prefill_s: float
) -> None:
    arrivals, one = Arrivals(per_s, 1.0, burst=0), Capacity(concurrency, service_s=1.0)
    by_arrival = Backlog(wait_s, 0.01, 600.0, waiting=0, prefill_s=prefill_s)
    by_deadline = replace(by_arrival, by_deadline=True)
    busy = per_s / concurrency
    late, left = (share_too_late(arrivals, one, queue, 1) for queue in (by_arrival, by_deadline))
    assert left <= late
    assert busy >= 1 or left >= 0.999 * (1 - busy) * late / (1 - busy * late)
    busy = per_s * prefill_s
    late, left = (share_late_in_prefill(arrivals, queue, 1) for queue in (by_arrival, by_deadline))
    assert left <= late
    assert busy >= 1 or left >= 0.999 * (1 - busy) * late / (1 - busy * late)


def test_pods_are_asked_for_what_the_order_leaves_late() -> None:
    """By arrival 1.7 % would wait for longer than two seconds, by deadline 0.8."""
    arrivals, one = Arrivals(6.4, 1.0, burst=0), Capacity(concurrency=8, service_s=1.0)
    queue = Backlog(2.0, 0.01, 600.0, waiting=0)
    assert plan_demand(arrivals, one, queue, 1, 1).needed == 2
    assert plan_demand(arrivals, one, replace(queue, by_deadline=True), 1, 1).needed == 1


@pytest.mark.parametrize("waiting", [0, 2000])
def test_what_waits_and_what_comes_at_once_need_the_same_pods_in_any_order(waiting: int) -> None:
    """A backlog takes as long, and of a burst no more begin in time."""
    one = Capacity(concurrency=128, service_s=2.2)
    arrivals = Arrivals(6.7, 1.0, burst=0 if waiting else 200)
    queue = Backlog(wait_s=2.0, allowed=0.01, drain_s=20.0, waiting=waiting)
    by_deadline = replace(queue, by_deadline=True)
    needed = plan_demand(arrivals, one, queue, 1, 1).needed
    assert needed > 1
    assert plan_demand(arrivals, one, by_deadline, 1, 1).needed == needed


MODEL = StepTime(StepLaw(a=10.0, b=1.0, c=0.0, d=0.0))


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"generated_tokens": 800, "waiting": Waiting(cap=9)}, 0.9),
        ({"generated_tokens": 800, "waiting": Waiting(kv=9), "cap": 64}, 0.9),
        ({"generated_tokens": 800, "waiting": Waiting(cap=9), "cap": 64}, 1.0),
        ({"generated_tokens": 800}, 1.0),
    ],
    ids=["at the cap", "memory is full", "neither", "nobody waits"],
)
def test_what_a_full_pod_does_is_compared_with_the_model(
    changes: dict[str, Any], seen: float
) -> None:
    """Eight at once in steps of 18 ms: 889 tokens in a tick, and 800 were seen."""
    ticks = [tick(seq, **changes) for seq in range(1, 40)]
    assert calibration(MODEL, [heard(ticks)], work_of(ticks)) == pytest.approx(seen)


def test_who_runs_and_still_waits_for_prefill_counts_as_running() -> None:
    """The inter-token target leaves so little room for prompts that more than half are in prefill:
    the pod does half of what a full batch would."""
    ticks = [
        tick(seq, generated_tokens=444, decodes=434, steps=124, waiting=Waiting(cap=9))
        for seq in range(1, 40)
    ]
    assert calibration(MODEL, [heard(ticks)], work_of(ticks)) == pytest.approx(0.5, rel=0.01)


def test_a_tick_in_which_a_burst_came_was_not_full_from_its_beginning() -> None:
    burst = {"generated_tokens": 170, "waiting": Waiting(cap=9)}
    ticks = [tick(seq, **(burst if seq % 15 == 0 else {})) for seq in range(1, 300)]
    assert calibration(MODEL, [heard(ticks)], work_of(ticks)) == 1.0


FEW: dict[str, Any] = {"arrivals": 1, "finished": 1, "ttft": first(1), "running": 1}
FEW |= {"max_running": 1, "generated_tokens": 100, "decodes": 99, "steps": 99, "prefill_tokens": 64}
LONG_AGO = Past(scale_in_since_s=0.0)


def fleet(num: int, waiting: Waiting, **changes: Any) -> Any:
    """`num` pods with little to do, of which the first has requests that wait."""
    ticks = [tick(seq, **(FEW | changes)) for seq in range(1, 200)]
    full = [msgspec.structs.replace(t, waiting=waiting, max_running=8, running=8) for t in ticks]
    pods = [pod("0", full if waiting.total else ticks)]
    pods += [pod(str(number), ticks) for number in range(1, num)]
    return observation(*pods, limits=replace(LIMITS, max_replicas=64))


def test_who_waits_on_one_pod_while_others_have_room_keeps_no_pods() -> None:
    assert decide(LONG_AGO, fleet(8, Waiting(cap=1)))[1].replicas < 8


def test_the_most_that_was_needed_in_the_window_stays() -> None:
    """As an HPA's recommendation: the look at its end may be of a lull."""
    seen = fleet(8, Waiting())
    past, held = decide(Past(), seen)
    assert (held.replicas_move.reason, past.scale_in_to) == ("ScaleDownWindow", 4)
    past = msgspec.structs.replace(past, scale_in_since_s=0.0, scale_in_to=7)
    past, decision = decide(past, seen)
    assert (decision.replicas, past.scale_in_to) == (7, 0)


def test_a_fleet_without_work_goes_to_its_minimum_at_once() -> None:
    idle = {"arrivals": 0, "finished": 0, "running": 0, "max_running": 0, "ttft": FirstTokens()}
    assert decide(LONG_AGO, fleet(64, Waiting(), **idle))[1].replicas == 1
    assert decide(LONG_AGO, fleet(64, Waiting()))[1].replicas == 32
    seen = fleet(8, Waiting(), **idle)
    silent = [replace(view, evidence=None, config=None) for view in seen.pods[5:]]
    seen = replace(seen, pods=(*seen.pods[:5], *silent))
    assert decide(LONG_AGO, seen)[1].replicas == 4, "nobody knows what runs on the silent ones"


def test_advice_that_nobody_follows_forgets_what_was_needed_once() -> None:
    seen = fleet(12, Waiting())
    seen = replace(seen, targets=replace(seen.targets, mode="Advisory"))
    past = Past(scale_in_since_s=0.0, scale_in_to=9)
    past, decision = decide(past, seen)
    assert decision.replicas_move.to == 9
    assert decide(past, seen)[1].replicas_move.to == 6


@pytest.mark.parametrize(
    ("now", "started_s", "asked_s", "replicas"),
    [
        (598.0, 10.0, (), 2),
        (700.0, 10.0, (), 3),
        (700.0, None, (), 2),
        (700.0, 690.0, (), 2),
        (1400.0, 10.0, (700.0,), 3),
    ],
    ids=["it may come", "never came", "no node took it", "just taken", "has a substitute"],
)
def test_a_pod_that_a_node_took_and_that_never_came_holds_up_no_other(
    now: float, started_s: float | None, asked_s: tuple[float, ...], replicas: int
) -> None:
    newest = int(now / 2)
    waits = {"ttft": late(10, 10), "arrivals": 10}
    ticks = [
        tick(seq, **waits, waiting=Waiting(cap=seq - newest + 400))
        for seq in range(newest - 60, newest + 1)
    ]
    never = pod("never", [], ready=False, evidence=None, config=None, started_s=started_s)
    asked = [ReplicaChange(0.0, 1, 2, "ScaledOut", 5.0)]
    asked += [ReplicaChange(at_s, 2, 3, "ScaledOut", 5.0) for at_s in asked_s]
    seen = observation(
        pod("a", ticks, model=StepModel(12.0, 1.0, 0.0, 0.0, 1000, 1.05)),
        never,
        now=now,
        replicas=2 + len(asked_s),
        limits=replace(LIMITS, ceiling=8),
        targets=replace(TARGETS, itl_ms=None),
    )
    past = Past(scale_history=tuple(asked), cold_start_s=60.0)
    assert decide(past, seen)[1].replicas == replicas


def test_who_gave_up_is_not_good() -> None:
    """Of 100 that came 60 left after their own timeout; 38 of the others were good."""
    ticks = [
        tick(seq, arrivals=100, finished=40, good=38, smooth=36, running=40,
             ttft=FirstTokens(100, 60, sketch={250: 40}))
        for seq in range(1, 60)
    ]  # fmt: skip
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert (decision.good_share, decision.smooth_share) == (0.38, 0.36)


def test_who_leaves_in_time_is_no_miss() -> None:
    """Half of the clients go on typing before the first token, within the target."""
    ticks = [
        tick(seq, arrivals=20, ttft=FirstTokens(20, 0, sketch={250: 10})) for seq in range(1, 60)
    ]
    assert decide(Past(), observation(pod("a", ticks)))[1].good_share == 1.0
