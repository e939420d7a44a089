"""The demo's story on two small throttled pods: 0.5, 1.3 and 0.3 of what one pod can do."""

from dataclasses import replace

import pytest
from msgspec import structs
from unit.operator.tuner.loop import TARGETS, Loop, limits
from unit.operator.tuner.traces import poisson
from unit.operator.tuner.world import Shape, World

HALF_A_CORE = Shape(
    a=6,
    b=0.8,
    c=0.0005,
    d=0.15,
    kv_tokens=30_000,
    ceiling=16,
    noise=0.15,
    hiccup_ms=50,
    hiccup_share=0.12,
    cold_start_s=15,
)
ONE_POD_PER_S = 7.3
"""At 16 sequences a step takes 32 ms on average, a request of 64 + 64 tokens 2.2 s."""
STORY = [(60, 0.5 * ONE_POD_PER_S), (120, 1.3 * ONE_POD_PER_S), (120, 0.3 * ONE_POD_PER_S)]


@pytest.mark.parametrize("reports_model", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_cap_goes_up_first_then_a_pod_comes_and_leaves(seed: int, reports_model: bool) -> None:
    shape = structs.replace(HALF_A_CORE, reports_model=reports_model)
    targets = replace(TARGETS, ttft_ms=1000, itl_ms=150)
    world = World(shape, targets, poisson(STORY, seed=seed), cap=2, seed=seed)
    loop = Loop(world, limits(ceiling=16, max_replicas=2))
    loop.run(300)
    caps = [cap for _, cap, _ in loop.cap_changes]
    assert caps[:2] == [4, 8]
    assert loop.cap_changes[0][0] <= 20
    assert not any(reason == "InterTokenLatencyBreached" for _, _, reason in loop.cap_changes)
    (out_s, out, _), (in_s, back, _) = loop.replica_changes
    assert (out, back) == (2, 1)
    assert 60 < out_s <= 120
    assert 210 <= in_s <= 290
    assert loop.last.slo_met.holds
    pods = world.pods + world.gone
    assert world.num_lost == 0
    arrivals = [sum(t.arrivals for t in pod.ticks) for pod in pods]
    assert min(arrivals) >= 0.2 * sum(arrivals)
