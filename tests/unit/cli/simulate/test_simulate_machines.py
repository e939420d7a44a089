"""Machines whose single steps take longer: launches, hiccups, stalls, sizes never rehearsed."""

from collections import deque
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice.simulate.delays import Delays
from sluice.simulate.inner import InnerPod
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.profile import first_cap, profile, profile_records
from sluice.simulate.trace import Request
from sluice_core.contract import Slo, StepModel
from sluice_core.steptime import MIN_JUDGED

CALM = Params(5, 0.05, 0, 0.0213, kv_tokens=160_000, cold_start_s=1, noise=0)
GPU = msgspec.structs.replace(CALM, chunk_ms=12)
STALLING = msgspec.structs.replace(CALM, stall_every_s=8)
SLO = Slo(ttft_ms=1000, itl_ms=50)


def delays(params: Params, seed: int, steps: list[tuple[int, int]]) -> list[float]:
    """Delays of steps of 10 ms, one after the other, each of (decodes, prompt tokens)."""
    found, now_s, all_ms = Delays(params, seed), 0.0, []
    for decodes, prompt in steps:
        all_ms.append(found.ms(decodes, prompt, 10.0, now_s))
        now_s += (10 + all_ms[-1]) / 1e3
    return all_ms


def test_a_chunk_of_any_size_adds_its_launch_once() -> None:
    assert GPU.step_ms(8, 100, 0) == CALM.step_ms(8, 100, 0)
    for chunk in (1, 32, 2048):
        assert GPU.step_ms(8, 100, chunk) == pytest.approx(CALM.step_ms(8, 100, chunk) + 12)


def test_a_model_of_steps_with_graphs_finds_what_a_launch_costs() -> None:
    pod = SimulatedPod("pod", GPU, SLO, 64, 1)
    pod.run(30.0, deque(Request(0.2 * i, 512, 128) for i in range(150)))
    assert pod.times.tail.chunk_ms == pytest.approx(12, rel=0.15)
    assert pod.times.model is not None
    assert pod.times.model.a == pytest.approx(5, rel=0.15)


def test_the_profile_times_decodes_as_graphs() -> None:
    """So a worker starts near the 200 decodes that take 15 ms where 20 ms are due."""
    times = profile(GPU, profile_records(GPU, 1))
    assert first_cap(times, Slo(itl_ms=20), 256) > 150
    assert first_cap(times, Slo(itl_ms=50), 256) == 256


def test_hiccups_come_in_their_share_of_the_steps_and_last_as_long_as_said() -> None:
    params = msgspec.structs.replace(CALM, hiccup_share=0.02)
    found = delays(params, 3, [(1, 0)] * 20_000)
    assert set(found) == {0.0, 60.0}
    assert sum(map(bool, found)) == pytest.approx(400, rel=0.15)


def stalled_ms(seed: int, step_ms: float) -> float:
    """Delay of 400 s of steps in a row."""
    found, now_s, total_ms = Delays(STALLING, seed), 0.0, 0.0
    while now_s < 400.0:
        delay_ms = found.ms(1, 0, step_ms, now_s)
        assert delay_ms == 0 or delay_ms >= 50
        total_ms += delay_ms
        now_s += (step_ms + delay_ms) / 1e3
    return total_ms


@given(st.integers(0, 50), st.floats(20, 400))
def test_a_busy_pod_loses_the_same_time_to_stalls_in_short_steps_and_in_long(
    seed: int, step_ms: float
) -> None:
    """50 stalls of 175 ms; one or the other comes in the last step."""
    lost_ms = stalled_ms(seed, 20.0)
    assert lost_ms == pytest.approx(50 * 175, rel=0.6)
    assert stalled_ms(seed, step_ms) == pytest.approx(lost_ms, abs=600)


def test_a_stall_in_idle_time_delays_only_what_is_left_of_it() -> None:
    found = Delays(STALLING, 1)
    assert found.ms(1, 0, 10.0, 8.0 * 1000) <= 300, "not all thousand of them"


def test_a_pod_at_work_stops_for_its_stalls() -> None:
    long = [Request(0.0, 16, 10_000)]
    steady, stalling = (SimulatedPod("pod", params, SLO, 8, 1) for params in (CALM, STALLING))
    for pod in (steady, stalling):
        pod.run(90.0, deque(long))
    (quick,), (slow,) = (pod.outcomes()[0] for pod in (steady, stalling))
    assert slow.num_gaps_over >= 3
    assert 0.05 <= (slow.last_s - quick.last_s) / slow.num_gaps_over <= 0.3
    assert quick.num_gaps_over == 0


def test_the_first_step_of_each_size_is_slow_and_no_other() -> None:
    params = msgspec.structs.replace(CALM, first_size_ms=50)
    steps = [
        (4, 0),
        (4, 0),
        (3, 0),
        (2, 2),
        (4, 0),
        (5, 0),
        (7, 0),
        (30, 100),
        (29, 101),
        (30, 101),
    ]
    found = delays(params, 1, steps)
    slow = [step for step, ms in zip(steps, found, strict=True) if ms]
    assert slow == [(4, 0), (2, 2), (5, 0), (30, 100), (30, 101)]
    assert all(40 <= ms <= 60 for ms in found if ms)
    assert len({ms for ms in found if ms}) == 5


def test_each_kind_of_delay_is_drawn_by_itself() -> None:
    """So a machine with one kind more has the others where they were."""
    steps = [(n % 60, 64 * (n % 3)) for n in range(2000)]
    kinds = {"hiccup_share": 0.05}, {"first_size_ms": 50.0}
    alone = [delays(msgspec.structs.replace(CALM, **kind), 5, steps) for kind in kinds]
    both = delays(msgspec.structs.replace(CALM, **(kinds[0] | kinds[1])), 5, steps)
    assert both == pytest.approx([one + other for one, other in zip(*alone, strict=True)])
    assert both == delays(msgspec.structs.replace(CALM, **(kinds[0] | kinds[1])), 5, steps)


def test_an_engine_with_our_scheduler_inside_learns_from_its_first_steps() -> None:
    pod = InnerPod("pod", CALM, SLO, 64, 1)
    assert pod.times.model is None
    arrivals = deque(Request(0.0, 300, 200) for _ in range(4))
    models: list[StepModel | None] = []
    for step in range(1, 60):
        pod.run(step * 0.006, arrivals)
        models.append(pod.times.model)
    changes = [before is not after for before, after in pairwise(models)]
    assert sum(changes) == pytest.approx(MIN_JUDGED, abs=8)
    assert not any(changes[-10:])
