"""An engine with a fixed token budget, behind a gate: what no cap mends is said, not tuned."""

from itertools import accumulate
from random import Random

import msgspec
import pytest
from sluice.simulate.params import Params
from sluice.simulate.runs import Result, simulate
from sluice.simulate.trace import Request
from sluice_operator.tuner import Targets

SERVICE = Params(8.0, 0.25, 0.0, 0.06, kv_tokens=400_000, cold_start_s=20.0, ceiling=64)
"""A chunk of 2,048 tokens takes 123 ms, one of 256 takes 15; 64 decodes alone take 24 ms."""
TARGETS = Targets("99", ttft_ms=2000, itl_ms=50, e2e_ms=None)


def trace(per_s: float, seconds: float, prompt: int = 1500) -> list[Request]:
    random = Random(7)
    gaps = (random.expovariate(per_s) for _ in range(int(per_s * seconds)))
    return [Request(t_s, prompt, 100) for t_s in accumulate(gaps)]


LONG = trace(2.0, 300)


def run(budget: int, arrivals: list[Request] = LONG, **changes: float) -> Result:
    params = msgspec.structs.replace(SERVICE, max_num_batched_tokens=budget, **changes)
    return simulate(params, TARGETS, arrivals, "sluice", 1, pod="foreign")


def test_a_large_chunk_budget_is_named_and_lowers_no_cap() -> None:
    result = run(2048)
    assert result["itl_over_share"] > 0.01
    assert result["last_cap"] == result["first_cap"] == 64
    assert result["slo_feasible"].startswith("PrefillInterference: ")
    assert "set spec.batching.maxNumBatchedTokens to 512, now 2048" in result["slo_feasible"]


def test_the_budget_that_is_named_holds_the_target() -> None:
    result = run(512)
    assert result["itl_over_share"] < 0.01
    assert result["slo_feasible"].startswith("Feasible")


def test_with_a_small_budget_a_cap_that_is_too_high_is_lowered_as_ever() -> None:
    """64 decodes take 72 ms; 42 hold 50."""
    result = run(64, trace(12.0, 300, prompt=32), b=1.0)
    assert result["first_cap"] == 64
    assert 16 <= result["cap_path"][0][1] <= 42
    assert not result["slo_feasible"].startswith("PrefillInterference")


@pytest.mark.parametrize("pod", ["sluice", "foreign", "inner"])
def test_only_a_gate_says_what_to_set(pod: str) -> None:
    result = simulate(SERVICE, TARGETS, trace(1.0, 20), "sluice", 1, pod=pod)
    assert ("slo_feasible" in result) == (pod == "foreign")
