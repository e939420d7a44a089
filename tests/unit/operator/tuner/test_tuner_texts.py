"""Services without first tokens and gaps: the cap follows the end of requests alone."""

from dataclasses import replace
from typing import Any

from sluice_core.contract import FirstTokens, Requests, StepModel, TokenGaps, Waiting
from sluice_operator.tuner import Decision, Past, decide
from unit.operator.tuner.made import TARGETS, observation, pod, tick

MODEL = StepModel(20.0, 0.0, 0.0, 0.5, 1000, 1.05)
"""A step over n texts of 64 tokens takes 20 + 32 n ms."""
ENDS = replace(TARGETS, ttft_ms=None, itl_ms=None, e2e_ms=500)
TEXTS: dict[str, Any] = {
    "ttft": FirstTokens(), "itl": TokenGaps(), "decodes": 0, "generated_tokens": 0,
    "arrivals": 10, "finished": 10, "prefill_tokens": 640, "steps": 2,
}  # fmt: skip


def decided(present: int, **changes: Any) -> tuple[Past, Decision]:
    ticks = [tick(seq, **(TEXTS | {"cap": present} | changes)) for seq in range(1, 61)]
    return decide(Past(), observation(pod("a", ticks, model=MODEL), cap=present, targets=ENDS))


def test_a_late_end_lowers_the_cap_to_two_steps_within_the_target() -> None:
    late = {"e2e": Requests(10, 10), "max_running": 64, "running": 0}
    _, decision = decided(64, **late)
    assert (decision.cap, decision.cap_reason) == (6, "TooManyToEnd")  # 0.85 * 500 / 2 = 212 ms


def test_texts_that_wait_raise_a_cap_under_it() -> None:
    waits = {"e2e": Requests(10, 5), "max_running": 2, "waiting": Waiting(cap=8)}
    _, decision = decided(2, **waits)
    assert decision.cap > 2
    assert decision.cap_reason == "EndToEndBreached"


def test_a_cap_is_raised_no_further_than_ends_in_time_whatever_arrives() -> None:
    waits = {"e2e": Requests(60, 60), "max_running": 6, "waiting": Waiting(cap=200)}
    more = {"arrivals": 200, "finished": 60, "prefill_tokens": 3840, "steps": 10}
    _, decision = decided(6, **waits, **more)
    assert (decision.cap, decision.cap_move.reason) == (6, "EndsAtTarget")
    assert decision.effective_batch == 6


def test_a_pod_holds_what_its_steps_say() -> None:
    """Full for a minute: 60 texts in ten steps of 2 s in all are what the model predicts: 28 a
    second."""
    waits = {"e2e": Requests(60, 60), "max_running": 6, "waiting": Waiting(cap=200)}
    more = {"arrivals": 114, "finished": 60, "prefill_tokens": 3840, "steps": 10}
    _, decision = decided(6, **waits, **more)
    assert decision.replicas == 3  # 57 a second


def test_a_queue_asks_for_pods_once_the_cap_is_as_large_as_may_be() -> None:
    waits = {"e2e": Requests(60, 60), "max_running": 6, "waiting": Waiting(cap=200)}
    more = {"arrivals": 80, "finished": 60, "prefill_tokens": 3840, "steps": 10}
    _, decision = decided(6, **waits, **more)
    assert decision.replicas > 1
