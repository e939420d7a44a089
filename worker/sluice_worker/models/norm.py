"""The root-mean-square norm as a value."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import rms_norm

from .config import DecoderConfig
from .linear import ReadTensor


@dataclass(frozen=True, slots=True)
class Norm:
    """weight [width]. `exact`: it is float32, and so is the product with it (Gemma)."""

    weight: Tensor
    eps: float
    exact: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [..., width] -> the same shape and dtype."""
        if self.exact:
            return rms_norm(rows.float(), self.weight.shape, self.weight, self.eps).to(rows.dtype)
        return rms_norm(rows, self.weight.shape, self.weight, self.eps)


def read_norm_weight(config: DecoderConfig, read: ReadTensor, name: str, width: int) -> Tensor:
    """What the norm multiplies by: Gemma's checkpoints hold how far that is from 1."""
    weight = read(f"{name}.weight", (width,))
    return weight.float() + 1 if config.shape.family.gemma else weight


def read_norm(config: DecoderConfig, read: ReadTensor, name: str) -> Norm:
    """The norm `name` of the residual stream."""
    weight = read_norm_weight(config, read, name, config.shape.hidden_size)
    return Norm(weight, config.norm_eps, config.shape.family.gemma)
