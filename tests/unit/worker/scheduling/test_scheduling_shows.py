"""What the scheduler promises, on a real small model."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sluice_core.contract import StepModel
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Submit
from sluice_worker.base.config import NgramSpeculation
from sluice_worker.engine.loop import Engine
from sluice_worker.scheduling.static_batch import StaticBatching
from unit.worker.engine.factories import (
    collect,
    create_engine,
    create_request,
    create_scheduler,
    run_all,
    save_llama,
)


def random_requests(chance: random.Random, count: int) -> list[Submit]:
    return [
        create_request(f"r{i}", chance.randint(1, 40), max_tokens=chance.randint(1, 40))
        for i in range(count)
    ]


def test_100_random_changes_of_the_cap_under_load_lose_nothing_and_change_no_token(
    tmp_path: Path,
) -> None:
    save_llama(tmp_path, num_hidden_layers=2)
    chance = random.Random(17)
    requests = random_requests(chance, 60)
    expected = run_all(create_engine(tmp_path, create_scheduler(cap=1)), requests)
    scheduler = create_scheduler(
        num_blocks=40, cap=4, max_model_len=80, speculation=NgramSpeculation("ngram", 4)
    )
    engine = create_engine(tmp_path, scheduler)
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    waiting, num_changes = list(requests), 0
    while waiting or engine.has_work:
        for _ in range(chance.randint(0, 2)):
            if waiting:
                assert engine.submit(waiting.pop(), 0.0) is None
        if num_changes < 100 and engine.has_work:
            num_changes += 1
            cap = chance.randint(1, 16)
            engine.configure(EngineLimits(num_changes, cap, chance.randint(cap, 96), None))
        if engine.has_work:
            assert collect(engine, outputs) == []
    assert num_changes == 100
    assert outputs == expected
    assert scheduler.check_integrity() is None
    assert scheduler.pool.num_used == 0


class Unmeasured(StepTimes):
    """No fit: its time would be counted with the first steps."""

    def refit(self, now: float, *, is_throttled: bool = False) -> StepModel | None:
        return None


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def first_token_cpu_s(engine: Engine, request: Submit) -> float:
    """CPU seconds of this thread from submission to the first token."""
    outputs: dict[str, list[int]] = {request.request_id: []}
    started = time.thread_time()
    engine.submit(request, 0.0)
    while not outputs[request.request_id]:
        collect(engine, outputs)
    return time.thread_time() - started


@pytest.mark.usefixtures("one_thread")
def test_first_token_on_a_shared_prefix_takes_at_most_a_quarter_of_a_cold_one(
    tmp_path: Path,
) -> None:
    save_llama(tmp_path, hidden_size=384, intermediate_size=1056)
    ratios = []
    engine = create_engine(
        tmp_path, create_scheduler(num_blocks=512, budget=1024, max_model_len=1024)
    )
    engine.times = Unmeasured()
    run_all(engine, [create_request("warm-up", 400, max_tokens=2)])
    for i in range(5):
        prefix = create_request(f"cold{i}", 960, max_tokens=1)
        cold_s = first_token_cpu_s(engine, prefix)
        tail = [*prefix.prompt_token_ids[:944], *range(i, i + 16)]
        shared_s = first_token_cpu_s(engine, create_request(f"hit{i}", tail, max_tokens=1))
        ratios.append(shared_s / cold_s)
    assert engine.scheduler.counters.prefix_hits >= 5 * 944
    assert sorted(ratios)[2] <= 0.25, ratios


@pytest.mark.parametrize("speculation", [None, NgramSpeculation("ngram", 4)])
@pytest.mark.parametrize("size", [3, 8])
def test_static_batches_write_what_continuous_ones_write(
    tmp_path: Path, size: int, speculation: NgramSpeculation | None
) -> None:
    save_llama(tmp_path, num_hidden_layers=2)
    requests = random_requests(random.Random(4), 20)
    expected = run_all(create_engine(tmp_path, create_scheduler()), requests)
    batches = StaticBatching(size, 0.0)
    scheduler = create_scheduler(cap=16, static=batches, speculation=speculation)
    assert run_all(create_engine(tmp_path, scheduler), requests) == expected
