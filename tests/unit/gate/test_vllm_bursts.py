"""Bursts in virtual time: what steering does to gaps, first tokens and throughput, beside stock."""

import random
from itertools import chain

import pytest
from sluice_core.port import EngineLimits
from sluice_vllm.steering import Steering
from unit.gate.made_vllm import Request, Scheduler
from unit.gate.vllm_machine import Cost, Machine

TOKENS, BURST = 2048, 16
NO_DEADLINE = EngineLimits(0, 16, TOKENS, itl_ms=44.0)
LIMITS = EngineLimits(0, 128, TOKENS, itl_ms=65.0, ttft_ms=2000.0, policy="deadline")
SMALL = Cost(12.0, 0.8, prompt_ms=0.2, noise=0.03, hiccup_ms=15.0, hiccup_every=333)
"""An 88M model on two processors, and on one, where it is twice as slow."""
SLOW = Cost(25.0, 1.0, prompt_ms=0.28, noise=0.05)


def bursts(num: int, every_s: float) -> list[Request]:
    rng = random.Random(1)
    return [
        Request(
            f"{burst}-{place}",
            rng.randint(64, 768),
            arrival_time=burst * every_s,
            max_tokens=rng.randint(32, 128),
        )
        for burst in range(num)
        for place in range(BURST)
    ]


def served(
    limits: EngineLimits,
    cost: Cost,
    requests: list[Request],
    *,
    is_steered: bool = True,
    may_hold: bool = True,
    at_once: int = 1,
) -> Machine:
    cap = limits.cap
    scheduler = Scheduler(
        max_num_running_reqs=cap,
        max_num_active_reqs=cap,
        max_num_scheduled_tokens=TOKENS,
        num_blocks=100_000,
    )
    steering = Steering(scheduler, limits, may_cut=True, may_hold=may_hold)
    machine = Machine(scheduler, steering if is_steered else None, cost, at_once=at_once)
    return machine.serve(requests)


def shares(machine: Machine) -> tuple[float, float]:
    """Good and smooth ones of all."""
    answers = machine.answers.values()
    good = sum(answer.is_good(LIMITS) for answer in answers)
    smooth = sum(answer.is_smooth(LIMITS) for answer in answers)
    return good / len(answers), smooth / len(answers)


def p99_gap_ms(machine: Machine) -> float:
    gaps = sorted(chain.from_iterable(answer.gaps_ms for answer in machine.answers.values()))
    return gaps[int(0.99 * len(gaps))]


def tokens_per_s(machine: Machine) -> float:
    return sum(len(answer.tokens_s) for answer in machine.answers.values()) / machine.now_s


@pytest.mark.parametrize("every_s", [8.0, 4.0, 2.0])
def test_without_a_deadline_bursts_keep_the_target_and_the_throughput(every_s: float) -> None:
    stock, steered = (
        served(NO_DEADLINE, SMALL, bursts(6, every_s), is_steered=is_steered)
        for is_steered in (False, True)
    )
    assert tokens_per_s(steered) >= 0.9 * tokens_per_s(stock)
    assert p99_gap_ms(steered) <= 1.1 * 44.0
    assert p99_gap_ms(steered) <= 0.5 * p99_gap_ms(stock)
    assert not steered.num_held


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("every_s", [8.0, 6.0])
def test_held_first_tokens_are_in_time_and_gaps_stay_smooth(every_s: float, at_once: int) -> None:
    stock, free, held = (
        served(LIMITS, SLOW, bursts(12, every_s), **how, at_once=at_once)
        for how in ({"is_steered": False}, {"may_hold": False}, {})
    )
    assert held.num_held
    good, smooth = shares(held)
    assert good >= shares(stock)[0]
    assert good >= shares(free)[0] + 0.1, "growing chunks alone breaks what decodes"
    assert smooth >= 2.5 * shares(stock)[1]
    assert tokens_per_s(held) >= 0.98 * tokens_per_s(stock)
    assert p99_gap_ms(held) < p99_gap_ms(stock)
