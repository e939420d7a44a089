"""Which evidence counts: epochs, acknowledgements, silent pods, clocks, restarts."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sluice_core.contract import StepModel, Tick, Waiting
from sluice_operator.tuner import Past, decide
from sluice_operator.tuner.demand import read_arrivals
from sluice_operator.tuner.evidence import Accepts, HeardPod, describe_work, slices, survey
from sluice_operator.tuner.types import BreachedCap, CapChange, LoadedCap, ReplicaChange
from unit.operator.tuner.made import LIMITS, TARGETS, gaps, late, observation, pod, tick


def heard(ticks: list[Tick]) -> HeardPod:
    return HeardPod(pod("a", ticks), ticks)


BROKEN = gaps(1000, 500)


def test_only_ticks_of_the_epoch_are_evidence() -> None:
    old = [tick(seq, itl=BROKEN) for seq in range(1, 20)]
    new = [tick(seq, epoch=2) for seq in range(20, 40)]
    _, decision = decide(Past(), observation(pod("a", old + new, epoch=2), epoch=2))
    judged = decision.verdicts["interTokenLatency"]
    assert (judged.epoch_n, judged.epoch_over) == (20_000, 0)
    assert judged.over == 19 * 500
    assert decision.cap == 8


def test_unsettled_ticks_are_no_evidence_but_belong_to_the_promise() -> None:
    ticks = [tick(seq, itl=BROKEN, settled=False) for seq in range(1, 20)]
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert decision.cap == 8
    assert decision.verdicts["interTokenLatency"].epoch_n == 0
    assert decision.slo_met.holds is False


def test_counts_are_summed_over_the_pods_that_acknowledged_the_epoch() -> None:
    first = pod("a", [tick(seq, epoch=2) for seq in range(1, 10)], epoch=2)
    # It answers with the epoch before, whatever its ticks say.
    second = pod("b", [tick(seq, itl=BROKEN, epoch=2) for seq in range(1, 10)], epoch=1)
    _, decision = decide(Past(), observation(first, second, epoch=2))
    assert decision.verdicts["interTokenLatency"].epoch_n == 9_000
    assert decision.cap == 8
    third = pod("c", [tick(seq, epoch=2) for seq in range(1, 10)], epoch=2)
    _, decision = decide(Past(), observation(first, second, third, epoch=2))
    assert decision.verdicts["interTokenLatency"].epoch_n == 18_000


def test_killed_between_persisting_and_sending_the_change_is_held_then_goes_on() -> None:
    ticks = [tick(seq, ttft=late(10, 10)) for seq in range(1, 20)]
    before, change = decide(Past(), observation(pod("a", ticks)))
    assert change.cap == 16
    persisted = {"cap": 16, "epoch": 2}
    for past in (Past(), before):
        _, held = decide(past, observation(pod("a", ticks), **persisted))
        assert (held.cap, held.cap_move.reason) == (16, "AwaitingAcknowledgement")
        sent = pod("a", [*ticks, tick(20, epoch=2, cap=16)], epoch=2)
        _, after = decide(past, observation(sent, **persisted))
        assert after.cap == 16
        assert after.verdicts["timeToFirstToken"].epoch_n == 10


@pytest.mark.parametrize("batch", [0, 2, 3])
def test_a_pod_that_has_the_load_of_two_is_no_noisy_one(batch: int) -> None:
    """Clients that keep their connections: the other one has little to break."""
    quiet = [tick(seq, itl=gaps(125 * batch, 0), decodes=125 * batch) for seq in range(1, 31)]
    busy = [tick(seq, itl=BROKEN, waiting=Waiting(cap=200)) for seq in range(1, 31)]
    alike = [tick(seq) for seq in range(1, 31)]
    _, alone = decide(Past(), observation(pod("a", busy)))
    _, beside = decide(Past(), observation(pod("a", busy), pod("b", quiet)))
    _, noisy = decide(Past(), observation(pod("a", busy), pod("b", alike)))
    assert alone.cap == beside.cap == 6
    assert (beside.noisy_pods, beside.cap_reason) == ((), "InterTokenLatencyBreached")
    assert noisy.noisy_pods == ("a",)
    assert noisy.cap >= 8


@pytest.mark.parametrize(("slowness", "noisy"), [(1.2, ()), (1.5, ("a",))])
def test_a_pod_whose_steps_are_slower_than_the_others_would_be_is_noisy_however_much_it_has(
    slowness: float, noisy: tuple[str, ...]
) -> None:
    """A slow pod has more at once than the others."""
    ticks = [tick(seq, itl=BROKEN, busy_s=125 * 0.012 * slowness) for seq in range(1, 31)]
    quiet = [tick(seq, itl=gaps(125, 0), decodes=125) for seq in range(1, 31)]
    model = StepModel(a=4.0, b=1.0, c=0.0, d=0.0, n=1000, resid_q=1.1)
    seen = observation(pod("a", ticks), pod("b", quiet, model=model))
    assert decide(Past(), seen)[1].noisy_pods == noisy


@pytest.mark.parametrize("begun_s", [0.0, 0.5, 1.0, 1.5])
def test_ticks_are_put_together_whenever_in_a_span_they_end(begun_s: float) -> None:
    """Ends halfway between two spans, give or take a millisecond, are each of their own."""
    early, late_ = (
        [tick(seq, t_s=2.0 * seq + begun_s + sign * 1e-3 * (seq % 2)) for seq in range(1, 101)]
        for sign in (-1, 1)
    )
    pods = [heard(early), heard(late_)]
    assert [len(part) for part in slices(pods, Accepts(-2.0))] == [2] * 100
    arrivals = read_arrivals(pods, early[-1].t_s, 1.0)
    assert (arrivals.per_s, arrivals.dispersion) == (10.0, 1.0)


def test_a_clock_that_was_put_back_voids_no_evidence() -> None:
    """An operator that moved to a node whose clock is an hour behind."""
    ticks = [tick(seq, itl=BROKEN) for seq in range(1, 31)]
    asked = observation(pod("a", ticks))
    past, _ = decide(Past(), observation(pod("a", ticks[:1])))
    ahead = msgspec.structs.replace(past, targets_since_s=3600.0)
    _, soon = decide(ahead, asked)
    assert soon.verdicts["interTokenLatency"].epoch_n == 0
    late_ticks = [*ticks, *(tick(seq, itl=BROKEN) for seq in range(31, 61))]
    _, then = decide(decide(ahead, asked)[0], observation(pod("a", late_ticks)))
    assert (then.cap, then.cap_reason) == (6, "InterTokenLatencyBreached")


@pytest.mark.parametrize("since", ["scale_out_since_s", "scale_in_since_s"])
def test_whatever_is_remembered_of_a_clock_that_was_put_back_is_of_now(since: str) -> None:
    queued: dict[str, Any] = {"arrivals": 40, "waiting": Waiting(cap=9)}
    idle: dict[str, Any] = {"arrivals": 1, "running": 1, "max_running": 1}
    busy = since == "scale_out_since_s"
    ticks = [tick(seq, **(queued if busy else idle)) for seq in range(1, 61)]
    limits = replace(LIMITS, ceiling=8, scale_up_window_s=60.0)
    seen = observation(*(pod(name, ticks) for name in "abc"), limits=limits)
    ahead = seen.now + 3600
    past = Past(
        targets="99|500|50|None",
        targets_since_s=ahead,
        breached_caps=(BreachedCap(16, ahead, 0, 164.0),),
        last_change=CapChange(ahead, 4, 8, epoch=1, reason="Headroom"),
        scale_history=(ReplicaChange(ahead, 2, 3, "ScaledOut", 20.0, settled_s=ahead),),
        loaded_cap=LoadedCap(8, ahead, 0, 1.0),
    )
    after, decision = decide(msgspec.structs.replace(past, **{since: ahead}), seen)
    assert decision.replicas_move.reason == ("ScaleUpWindow" if busy else "ScaleDownWindow")
    assert after.last_change
    assert after.loaded_cap
    [scaled], [breached] = after.scale_history, after.breached_caps
    times = [after.targets_since_s, getattr(after, since), breached.time_s, scaled.time_s]
    times += [scaled.settled_s, after.last_change.time_s, after.loaded_cap.time_s]
    assert times == [seen.now] * 7


def test_a_silent_pod_is_left_out_and_named() -> None:
    ticks = [tick(seq, itl=BROKEN, ttft=late(10, 0)) for seq in range(1, 20)]
    silent = pod("mute", [], evidence=None, config=None, started_s=-100.0)
    pods = (pod("a", ticks), pod("b", ticks), silent)
    _, decision = decide(Past(), observation(*pods))
    assert decision.silent_pods == ("mute",)
    assert decision.metrics.holds
    assert decision.cap == 6


def test_a_pod_whose_ticks_stopped_is_silent() -> None:
    stale = pod("stale", [tick(seq) for seq in range(1, 10)])
    fresh = pod("fresh", [tick(seq) for seq in range(1, 20)])
    _, decision = decide(Past(), observation(stale, fresh))
    assert decision.silent_pods == ("stale",)


def test_a_pod_that_died_does_not_stop_the_count_of_arrivals() -> None:
    """It is there for hours (a crash loop, a lost node), and has closed its last tick."""
    alive = pod("alive", [tick(seq, arrivals=40) for seq in range(1, 400)])
    dead = pod("dead", [tick(seq) for seq in range(1, 20)], ready=False)
    _, alone = decide(Past(), observation(alive))
    _, beside = decide(Past(), observation(alive, dead, replicas=1))
    assert alone.arrivals_per_s == pytest.approx(20.0)
    assert beside.arrivals_per_s == pytest.approx(20.0)
    assert beside.desired_replicas == alone.desired_replicas


def test_a_silent_majority_holds_everything() -> None:
    ticks = [tick(seq, itl=BROKEN, ttft=late(10, 10)) for seq in range(1, 20)]
    unheard: dict[str, Any] = {"evidence": None, "config": None, "started_s": -100.0}
    mute = [pod(name, [], **unheard) for name in ("x", "y")]
    _, decision = decide(Past(), observation(pod("a", ticks), *mute))
    assert (decision.cap, decision.replicas) == (8, 3)
    assert decision.metrics.holds is False
    assert decision.cap_move.reason == decision.replicas_move.reason == "MetricsUnavailable"


def test_no_ready_pod_is_waited_for_without_blame() -> None:
    starting = pod("a", [], ready=False, evidence=None, config=None)
    _, decision = decide(Past(), observation(starting))
    assert decision.metrics.holds is None
    assert (decision.cap, decision.replicas) == (8, 1)


@pytest.mark.parametrize("skew_s", [-3600.0, -30.0, -1.0, 1.0, 3600.0])
def test_a_pod_with_another_clock_is_heard(skew_s: float) -> None:
    ticks = [tick(seq, t_s=10_000 + 2.0 * seq + skew_s, itl=BROKEN) for seq in range(1, 20)]
    now = 10_000 + 38.5
    view = pod("a", ticks, seen_s=now)
    _, decision = decide(Past(), observation(view, now=now))
    assert decision.silent_pods == ()
    assert decision.cap == 6


@pytest.mark.parametrize("back_s", [0.0, 3.0, 60.0, 3600.0])
@pytest.mark.parametrize("boot_id", ["boot", "before"])
def test_a_pod_whose_clock_was_put_back_is_heard_at_once(back_s: float, boot_id: str) -> None:
    """Five minutes of calm, and half a minute of breach since the step, of this boot or a new
    one."""
    calm = [tick(seq, t_s=10_000 + 2.0 * seq, boot_id=boot_id) for seq in range(1, 151)]
    broken = [tick(seq, t_s=10_000 + 2.0 * seq - back_s, itl=BROKEN) for seq in range(151, 166)]
    now = 10_000 + 2.0 * 165
    view = pod("a", calm + broken, seen_s=now)
    _, decision = decide(Past(), observation(view, now=now))
    judged = decision.verdicts["interTokenLatency"]
    assert (judged.n, judged.over, judged.verdict) == (165_000, 7_500, "Breach")
    assert (decision.cap_reason, decision.silent_pods) == ("InterTokenLatencyBreached", ())
    assert decision.arrivals_per_s == 5.0


def test_a_tick_of_another_clock_among_all_others_is_where_it_was() -> None:
    usual = [tick(seq) for seq in range(1, 31)]
    odd = [*usual[:20], tick(21, t_s=1e12), *usual[21:]]
    (pod_,) = survey(observation(pod("a", odd))).heard
    assert [t.t_s for t in pod_.ticks] == [t.t_s for t in usual]


def test_a_tick_that_was_read_twice_counts_once() -> None:
    ticks = [tick(seq) for seq in range(1, 10)]
    _, decision = decide(Past(), observation(pod("a", ticks + ticks)))
    assert decision.verdicts["interTokenLatency"].n == 9_000


def test_a_restarted_pod_keeps_what_it_served_before() -> None:
    ticks = [tick(seq, t_s=2.0 * seq) for seq in range(1, 10)]
    again = [tick(seq, t_s=40 + 2.0 * seq, boot_id="other") for seq in range(1, 10)]
    _, decision = decide(Past(), observation(pod("a", ticks + again)))
    assert decision.verdicts["interTokenLatency"].n == 18_000


def test_what_ran_in_a_pod_that_crashed_is_no_finished_work() -> None:
    """32 long requests ran when it died: their tokens are nobody's length."""
    of_work = {"finished": 0, "generated_tokens": 4000, "prefill_tokens": 600, "running": 32}
    died = [tick(seq, boot_id="died", **of_work) for seq in range(1, 40)]
    new = [tick(seq, t_s=100 + 2.0 * seq, running=8) for seq in range(1, 30)]
    alone = describe_work([heard(new)])
    assert describe_work([heard(died + new)]) == alone
    assert describe_work([heard(died)]).waiting_cap == 0


def test_a_pod_that_begins_anew_has_no_other_clock() -> None:
    before = [tick(seq, boot_id="before", itl=BROKEN) for seq in range(1, 40)]
    view = pod("a", before, seen_s=10_000.0)
    fleet = survey(observation(view, now=10_000.0))
    assert (fleet.heard, fleet.silent) == ((), ())


def test_leaving_pods_belong_to_the_promise_and_not_to_the_evidence() -> None:
    ticks = [tick(seq) for seq in range(1, 10)]
    leaving = pod("old", [tick(seq, itl=BROKEN) for seq in range(1, 10)], terminating=True)
    _, decision = decide(Past(), observation(pod("a", ticks), leaving, replicas=1))
    judged = decision.verdicts["interTokenLatency"]
    assert (judged.n, judged.over) == (18_000, 4_500)
    assert (judged.epoch_n, judged.epoch_over) == (9_000, 0)


def test_the_promise_is_of_the_window_only() -> None:
    ticks = [tick(seq, itl=BROKEN if seq < 50 else gaps(1000, 0)) for seq in range(1, 200)]
    short = replace(TARGETS, window_s=100.0)
    _, decision = decide(Past(), observation(pod("a", ticks), targets=short))
    judged = decision.verdicts["interTokenLatency"]
    assert (judged.n, judged.over) == (50_000, 0)


def test_a_burst_of_cold_starts_changes_nothing() -> None:
    ticks = [tick(seq, ttft=late(10, 10, "outside")) for seq in range(1, 20)]
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert (decision.cap, decision.replicas) == (8, 1)
    assert decision.cap_move.reason == "ColdStart"


def test_time_outside_the_engine_of_an_old_pod_is_no_cold_start() -> None:
    ticks = [tick(seq, ttft=late(10, 10, "outside")) for seq in range(100, 120)]
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert (decision.cap, decision.cap_move.reason) == (8, "OutsideEngine")
    assert decision.replicas == 2


def test_a_raise_that_nothing_uses_does_not_blind_the_tuner() -> None:
    raised = CapChange(0.0, 4, 8, epoch=1, reason="FirstTokenBreached")
    past = Past(last_change=raised)
    starved = [tick(seq, settled=False, ttft=late(10, 10, "kv")) for seq in range(1, 40)]
    _, soon = decide(past, observation(pod("a", starved[:14])))
    assert soon.verdicts["timeToFirstToken"].epoch_n == 0
    _, later = decide(past, observation(pod("a", starved)))
    assert later.verdicts["timeToFirstToken"].verdict == "Breach"
    assert later.cause == "kv"


def test_a_lowering_that_has_not_drained_is_never_evidence() -> None:
    lowered = CapChange(0.0, 16, 8, epoch=1, reason="InterTokenLatencyBreached")
    draining = [tick(seq, settled=False, itl=BROKEN) for seq in range(1, 60)]
    _, decision = decide(Past(last_change=lowered), observation(pod("a", draining)))
    assert decision.verdicts["interTokenLatency"].epoch_n == 0
    assert decision.cap == 8


def test_a_pod_that_has_closed_no_tick_yet_is_new_and_not_silent() -> None:
    new = pod("new", [], seen_s=38.0)
    _, alone = decide(Past(), observation(new, now=38.0))
    assert (alone.metrics.holds, alone.silent_pods) == (None, ())
    other = pod("a", [tick(seq) for seq in range(1, 20)])
    _, both = decide(Past(), observation(other, new))
    assert (both.metrics.holds, both.silent_pods) == (True, ())


def test_a_young_pod_that_was_never_read_is_new_and_has_taken_no_arrivals() -> None:
    ticks = [tick(seq, arrivals=40) for seq in range(1, 100)]
    unread = pod("new", [], evidence=None, config=None, started_s=190.0)
    _, alone = decide(Past(), observation(pod("a", ticks)))
    _, beside = decide(Past(), observation(pod("a", ticks), unread))
    assert beside.silent_pods == ()
    assert beside.arrivals_per_s == alone.arrivals_per_s == pytest.approx(20.0)
    unheard = replace(unread, started_s=0.0)
    _, silent = decide(Past(), observation(pod("a", ticks), unheard))
    assert silent.silent_pods == ("new",)
    assert silent.arrivals_per_s == pytest.approx(40.0)


def test_waiting_for_memory_never_raises_the_cap() -> None:
    ticks = [
        tick(seq, ttft=late(10, 10, "kv"), max_running=3, running=3, waiting=Waiting(kv=20))
        for seq in range(1, 20)
    ]
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert decision.cap == 8
    assert decision.replicas > 1


def test_past_survives_json() -> None:
    ticks = [tick(seq, itl=BROKEN) for seq in range(1, 70)]
    past, _ = decide(Past(), observation(pod("a", ticks)))
    assert past.breached_caps
    assert msgspec.json.decode(msgspec.json.encode(past), type=Past) == past


def test_an_event_carries_epoch_target_counts_and_verdict() -> None:
    ticks = [tick(seq, itl=BROKEN) for seq in range(1, 20)]
    _, decision = decide(Past(), observation(pod("a", ticks)))
    assert decision.cap_move.reason == "InterTokenLatencyBreached"
    assert decision.cap_move.message == (
        "epoch 1: interTokenLatency over 50 ms in 9500 of 19000 (50.00%, allowed 1.00%), "
        "verdict Breach; cap 8 -> 6, 0.8 of the 8 that ran"
    )


def test_the_cap_is_kept_within_edited_limits_without_evidence() -> None:
    limits = replace(LIMITS, ceiling=4)
    _, decision = decide(Past(), observation(limits=limits))
    assert (decision.cap, decision.cap_move.reason) == (4, "WithinLimits")


def test_measured_at_one_sequence_the_target_is_infeasible() -> None:
    ticks = [tick(seq, itl=BROKEN, cap=1, max_running=1) for seq in range(1, 20)]
    _, decision = decide(Past(), observation(pod("a", ticks), cap=1))
    assert (decision.cap, decision.replicas) == (1, 1)
    assert decision.slo_feasible.reason == "InterTokenLatencyInfeasible"


def test_ticks_of_the_far_future_are_no_arrivals_of_as_long() -> None:
    """A pod says whatever its image wants; of a boot that is over, its clock is not put right."""
    ticks = [tick(seq, boot_id="before") for seq in range(1, 20)]
    ticks.append(tick(20, boot_id="before", t_s=1e12))
    _, decision = decide(Past(), observation(pod("a", ticks), now=40.0))
    assert decision.arrivals_per_s <= 5
