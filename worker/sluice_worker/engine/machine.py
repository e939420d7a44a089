"""The machine that an engine starts on: its device, its memory and the kernels for it."""

import os
from typing import Literal

import torch
from sluice_core.errors import ConfigError
from sluice_core.model.sizing import MAX_GATHER_BYTES, MAX_SCORES_BYTES
from sluice_kernels.choose import CannotChoose, choose
from sluice_kernels.interface import Kernels

from ..base.config import EngineConfig
from ..base.resources import Resources

Device = Literal["cpu", "cuda"]


class Machine:
    """Device and memory, as `config` asks for them. Raises ConfigError."""

    def __init__(self, config: EngineConfig, resources: Resources) -> None:
        self.resources = resources
        self._config = config
        self.kind: Device = _pick_device(config.device)
        self.device = torch.device(self.kind)
        if config.gpu_memory_bytes and self.kind == "cpu":
            raise ConfigError(["--gpu-memory-bytes is of a GPU, and the model runs on the CPU"])

    def base_bytes(self) -> int:
        """Bytes in use before the model: on a CPU by both processes, on a GPU by the context."""
        if self.kind == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return int(total - free)
        pids = (os.getpid(), os.getppid())
        return sum(self.resources.resident_bytes(pid) for pid in pids)

    def total_bytes(self) -> int:
        """Bytes to plan with."""
        if self.kind != "cuda":
            return self.resources.memory_bytes()
        total = int(torch.cuda.mem_get_info(self.device)[1])
        return min(total, self._config.gpu_memory_bytes or total)

    def kernels(self, dtype: str, group: int = 1) -> Kernels:
        """The kernels of a model in `dtype`. `group`: as in `choose`."""
        try:
            return choose(
                self.device,
                getattr(torch, dtype),
                self._config.quantization,
                os.environ,
                max_gather_bytes=MAX_GATHER_BYTES,
                max_scores_bytes=MAX_SCORES_BYTES,
                group=group,
            )
        except CannotChoose as error:
            raise ConfigError([str(error)]) from error


def _pick_device(asked: str) -> Device:
    if asked == "cuda" and not torch.cuda.is_available():
        torch_here = f"torch {torch.__version__}"
        raise ConfigError([f"--device cuda: no GPU that {torch_here} can use: {_why_no_gpu()}."])
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def _why_no_gpu() -> str:
    """Torch's own sentence: mostly the driver is missing, or too old for its CUDA."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        return str(error).partition(" Please ")[0].rstrip(".")  # install, update, read
    return "there is none"
