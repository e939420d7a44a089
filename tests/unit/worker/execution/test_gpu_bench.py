"""The bench of the GPU on fake tensors, and its engine on a CPU: a lease is too short for typos."""

from pathlib import Path

import pytest
from bench import gpu, gpu_engine
from bench.gpu_kernels import KernelTime, Point, Timing
from sluice_core.work import Sampling
from sluice_kernels.triton.kernels import TritonKernels
from unit.worker.engine.factories import (
    create_gpu_engine_of,
    create_scheduler,
    load_decoder,
    save_llama,
)
from unit.worker.engine.fake_gpu import _weights, fake_gpu

COPY = Point("copy", Timing.of([1.0]), 3.0, "TB/s")


def test_every_point_is_measured_on_a_fake_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu_engine.EIGHT_B, "num_hidden_layers", 2)
    monkeypatch.setattr(gpu_engine, "random_weights", _weights)
    monkeypatch.setattr(gpu_engine, "traced", lambda _: (KernelTime("_decode", 2, 5.0),))
    results = gpu.Results("A GPU")
    with fake_gpu(monkeypatch):
        for part in ("engine", "attention", "products", "small"):
            gpu.Part(results, 2, tmp_path).measure(part)
    # The torch sampler's tokens are numbers, which fake tensors have not.
    assert results.wrong == ["batch 32, repetition_penalty"]
    names = [point.name for point in results.points]
    assert len({*names}) == 53
    assert {*gpu.AIMS} <= {*names}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu_engine.Machine:
    """A small model, and points of a few tokens."""
    monkeypatch.setattr(gpu_engine, "CONTEXT", 24)
    monkeypatch.setattr(gpu_engine, "NEW_TOKENS", 16)
    save_llama(tmp_path, num_hidden_layers=1)
    model = load_decoder(tmp_path, kernels=TritonKernels(4, 16))
    engine = create_gpu_engine_of(model, create_scheduler(cap=3))
    return gpu_engine.Machine(engine, model, 0.0, 0)


@pytest.mark.parametrize("sampling", [None, gpu_engine.CUT, gpu_engine.PENALISED])
def test_an_engines_point_is_of_full_batches_and_leaves_nothing_behind(
    machine: gpu_engine.Machine, sampling: Sampling | None
) -> None:
    engine = machine.engine
    for name in ("first", "second"):
        point = gpu_engine.engine_point(name, machine, COPY, 3, sampling)
        assert (point.name, point.unit) == (name, "tokens/s")
        assert not engine.has_work
        assert engine.scheduler.pool.num_used == 0


def test_what_an_arrival_costs_is_told_with_the_longest_gaps(
    machine: gpu_engine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_engine, "EVERY", 2)
    point = gpu_engine.arrivals_point(machine, 2)
    assert point.unit == "ms more"
    assert 0 < point.time_ms.smallest <= point.time_ms.median
    assert machine.engine.scheduler.pool.num_used == 0


def test_a_step_that_fails_leaves_no_sequence_to_the_next_point(
    machine: gpu_engine.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = machine.engine
    with monkeypatch.context() as broken:
        broken.setattr(engine.runner, "execute", lambda *_: [None] * 3)
        with pytest.raises(RuntimeError, match="failed"):
            gpu_engine.engine_point("bad", machine, COPY, 3)
    assert not engine.has_work
    assert gpu_engine.engine_point("good", machine, COPY, 3).rate > 0
