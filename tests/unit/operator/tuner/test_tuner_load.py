"""Where no more pods will come, the cap is what does the load, though the gaps pay for it."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sluice_core import sketch
from sluice_core.contract import StepModel, TokenGaps, Waiting
from sluice_operator.tuner import Decision, Past, decide
from sluice_operator.tuner.types import CapChange, LoadedCap
from unit.operator.tuner.loop import SMALL_CPU, Loop, limits
from unit.operator.tuner.made import LIMITS, TARGETS, gaps, late, observation, pod, tick
from unit.operator.tuner.traces import poisson
from unit.operator.tuner.world import World

MODEL = StepModel(40.0, 2.0, 0.0, 0.05, 1000, 1.05)
"""A step of n takes 40 + 2 n ms, a request of 100 tokens beside n - 1 others 4 + 0.203 n s: not
even a cap of 64 does five a second."""
SLOW = StepModel(50.0, 2.0, 0.0, 0.05, 1000, 1.05)
"""One sequence alone is over the target of 50 ms, and six do what arrives."""
TAIL_MS = (40 + 2 * 5) * 1.05
"""Of a full cap of 5."""
ONE_POD = replace(LIMITS, max_replicas=1)
SNUG = TokenGaps(1000, 0, 0, 1000, 0, {sketch.bucket_of(49.0): 1000})
"""All in time, with no room for more."""
STEADY: dict[str, Any] = {"arrivals": 2, "steps": 250, "itl": SNUG}
"""One a second comes. Half of the steps run less than the cap: gaps do not correct MODEL."""
STARVED: dict[str, Any] = STEADY | {"ttft": late(10, 10), "waiting": Waiting(cap=60)}
"""A minute's worth of it waits: 1.1/s for ten minutes. A full pod does a fifth more than MODEL
says, so that 4.5 run at once."""
BROKEN = {"itl": gaps(1000, 100)}


def looked_at(
    past: Past | None = None,
    model: StepModel = MODEL,
    pods: int = 1,
    num: int = 300,
    **changes: Any,
) -> tuple[Past, Decision]:
    """After `num` such ticks: ten minutes."""
    named = {name: changes.pop(name) for name in ("cap", "limits", "targets") if name in changes}
    policy = changes.pop("policy", "fcfs")
    ticks = [tick(seq, **changes) for seq in range(1, num + 1)]
    views = [pod(f"pod-{number}", ticks, model=model, policy=policy) for number in range(pods)]
    seen = observation(*views, **({"cap": 3, "limits": ONE_POD} | named))
    return decide(past or Past(), seen)


def test_the_cap_is_raised_to_the_least_that_does_what_arrives() -> None:
    past, decision = looked_at(**STARVED)
    assert (decision.cap, decision.cap_reason) == (5, "LoadNeedsCap")
    assert decision.cap_move.message.endswith("below 5 arrivals wait for ever; cap 3 -> 5")
    assert past.loaded_cap == LoadedCap(5, 600.0, 0, 1.0, 164.0, TAIL_MS)


def test_it_is_raised_though_the_gaps_are_broken_and_no_cap_holds_them() -> None:
    _, decision = looked_at(model=SLOW, **(STARVED | BROKEN))
    assert decision.slo_feasible.reason == "InterTokenLatencyInfeasible"
    assert (decision.cap, decision.cap_reason) == (6, "LoadNeedsCap")


def test_of_an_infeasible_target_no_pod_is_added_so_the_cap_does_the_load() -> None:
    _, decision = looked_at(model=SLOW, limits=LIMITS, **(STARVED | BROKEN))
    assert (decision.cap, decision.replicas) == (6, 1)


def test_where_the_order_keeps_most_in_time_the_gaps_of_all_do_not_pay_for_the_late() -> None:
    """A token of the five takes 50.2 ms, prompts included."""
    by_deadline: dict[str, Any] = {"policy": "deadline", **STARVED}
    just, over = (replace(TARGETS, itl_ms=itl_ms) for itl_ms in (50.5, 50))
    assert looked_at(targets=just, **by_deadline)[1].cap_reason == "LoadNeedsCap"
    assert looked_at(targets=over, **by_deadline)[1].cap_reason == ""
    assert looked_at(targets=over, **STARVED)[1].cap_reason == "LoadNeedsCap"
    kept = Past(loaded_cap=LoadedCap(5, 0.0, 0, 1.0))
    for policy, cap in (("fcfs", 5), ("deadline", 2)):  # the model's best
        settled = {"cap": 5, "policy": policy, **(STARVED | BROKEN)}
        assert looked_at(kept, targets=over, **settled)[1].cap == cap, policy


def test_a_raise_at_most_doubles() -> None:
    assert looked_at(**STARVED, cap=2)[1].cap == 4


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("pods may still be added", {"limits": LIMITS}),
        ("who waits for too long is refused", {"targets": replace(TARGETS, overload="Shed")}),
        ("nothing may be late", {"targets": replace(TARGETS, ttft_ms=None)}),
        ("first tokens are in time", {"ttft": late(10, 0)}),
        ("they wait for memory", {"ttft": late(10, 10, "kv")}),
        ("the queue has not stood for a minute and a half", {"num": 44}),
        ("it may be chance that so much came", {"num": 60}),
        ("no cap does five a second", {"arrivals": 10}),
        ("lengths are not known", {"finished": 0}),
        ("the cap does what arrives", {"cap": 5}),
    ],
)
def test_it_is_not_raised_for_the_load_where(why: str, changes: dict[str, Any]) -> None:
    _, decision = looked_at(**(STARVED | changes))
    assert decision.cap_reason != "LoadNeedsCap", why


def test_another_owner_of_the_replicas_adds_none_for_us() -> None:
    external = replace(LIMITS, replicas_external=True)
    assert looked_at(**STARVED, limits=external)[1].cap_reason == "LoadNeedsCap"


def test_a_breach_lowers_it_no_further_than_the_load_allows_where_that_was_too_little() -> None:
    roomy = StepModel(30.0, 2.0, 0.0, 0.05, 1000, 1.05)  # holds 5; 4 do one a second, 16 do 2.5
    busy = STEADY | BROKEN | {"cap": 16, "arrivals": 5}
    long_ago = Past(loaded_cap=LoadedCap(6, -10_000.0, 0, 2.5))
    _, free = looked_at(model=roomy, **busy)
    _, bound = looked_at(long_ago, model=roomy, **busy)
    _, calm = looked_at(long_ago, model=roomy, **(busy | {"arrivals": 2}))
    assert (free.cap, bound.cap, calm.cap) == (5, 16, 5)
    assert bound.cap_move.reason == "LoadNeedsCap"


def test_a_raise_for_the_load_is_not_taken_back_for_going_too_far() -> None:
    raised = Past(last_change=CapChange(0.0, 4, 8, epoch=1, reason="FirstTokenBreached"))
    loaded = msgspec.structs.replace(raised, loaded_cap=LoadedCap(8, 0.0, 0, 1.0))
    over = STEADY | {"itl": gaps(1000, 20), "cap": 8}
    steep = StepModel(5.0, 6.0, 0.0, 0.05, 1000, 1.05)  # room for 6
    assert looked_at(raised, steep, num=8, **over)[1].cap_reason == "RaisedTooFar"
    assert looked_at(loaded, steep, num=8, **over)[1].cap_reason == ""


def test_what_was_raised_to_is_kept_for_longer_each_time_while_as_much_comes() -> None:
    def lowered_to(loaded: LoadedCap, arrivals: int = 2, pods: int = 1) -> int:
        past = Past(loaded_cap=loaded)
        return looked_at(past, pods=pods, **(STEADY | BROKEN | {"cap": 20, "arrivals": arrivals}))[
            1
        ].cap

    assert lowered_to(LoadedCap(18, 500.0, 0, 1.0)) == 20
    assert lowered_to(LoadedCap(18, 0.0, 0, 1.0)) < 18, "ten minutes ago"
    assert lowered_to(LoadedCap(18, 0.0, 1, 1.0)) == 20, "the second time"
    assert lowered_to(LoadedCap(18, 500.0, 0, 2.0)) < 18, "half of it comes"
    assert lowered_to(LoadedCap(18, 500.0, 0, 1.0), arrivals=1, pods=2) < 18, "shared by two"
    assert lowered_to(LoadedCap(18, 500.0, 0, 1.0, 164.0, 80.0)) == 20, "of the same requests"
    assert lowered_to(LoadedCap(18, 500.0, 0, 1.0, 500.0, 80.0)) < 18, "of much longer ones"
    assert lowered_to(LoadedCap(18, 500.0, 0, 1.0, 80.0, 80.0)) == 20, "longer ones need it more"
    assert lowered_to(LoadedCap(18, 500.0, 0, 1.0, 164.0, 150.0)) < 18, "of much slower steps"


def test_a_raise_of_a_clock_that_was_put_back_a_week_is_kept_no_longer_than_any() -> None:
    of_next_week = Past(loaded_cap=LoadedCap(18, 600.0 + 7 * 24 * 3600, 0, 1.0))
    past, _ = looked_at(of_next_week, **(STEADY | BROKEN | {"cap": 20}))
    assert past.loaded_cap == LoadedCap(18, 600.0, 0, 1.0)


@pytest.mark.parametrize(("heard", "silent"), [(3, 0), (2, 1), (3, 2)])
def test_what_arrives_is_shared_by_pods_that_are_silent_as_well(heard: int, silent: int) -> None:
    ticks = [tick(seq, **STARVED) for seq in range(1, 301)]
    names = [str(number) for number in range(heard + silent)]
    views = [pod(name, ticks, model=MODEL) for name in names[:heard]]
    views += [pod(name, ticks[:200], model=MODEL) for name in names[heard:]]
    seen = observation(*views, cap=3, limits=replace(LIMITS, max_replicas=len(views)))
    assert decide(Past(), seen)[1].cap == 5


@pytest.mark.parametrize(
    ("ceiling", "cap"), [(64, 40), (38, 38), (36, 32)], ids=["a quarter", "the ceiling", "too low"]
)
def test_a_load_that_needs_a_little_more_gets_a_whole_step(ceiling: int, cap: int) -> None:
    """37 do what arrives, an eighth more than 32 do."""
    gpu = StepModel(40.0, 0.1, 0.0, 0.01, 1000, 1.05)
    full = {"cap": 32, "arrivals": 17, "steps": 48, "decodes": 1536, "generated_tokens": 1536}
    full["finished"] = 15
    full |= {"running": 32, "max_running": 32, "cap": 32}
    targets, limits = replace(TARGETS, itl_ms=47.0), replace(ONE_POD, ceiling=ceiling)
    changes = STARVED | full | {"ttft": late(15, 15)}
    _, decision = looked_at(model=gpu, targets=targets, limits=limits, **changes)
    assert decision.cap == cap


def test_a_raise_after_it_was_given_up_is_remembered_for_twice_as_long() -> None:
    again, _ = looked_at(Past(loaded_cap=LoadedCap(4, 0.0, 0, 1.0)), **STARVED)
    further, _ = looked_at(Past(loaded_cap=LoadedCap(4, 100.0, 0, 1.0)), **STARVED)
    assert again.loaded_cap == LoadedCap(5, 600.0, 1, 1.0, 164.0, TAIL_MS)
    assert further.loaded_cap == LoadedCap(5, 600.0, 0, 1.0, 164.0, TAIL_MS)
    first_time = further.loaded_cap
    other, _ = looked_at(Past(loaded_cap=LoadedCap(4, 0.0, 3, 1.0, 800.0)), **STARVED)
    assert other.loaded_cap == first_time, "of requests of another length it is the first one"


def test_a_service_whose_gaps_cannot_be_held_still_answers() -> None:
    """Gaps of 6 ms cannot be held: half an hour of arrivals that one at a time would not do."""
    targets = replace(TARGETS, itl_ms=4, ttft_ms=500, window_s=600)
    world = World(SMALL_CPU, targets, poisson([(1800, 5)]), cap=1)
    loop = Loop(world, limits(max_replicas=1))
    loop.run(1800)
    first = loop.last.verdicts["timeToFirstToken"]
    assert first.over_share < 0.3
    assert first.n > 2000
    assert len(loop.cap_changes) <= 6
