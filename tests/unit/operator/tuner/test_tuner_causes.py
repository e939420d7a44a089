"""What a late first token or a late end waited for, and whose queue it was."""

from dataclasses import replace

import pytest
from sluice_core.contract import FirstTokens, Requests, StepModel, TokenGaps, Waiting
from sluice_operator.tuner import Past, decide
from unit.operator.tuner.made import TARGETS, late, observation, pod, tick

MODEL = StepModel(10, 0.1, 0, 0, 1000, 1.1)
"""Of 100 tokens among eight: 1.1 s, so that one in 0.14 s has its turn."""
SNUG = replace(TARGETS, itl_ms=14.1)
"""MODEL sees no clear room above the cap of 8 for this, but 16 where first tokens will be late."""
NOTHING = {"ttft": FirstTokens(), "itl": TokenGaps(), "arrivals": 0, "finished": 0}


def test_a_cause_is_remembered_while_nothing_new_arrives() -> None:
    """Prefill broke the first token; then a minute without a request."""
    broken = [tick(seq, ttft=late(10, 10, "prefill")) for seq in range(1, 31)]
    idle = [tick(seq, waiting=Waiting(cap=1), **NOTHING) for seq in range(31, 61)]
    _, decision = decide(Past(), observation(pod("a", broken + idle)))
    assert decision.verdicts["timeToFirstToken"].verdict == "Breach"
    assert (decision.cause, decision.cap) == ("prefill", 8)
    assert decision.cap_move.reason == "PrefillBound"


def test_a_breach_of_which_nothing_new_is_late_raises_no_cap() -> None:
    """A rare long prompt: half a minute of requests in time follows, and the breach stays."""
    broken = [tick(seq, ttft=late(100, 100, "prefill")) for seq in range(1, 31)]
    clean = [tick(seq, ttft=late(1, 0), max_running=2) for seq in range(31, 61)]
    _, decision = decide(Past(), observation(pod("a", broken + clean)))
    assert decision.verdicts["timeToFirstToken"].verdict == "Breach"
    assert (decision.cause, decision.cap) == ("none", 8)
    assert decision.cap_move.reason == "CapUnused"


END_ONLY = replace(TARGETS, ttft_ms=None, e2e_ms=1000)


@pytest.mark.parametrize(
    ("waiting", "cap", "reason"),
    [
        (Waiting(kv=20), 8, "WaitingForKV"),
        (Waiting(cap=20), 16, "EndToEndBreached"),
        (Waiting(), 8, "CapUnused"),
    ],
)
def test_what_ends_late_waited_for_what_others_wait_for(
    waiting: Waiting, cap: int, reason: str
) -> None:
    ends = Requests(10, 10, {400: 10})
    ticks = [
        tick(seq, ttft=FirstTokens(10), e2e=ends, waiting=waiting, max_running=3)
        for seq in range(1, 9)
    ]
    _, decision = decide(Past(), observation(pod("a", ticks), targets=END_ONLY))
    assert decision.verdicts["endToEnd"].verdict == "Breach"
    assert (decision.cap, decision.cap_move.reason) == (cap, reason)


def queues(*lengths: int, until: int = 30) -> list[int]:
    """`lengths` over and over, for the ticks 1..`until`."""
    return [lengths[seq % len(lengths)] for seq in range(1, until + 1)]


@pytest.mark.parametrize(
    ("first", "second", "stands"),
    [
        (queues(1), queues(0), True),
        (queues(1, 0), queues(0, 1), False),
        (queues(1), queues(1), True),
    ],
)
def test_a_queue_stands_where_it_is_the_same_pods(
    first: list[int], second: list[int], stands: bool
) -> None:
    """One that flickers on each of two pods in turn is no queue that stands."""
    pods = [
        pod(
            name,
            [tick(seq, waiting=Waiting(cap=n), itl=TokenGaps(9)) for seq, n in enumerate(of, 1)],
            model=MODEL,
        )
        for name, of in (("a", first), ("b", second))
    ]
    _, decision = decide(Past(), observation(*pods, targets=SNUG))
    assert (decision.cap > 8) == stands
    if stands:
        assert decision.cap_move.reason == "QueueStands"


@pytest.mark.parametrize(("newest", "cap"), [(5, 8), (40, 16)])
def test_a_queue_is_too_long_by_the_newest_tick_of_every_pod(newest: int, cap: int) -> None:
    """Five wait on one pod, whose tick closed last: 0.7 s for the last of them, 0.35 on average."""
    one = [tick(seq, t_s=2.0 * seq + 0.6, itl=TokenGaps(9)) for seq in range(1, 30)]
    one.append(tick(30, t_s=60.6, waiting=Waiting(cap=newest), itl=TokenGaps(9)))
    other = [tick(seq, itl=TokenGaps(9)) for seq in range(1, 30)]
    seen = observation(pod("a", one, model=MODEL), pod("b", other, model=MODEL), targets=SNUG)
    assert decide(Past(), seen)[1].cap == cap


def test_a_pod_whose_steps_take_the_same_at_any_batch_has_a_demand_too() -> None:
    """The worker's fit may leave the fixed part alone, as its coefficients are not negative."""
    same = StepModel(10, 0, 0, 0, 1000, 1.1)
    ticks = [
        tick(seq, ttft=FirstTokens(10), e2e=Requests(10), max_running=3) for seq in range(1, 31)
    ]
    _, decision = decide(
        Past(), observation(pod("a", ticks, model=same), targets=replace(END_ONLY, e2e_ms=9000))
    )
    assert decision.desired_replicas == 1
