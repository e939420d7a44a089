"""A GPU that cannot be used is refused in one sentence with its reason."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from sluice_core.errors import ConfigError, DoesNotFit
from sluice_core.model.sizing import CONTEXT_BYTES, MAX_GATHER_BYTES, WORKSPACE_BYTES, MemoryPlan
from sluice_kernels.choose import CannotChoose, choose
from sluice_kernels.interface import Kernels
from sluice_worker.base.config import EngineConfig
from sluice_worker.base.resources import Resources
from sluice_worker.engine.startup import _Start, refuse_unless_free, start
from sluice_worker.execution.models.decoder import Decoder

MODEL = Path(__file__).parents[4] / "examples" / "model"
GIB = 1 << 30


def kernels(**environ: str) -> Kernels:
    device, sizes = torch.device("cuda"), {"max_gather_bytes": 1, "max_scores_bytes": 1}
    return choose(device, torch.float16, None, environ, **sizes)


def test_a_gpu_before_ampere_is_refused_before_a_kernel_asks_too_much_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    with pytest.raises(CannotChoose, match=r"8\.0 .* this one has 7\.5; SLUICE_KERNELS=torch"):
        kernels()
    assert kernels(SLUICE_KERNELS="torch").name == "torch"
    gpu.major = 8
    assert kernels().name == "triton"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 12040). Please update your",
            "The NVIDIA driver on your system is too old (found version 12040).",
        ),
        ("No CUDA GPUs are available", "No CUDA GPUs are available."),
    ],
)
def test_without_a_usable_gpu_torch_says_why(
    monkeypatch: pytest.MonkeyPatch, said: str, told: str
) -> None:
    def fail() -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(ConfigError) as caught:
        start(EngineConfig(str(MODEL), device="cuda"), lambda *_: None)
    here = f"--device cuda: no GPU that torch {torch.__version__} can use"
    assert caught.value.message == f"{here}: {told}"


def filled(total_bytes: int, utilization: float) -> MemoryPlan:
    """A plan that takes its share to the last block of 2 MiB."""
    weights, activations, workspace = 5 * GIB, GIB, WORKSPACE_BYTES["cuda"]
    return MemoryPlan(
        total_bytes=total_bytes,
        utilization=utilization,
        weights_bytes=weights,
        activation_bytes=activations,
        workspace_bytes=workspace,
        reserve_bytes=0,
        kv_bytes_per_token=1 << 17,
        block_size=16,
        num_blocks=(int(utilization * total_bytes) - weights - activations - workspace) >> 21,
        max_model_len=4096,
        ceiling=8,
        device="cuda",
    )


def test_a_gpu_whose_memory_others_hold_is_refused_before_the_model_is_read() -> None:
    plan, total = filled(24 * GIB, 0.9), 24 * GIB  # 21.6 GiB with the context
    refuse_unless_free(plan, int(21.2 * GIB), total)
    told = r"21\.1 GiB .* planned, and 20\.9 of its 24\.0 GiB are free: something else uses it\."
    with pytest.raises(DoesNotFit, match=told):
        refuse_unless_free(plan, int(20.9 * GIB), total)


@pytest.mark.parametrize(("total", "share"), [(24 * GIB, 0.98), (10 * GIB, 0.95)])
def test_a_workers_own_context_is_not_taken_for_anothers(total: int, share: float) -> None:
    refuse_unless_free(filled(total, share), total - CONTEXT_BYTES, total)


def test_a_context_that_is_larger_than_planned_is_not_laid_to_others() -> None:
    plan, total = filled(24 * GIB, 1.0), 24 * GIB
    with pytest.raises(DoesNotFit, match="are free: the rest is CUDA's own"):
        refuse_unless_free(plan, total - CONTEXT_BYTES - GIB // 8, total)


def test_memory_of_a_gpu_is_refused_where_the_model_runs_on_the_cpu() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-bytes is of a GPU"):
        start(EngineConfig(str(MODEL), device="cpu", gpu_memory_bytes=1 << 30), lambda *_: None)


@pytest.mark.parametrize(("given", "planned"), [(None, 80), (24, 24), (100, 80)])
def test_a_worker_plans_with_no_more_of_a_gpu_than_it_is_told(
    monkeypatch: pytest.MonkeyPatch, given: int | None, planned: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * GIB, 80 * GIB))
    monkeypatch.setenv("SLUICE_KERNELS", "torch")
    told = None if given is None else given * GIB
    config = EngineConfig(str(MODEL), device="cuda", gpu_memory_bytes=told)
    assert _Start(config, Resources())._plan(GIB).total_bytes == planned * GIB


@pytest.mark.parametrize(("reserved", "held"), [(7, 7), (5, 6)])
def test_the_kv_cache_gets_nothing_that_the_allocator_holds_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, reserved: int, held: int
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: (reserved if emptied else 9) * GIB)
    monkeypatch.setenv("SLUICE_KERNELS", "torch")
    model = cast(Decoder, SimpleNamespace(num_bytes=6 * GIB))
    started = _Start(EngineConfig(str(MODEL), device="cuda"), Resources())
    assert started._held_bytes(model) == held * GIB
    started.kind = "cpu"
    assert started._held_bytes(model) == 6 * GIB


@pytest.mark.parametrize(("asked", "gathers"), [("torch", True), ("auto", False)])
def test_a_worker_plans_for_gathered_pages_with_plain_torch_alone(
    monkeypatch: pytest.MonkeyPatch, asked: str, gathers: bool
) -> None:
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * GIB, 80 * GIB))
    monkeypatch.setenv("SLUICE_KERNELS", asked)
    started = _Start(EngineConfig(str(MODEL), device="cuda"), Resources())
    plan = started._plan(GIB)
    assert plan.fits
    least = WORKSPACE_BYTES["cuda"] + MAX_GATHER_BYTES
    assert (plan.workspace_bytes >= least) == gathers
