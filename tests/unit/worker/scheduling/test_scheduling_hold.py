"""Held first tokens in the real scheduler, with an exact step model and made-up time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.law import Law
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord, StepTimes
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import Step
from unit.worker.engine.factories import VOCAB, create_request

ITL_MS, TTFT_MS = 65.0, 2000.0
SHAPES = (1, 0, 32), (1, 400, 0), (16, 400, 0), (16, 8000, 0), (8, 100, 128), (32, 900, 1024)


def step_ms(decodes: int, kv_tokens: int, prefill: int) -> float:
    return 25.0 + decodes + 0.0003 * kv_tokens + 0.28 * prefill


class Engine:
    """Steps take what the model says. `first_s`: when requests had their first tokens."""

    def __init__(self, *, num_blocks: int = 4096, cap: int = 64, policy: str = "deadline") -> None:
        times = StepTimes()
        times.set_profile([StepRecord(0.0, *shape, step_ms(*shape)) for shape in SHAPES])
        self.law, self.now_s, self.steps = Law(times), 0.0, list[Step]()
        limits = EngineLimits(0, cap, 2048, ITL_MS, TTFT_MS, policy)  # type: ignore[arg-type]
        pool = BlockPool(num_blocks, 16, prefix_caching=True)
        self.scheduler = Scheduler(pool, limits, max_model_len=4096, vocab_size=VOCAB)
        self.first_s: dict[str, float] = {}
        self.late: set[str] = set()

    def add(self, name: str, prompt: int | list[int], max_tokens: int = 20) -> Sequence:
        request = create_request(name, prompt, max_tokens=max_tokens, submitted_s=self.now_s)
        sequence = Sequence(request, seed=0)
        assert self.scheduler.can_admit(request) is None
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule(self.now_s, self.law)
        assert step.works, "a step always does something"
        kinds = step.num_decodes, step.num_kv_tokens, step.num_prefill_tokens
        self.now_s += step_ms(*kinds) / 1e3
        sampled = [7 for work in step.works if work.samples]
        for outcome in self.scheduler.commit(step, sampled, self.now_s):
            self.first_s.setdefault(outcome.sequence.request_id, self.now_s)
            if outcome.sequence.num_late:
                self.late.add(outcome.sequence.request_id)
        assert self.scheduler.check_integrity() is None
        self.steps.append(step)
        return step

    def run(self) -> "Engine":
        while self.scheduler.has_work:
            self.step()
        return self


@pytest.fixture
def busy() -> Engine:
    """Two requests decode."""
    engine = Engine()
    for name in ("old", "older"):
        engine.add(name, 40, max_tokens=60)
    while len(engine.first_s) < 2:
        engine.step()
    return engine


def names(step: Step) -> set[str]:
    return {work.sequence.request_id for work in step.works if work.samples}


def test_prompts_of_a_burst_have_their_first_tokens_together_and_in_time(busy: Engine) -> None:
    """Long steps compute them until short ones do the rest in time."""
    burst = {f"r{number}" for number in range(12)}
    began_s = busy.now_s
    for name in sorted(burst):
        busy.add(name, 400)
    while not burst & busy.first_s.keys():
        step = busy.step()
        assert step.is_long == (not burst & names(step))
    assert len(burst & names(step)) > 6
    busy.run()
    assert max(busy.first_s[name] for name in burst) - began_s < TTFT_MS / 1e3
    assert busy.late == {"old", "older"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_without_deadlines_no_first_token_is_held(policy: str) -> None:
    engine = Engine(policy=policy)
    for number in range(14):
        engine.add(f"r{number}", 400)
    engine.run()
    assert not any(step.is_long for step in engine.steps)
    assert len(set(engine.first_s.values())) > 4


def test_one_prefix_of_all_is_computed_once(busy: Engine) -> None:
    """The first of them is not held, or the others could not find it."""
    prefix = [(5 * token + token * token) % VOCAB for token in range(1600)]
    for number in range(8):
        busy.add(f"r{number}", [*prefix, *range(number, number + 160)])
    computed = 0
    while len(busy.first_s) < 2 + 8:
        computed += busy.step().num_prefill_tokens
    assert computed < 1600 + 8 * (160 + 16) + 16


def test_held_prompts_give_way_where_blocks_lack() -> None:
    """No step is empty, and everybody is answered."""
    engine = Engine(num_blocks=120)
    for number in range(24):
        engine.add(f"r{number}", 400)
    engine.run()
    assert len(engine.first_s) == 24


def test_who_is_aborted_while_it_is_held_leaves_nothing_behind(busy: Engine) -> None:
    for number in range(12):
        busy.add(f"r{number}", 400)
    assert busy.step().is_long
    for number in range(0, 12, 2):
        assert busy.scheduler.abort(f"r{number}")
    busy.run()
    assert busy.scheduler.pool.num_used == 0
    assert set(busy.first_s) == {"old", "older"} | {f"r{number}" for number in range(1, 12, 2)}


arrivals = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=30
)


@settings(max_examples=60)
@given(arrivals, st.sampled_from([40, 80, 4096]), st.sampled_from([2, 8, 64]))
def test_everybody_is_answered_whatever_comes(
    found: list[tuple[int, int, int]], num_blocks: int, cap: int
) -> None:
    engine = Engine(num_blocks=num_blocks, cap=cap)
    coming = [(at, f"r{place}", size, out) for place, (size, out, at) in enumerate(sorted(found))]
    number = 0
    while coming or engine.scheduler.has_work:
        for request in [each for each in coming if each[0] <= number]:
            coming.remove(request)
            engine.add(request[1], *request[2:])
        if engine.scheduler.has_work:
            engine.step()
        number += 1
    assert len(engine.first_s) == len(found)
    assert engine.scheduler.pool.num_used == 0
