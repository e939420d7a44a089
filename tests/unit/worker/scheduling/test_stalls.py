"""A few stalls of a GPU just after its start: they cost neither long chunks nor the cap.

The real engine in made-up time. A decode step is a CUDA graph; one with a chunk is launched
operation by operation, which takes 12 ms whatever its size.
"""

from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.latency import TAIL_QUANTILE, Tail, predicted_cap
from sluice_core.steptime import StepRecord, StepTimes
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.runner import Runner
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.scheduling.test_chunk_margin import MadeUpTime

LAUNCH_MS = 12.0
ITL_MS = 50.0
BURST_EVERY_S = 2.0
PROFILED = ((0, 32), (1, 0), (8, 0), (0, 128), (32, 0), (0, 1024))
Stalls = list[tuple[float, float]]
"""(seconds after the start, ms) of each, the first one first."""


class Gpu(MadeUpTime):
    """Its steps take 5 ms and 0.05 a decode, and with a chunk 12 and 0.0213 a token more."""

    def __init__(self, stalls: Stalls) -> None:
        super().__init__((5.0, 0.05, 0.0, 0.0213), seed=1)
        self._stalls = [(self.now + after_s, ms) for after_s, ms in stalls]

    def step_ms(self, decodes: int, kv_tokens: int, prefill: int) -> float:
        a, b, _, d = self._law
        mean_ms = a + b * decodes + (LAUNCH_MS + d * prefill if prefill else 0.0)
        step_ms = mean_ms * self._chance.lognormvariate(0, 0.05)
        while self._stalls and self._stalls[0][0] <= self.now + step_ms / 1e3:
            step_ms += self._stalls.pop(0)[1]
        return step_ms

    def profile(self) -> list[StepRecord]:
        shapes = [(decodes, 500 * decodes + chunk, chunk) for decodes, chunk in PROFILED]
        return [StepRecord(self.now, *shape, self.step_ms(*shape)) for shape in shapes]


def from_cold(stalls: Stalls, seconds: int) -> list[tuple[int, int]]:
    """The chunk beside 16 decodes and the cap that fits, after each second under bursts that take
    nine tenths of the GPU."""
    gpu, times, chance = Gpu(stalls), StepTimes(has_graphs=True), Random(2)
    times.set_profile(gpu.profile())
    scheduler = create_scheduler(
        num_blocks=8000, cap=64, budget=2048, itl_ms=ITL_MS, ttft_ms=1000.0, max_model_len=4096
    )
    engine = Engine(scheduler, cast(Runner, gpu), times, gpu.monotonic)
    start_s, num_bursts, found = gpu.now, 0, list[tuple[int, int]]()
    while len(found) < seconds:
        if gpu.now - start_s >= BURST_EVERY_S * num_bursts:
            num_bursts += 1
            for number in range(66):
                length = max(int(chance.expovariate(0.01)), 2)
                name = f"{num_bursts}-{number}"
                engine.submit(create_request(name, 512, max_tokens=length), gpu.now)
        if engine.has_work:
            engine.step()
        else:
            gpu.now = start_s + BURST_EVERY_S * num_bursts
        if gpu.now - start_s > len(found) + 1:
            found.append((times.chunk_limit(ITL_MS, 16, 8000), cap_of(times)))
    return found


def cap_of(times: StepTimes) -> int:
    assert times.model is not None
    law, tail = times.model, times.model.resid_q
    return predicted_cap(law, tail, itl_ms=ITL_MS, kv_per_seq=500.0, ceiling=1024)


def drawn_stalls(seed: int, within_s: float) -> Stalls:
    chance = Random(seed)
    return sorted((chance.uniform(1.0, within_s), chance.uniform(50, 300)) for _ in range(5))


@pytest.mark.parametrize(("within_s", "seed"), [(5.0, 0), (5.0, 1), (5.0, 2), (40.0, 0)])
def test_five_stalls_after_the_start_leave_chunks_long_and_the_cap_heals_in_seconds(
    within_s: float, seed: int
) -> None:
    stalls = drawn_stalls(seed, within_s)
    heals_s = int(stalls[-1][0]) + 3
    plain = from_cold([], heals_s + 5)
    stalled = from_cold(stalls, heals_s + 5)
    assert all(chunk > 0.75 * usual for (chunk, _), (usual, _) in zip(stalled, plain, strict=True))
    healed = zip(stalled[heals_s:], plain[heals_s:], strict=True)
    assert all(cap > 0.8 * usual for (_, cap), (_, usual) in healed)


def test_a_stall_in_the_first_long_chunk_is_no_price_of_its_tokens() -> None:
    gpu, times = Gpu([]), StepTimes(has_graphs=True)
    times.set_profile(gpu.profile())
    for step in range(40):
        decodes, chunk = 16, 800 if step in (20, 30) else 0
        step_ms = gpu.step_ms(decodes, 8000, chunk) + (200.0 if step == 20 else 0.0)
        times.add(StepRecord(0.1 * step, decodes, 8000, chunk, step_ms))
    times.refit(4.0)
    assert times.tail.stretch < 1.1
    assert times.chunk_limit(ITL_MS, 16, 8000) > 1000


def test_noise_of_launches_is_no_price_of_the_few_tokens_of_short_chunks() -> None:
    gpu, times = Gpu([]), StepTimes(has_graphs=True)
    times.set_profile(gpu.profile())
    for step in range(400):
        shape = (16, 8000, 32 * (step % 2))
        times.add(StepRecord(0.01 * step, *shape, gpu.step_ms(*shape)))
    times.refit(4.0)
    assert times.tail.stretch < 1.1


residuals = st.lists(st.floats(-50, 400, width=32), max_size=400)


@given(residuals, residuals, st.floats(0, 100, width=32))
def test_what_is_late_without_a_chunk_takes_none_of_its_room(
    steps: list[float], chunks: list[float], room_ms: float
) -> None:
    tail_ms = Tail(sorted(steps), sorted(chunks)).ms_within(room_ms)
    in_time = [sorted(ms for ms in all_ms if ms <= room_ms) for all_ms in (steps, chunks)]
    assert tail_ms == Tail(in_time[0], in_time[1]).ms_within(room_ms)


@given(residuals, residuals, st.floats(0, 100, width=32))
def test_a_chunk_makes_one_in_two_hundred_late_of_the_steps_that_would_be_in_time(
    steps: list[float], chunks: list[float], room_ms: float
) -> None:
    tail_ms = Tail(sorted(steps), sorted(chunks)).ms_within(room_ms)
    num_in_time = sum(ms <= room_ms for ms in steps)
    num_late = sum(tail_ms < ms <= room_ms for ms in steps)
    assert tail_ms >= 0
    assert num_late <= (1 - TAIL_QUANTILE) * num_in_time + 1
