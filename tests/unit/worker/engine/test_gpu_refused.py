"""A GPU that cannot be used is refused in one sentence with its reason."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sluice_kernels.choose import CannotChoose, choose
from sluice_kernels.interface import Kernels
from sluice_worker.config import EngineConfig
from sluice_worker.errors import ConfigError
from sluice_worker.startup import start

MODEL = Path(__file__).parents[4] / "examples" / "model"


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
