"""While the longest prompt prefills, those that read hardly notice: in made-up time.

The real engine with its fit and its budget, over a runner that only takes time: a law of the step's
time with noise. The same on a real model: tests/bench/chunk_margin.py.
"""

import random
from typing import cast

import numpy as np
import pytest
from sluice_core.steptime import StepRecord, StepTimes
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.runner import Runner
from sluice_worker.scheduling.step import StepWork
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import sample

WINDOW = 16_384


class MadeUpTime:
    """A clock, and a runner whose steps take ms = law * noise, now and then with a hiccup."""

    def __init__(self, law: tuple[float, float, float, float], seed: int) -> None:
        self.now = 100.0
        self.slowness = 1.0
        self._law = law
        self._chance = random.Random(seed)

    def monotonic(self) -> float:
        return self.now

    def step_ms(self, decodes: int, kv_tokens: int, prefill: int) -> float:
        a, b, c, d = self._law
        mean = a + b * decodes + c * kv_tokens + d * prefill
        hiccup = 4.0 if self._chance.random() < 0.005 else 0.0
        return self.slowness * mean * self._chance.lognormvariate(0, 0.05) + hiccup

    is_ahead = False

    def execute(self, works: list[StepWork], _: bool) -> list[int]:
        self.now += 1e-3 * self.step_ms(
            sum(1 for work in works if work.num_tokens == 1),
            sum(work.start + work.num_tokens for work in works),
            sum(work.num_tokens for work in works if work.num_tokens > 1),
        )
        return sample(works)

    def clear(self, blocks: list[int]) -> None:
        """No page holds anything."""

    def use_idle_time(self) -> bool:
        return False

    def touch_ahead(self, first_unused: int) -> bool:
        return False

    def profile(self) -> list[StepRecord]:
        shapes = [(1, 32, 0), (8, 256, 0), (8, 4096, 0), (32, 1024, 0), (0, 32, 32), (0, 256, 256)]
        return [StepRecord(self.now, *shape, self.step_ms(*shape)) for shape in shapes]


def gaps_during_prefill(made_up: MadeUpTime, itl_ms: float | None) -> list[float]:
    """Gaps in ms of 8 readers from the moment that a prompt of the whole window is admitted."""
    scheduler = create_scheduler(
        num_blocks=3000, cap=16, budget=2048, itl_ms=itl_ms, max_model_len=WINDOW
    )
    times = StepTimes()
    times.set_profile(made_up.profile())
    engine = Engine(scheduler, cast(Runner, made_up), times, made_up.monotonic)
    for i in range(8):
        engine.submit(create_request(f"reader{i}", 200, max_tokens=8000), made_up.now)
    for _ in range(600):
        engine.step()
    engine.submit(create_request("longest", WINDOW - 8, max_tokens=8), made_up.now)
    gaps = []
    while not any(s.request_id == "longest" and s.num_output_tokens for s in scheduler.running):
        before = made_up.now
        report, _ = engine.step()
        assert report is not None
        gaps += [1e3 * (made_up.now - before)] * report.num_decodes
    return gaps


# A large GPU, a mid one, and a CPU core: ms of a step, a decode, a KV token, a prompt token.
LAWS = {
    "large": ((6.0, 0.02, 2e-5, 0.03), 30.0),
    "mid": ((12.0, 0.1, 1e-4, 0.1), 60.0),
    "core": ((2.0, 0.4, 2e-4, 0.3), 40.0),
}


@pytest.mark.parametrize("machine", LAWS)
def test_inter_token_p99_stays_within_target_while_the_longest_prompt_prefills(
    machine: str,
) -> None:
    law, target_ms = LAWS[machine]
    held = gaps_during_prefill(MadeUpTime(law, seed=1), target_ms)
    assert len(held) > 100
    assert np.quantile(held, 0.99) <= 1.2 * target_ms
    unbounded = gaps_during_prefill(MadeUpTime(law, seed=1), None)
    assert np.quantile(unbounded, 0.99) > 1.2 * target_ms


@pytest.mark.parametrize("throttled_share", [0.0, 0.5])
def test_slow_steps_are_a_spell_unless_the_quota_held_them_back(throttled_share: float) -> None:
    made_up = MadeUpTime(LAWS["core"][0], seed=1)
    slow_since_s = made_up.now + 60.0

    def throttled_s() -> float:
        return throttled_share * max(0.0, made_up.now - slow_since_s)

    times = StepTimes()
    times.set_profile(made_up.profile())
    scheduler = create_scheduler(num_blocks=3000, cap=16, budget=2048, max_model_len=WINDOW)
    clocks = (made_up.monotonic, None, throttled_s)
    engine = Engine(scheduler, cast(Runner, made_up), times, *clocks)
    for i in range(8):
        engine.submit(create_request(f"reader{i}", 200, max_tokens=WINDOW - 200), made_up.now)
    seen = set()
    while made_up.now < slow_since_s + 10.0:
        made_up.slowness = 3.0 if made_up.now >= slow_since_s else 1.0
        engine.step()
        if made_up.now >= slow_since_s + 2.0:
            seen.add(times.is_slow)
    assert seen == {throttled_share == 0.0}


def test_what_the_quota_held_back_in_an_idle_minute_hides_no_spell() -> None:
    made_up, throttled_s = MadeUpTime(LAWS["core"][0], seed=1), 0.0
    times = StepTimes()
    times.set_profile(made_up.profile())
    scheduler = create_scheduler(num_blocks=3000, cap=16, budget=2048, max_model_len=WINDOW)
    clocks = (made_up.monotonic, None, lambda: throttled_s)
    engine = Engine(scheduler, cast(Runner, made_up), times, *clocks)
    engine.submit(create_request("reader", 200, max_tokens=8000), made_up.now)
    while engine.has_work:
        engine.step()
    throttled_s = 3.0  # probes, and texts that were tokenised
    assert engine.use_idle_time() == float("inf")
    engine.submit(create_request("another", 200, max_tokens=2000), made_up.now)
    made_up.slowness = 3.0
    while engine.has_work:
        engine.step()
    assert times.is_slow
