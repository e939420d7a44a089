"""The root-mean-square norm as a value."""

from dataclasses import dataclass

from sluice_kernels.interface import Kernels
from torch import Tensor

from .config import DecoderConfig
from .linear import ReadTensor


@dataclass(frozen=True, slots=True)
class Norm:
    """weight: float32 [width], so the product is float32 and rounded once."""

    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, residual: Tensor, hidden: Tensor | None = None) -> Tensor:
        """The norm of residual [num_rows, width], to which `hidden` is added in place before."""
        return self.kernels.norm(residual, hidden, self.weight, self.eps)


def read_norm_weight(config: DecoderConfig, read: ReadTensor, name: str, width: int) -> Tensor:
    """The norm's factors, float32 [width]. Gemma's checkpoints store them minus 1."""
    weight = read(f"{name}.weight", (width,)).float()
    return weight + 1 if config.shape.family.gemma else weight


def read_norm(config: DecoderConfig, read: ReadTensor, name: str, kernels: Kernels) -> Norm:
    """The norm `name` of the residual stream."""
    weight = read_norm_weight(config, read, name, config.shape.hidden_size)
    return Norm(weight, config.norm_eps, kernels)
