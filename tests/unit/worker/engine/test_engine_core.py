"""The engine without sockets: sampling, failures and books, on a real small model."""

import time
from pathlib import Path

import msgspec
import pytest
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Abort, Submit
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine.loop import Engine
from sluice_worker.engine.startup import start
from sluice_worker.scheduling.step import BookedToken, Step
from unit.worker.engine.factories import (
    collect,
    create_engine,
    create_request,
    create_requests,
    create_scheduler,
    run_all,
    save_llama,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_llama(path, num_hidden_layers=2)
    return path


def test_an_engine_starts_with_the_limits_of_its_configuration(checkpoint: Path) -> None:
    limits = EngineLimits(5, 4, 64, 50.0, 500.0, "deadline", hold_share=0.25)
    config = EngineConfig(
        str(checkpoint), device="cpu", epoch=5, initial_num_seqs=4, max_num_batched_tokens=64,
        num_gpu_blocks_override=64, itl_ms=50.0, ttft_ms=500.0, hold_share=0.25,
    )  # fmt: skip
    engine, _ = start(config, lambda *_: None)
    assert engine.scheduler.limits == limits


def sampled(lengths: tuple[int, ...]) -> list[Submit]:
    return [create_request(f"r{n}", n, max_tokens=40, temperature=0.9, seed=n) for n in lengths]


def test_seeded_sampling_does_not_depend_on_batch_or_preemption(checkpoint: Path) -> None:
    lengths = (5, 17, 40, 70)
    alone: dict[str, list[int]] = {}
    for request in sampled(lengths):
        alone |= run_all(create_engine(checkpoint, create_scheduler()), [request])
    scheduler = create_scheduler(num_blocks=13, max_model_len=200)
    assert run_all(create_engine(checkpoint, scheduler), sampled(lengths)) == alone
    assert scheduler.counters.num_preemptions > 0
    assert len(set(alone["r5"])) > 5


def poison(engine: Engine, request_id: str) -> None:
    """Make the model's output for one running request NaN from here on: its pages hold NaN."""
    (sequence,) = [s for s in engine.scheduler.running if s.request_id == request_id]
    for cache in engine.runner.caches:
        cache[sequence.block_ids] = float("nan")


def test_nan_fails_one_request_and_reaches_no_other(checkpoint: Path) -> None:
    requests = create_requests((20, 30, 45), max_tokens=30)
    expected = run_all(create_engine(checkpoint, create_scheduler()), requests)
    engine = create_engine(checkpoint, create_scheduler(num_blocks=16, max_model_len=200))
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.submit(request, 0.0) is None
    for _ in range(6):
        assert collect(engine, outputs) == []
    poison(engine, "r30")
    (failed,) = collect(engine, outputs)
    assert failed.request_id == "r30"
    assert "not finite" in str(failed.error)
    # Every block is used again, those that held NaN among them.
    later = [create_request(f"later{i}", 50, max_tokens=30) for i in range(4)]
    outputs |= {request.request_id: [] for request in later}
    for request in later:
        assert engine.submit(request, 0.0) is None
    while engine.has_work:
        assert collect(engine, outputs) == []
    assert outputs["r20"] == expected["r20"]
    assert outputs["r45"] == expected["r45"]
    assert all(len(outputs[request.request_id]) == 30 for request in later)
    assert engine.scheduler.check_integrity() is None


def test_abort_between_steps_frees_the_blocks_at_once(checkpoint: Path) -> None:
    engine = create_engine(checkpoint, create_scheduler(cap=1))
    for request in create_requests((100, 20)):
        engine.submit(request, 0.0)
    engine.step()
    running = engine.abort(Abort("r100"))
    assert running is not None
    assert running.snapshot.used_blocks == 0
    waiting = engine.abort(Abort("r20"))
    assert waiting is not None
    assert waiting.error is None
    assert engine.abort(Abort("r20")) is None
    assert not engine.has_work
    assert engine.scheduler.check_integrity() is None


def test_configure_is_in_force_from_the_next_step(checkpoint: Path) -> None:
    engine = create_engine(checkpoint, create_scheduler(cap=1, budget=16))
    for request in create_requests((40, 20)):
        engine.submit(request, 0.0)
    before, _ = engine.step()
    engine.configure(EngineLimits(epoch=5, cap=2, max_num_batched_tokens=64, itl_ms=None))
    after, _ = engine.step()
    assert before is not None
    assert after is not None
    assert (before.epoch, before.num_running, before.num_prefill_tokens) == (0, 1, 16)
    assert (after.epoch, after.num_running, after.num_prefill_tokens) == (5, 2, 44)


def test_first_token_says_where_the_time_went(checkpoint: Path) -> None:
    engine = create_engine(checkpoint, create_scheduler())
    request = create_request("a", 40, max_tokens=2)
    run_all(engine, [request])
    sent_s = time.monotonic() - 3.0  # while a step of three seconds was under way
    again = create_request("b", request.prompt_token_ids, max_tokens=2, submitted_s=sent_s)
    engine.submit(again, 0.0)
    report, _ = engine.step()
    assert report is not None
    first = report.tokens[0].first
    assert first is not None
    assert first.cached_tokens == 32
    assert 3.0 < first.prefill_s <= report.started_s + report.step_s - sent_s
    second, _ = engine.step()
    assert second is not None
    assert second.tokens[0].first is None
    assert second.tokens[0].finish_reason == "length"


def test_a_step_lasts_until_its_tokens_are_booked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, now = create_scheduler(), [0.0]
    book = scheduler.commit

    def commit(step: Step, sampled: list[int | None], at_s: float) -> list[BookedToken]:
        now[0] += 0.5
        return book(step, sampled, at_s)

    monkeypatch.setattr(scheduler, "commit", commit)
    runner = create_engine(checkpoint, scheduler).runner
    engine = Engine(scheduler, runner, StepTimes(), lambda: now[0])
    engine.submit(create_request("a", 20, max_tokens=2), 0.0)
    report, _ = engine.step()
    assert report is not None
    assert report.step_s == 0.5


def test_what_can_no_longer_be_in_time_is_dropped_only_before_it_begins(checkpoint: Path) -> None:
    engine = create_engine(checkpoint, create_scheduler(cap=1))
    for request in create_requests((100, 20)):
        engine.submit(request, 0.0)
    engine.step()
    assert engine.abort(Abort("r100", if_waiting=True)) is None
    dropped = engine.abort(Abort("r20", if_waiting=True))
    assert dropped is not None
    assert (dropped.request_id, dropped.error) == ("r20", None)
    assert engine.has_work


def test_unseeded_requests_draw_as_the_workers_seed_says(checkpoint: Path) -> None:
    def drawn(seed: int | None) -> list[int]:
        scheduler = create_scheduler()
        made = create_engine(checkpoint, scheduler)
        engine = Engine(scheduler, made.runner, StepTimes(), seed=seed)
        for request in create_requests((10, 20, 30)):
            engine.submit(msgspec.structs.replace(request, seed=None), 0.0)
        return [sequence.seed for sequence in scheduler.waiting]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(None) != drawn(None)
