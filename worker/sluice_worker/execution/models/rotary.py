"""Rotary positions as one complex product per layer.

At load the rows of the query and key projections are reordered: the two halves that a rotation
mixes then lie side by side. Scores do not change, as queries and keys are reordered alike.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .rope import Rope


@dataclass(frozen=True, slots=True)
class Rotary:
    """Each [head_dim / 2] float32: the frequency and the scale of each pair of dimensions."""

    frequencies: Tensor
    magnitudes: Tensor

    def at(self, positions: Tensor) -> Tensor:
        """positions [num_tokens] -> complex64 [num_tokens, 1, head_dim / 2]."""
        angles = positions.float()[:, None] * self.frequencies
        return torch.polar(self.magnitudes.expand_as(angles), angles).unsqueeze(1)


def read_rotary(rope: Rope, head_dim: int, device: torch.device) -> Rotary:
    """The tables of `rope`; dimensions behind `rope.dims` do not rotate."""
    still = head_dim // 2 - rope.dims // 2
    magnitudes = torch.cat([torch.full((rope.dims // 2,), rope.magnitude), torch.ones(still)])
    turning = _inverse_frequencies(rope)
    frequencies = torch.cat([turning, torch.zeros(still)])
    return Rotary(frequencies.to(device), magnitudes.to(device))


def _inverse_frequencies(rope: Rope) -> Tensor:
    """[rope.dims / 2] float32."""
    exponents = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(frequencies, rope)
        case "longrope":
            return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
        case _:
            return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - low) / (high - low)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: Rope) -> Tensor:
    """Like llama3, but the blend is linear in the dimension (arXiv 2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        """The dimension that makes `rotations` rotations within the original length."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dims * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(rope.dims // 2).float() - low) / width).clamp(0, 1)
    return stretched * frequencies / rope.factor + (1 - stretched) * frequencies


def interleave_halves(weight: Tensor, head_dim: int, dims: int) -> Tensor:
    """Reorder each head's first `dims` rows so that row i + dims / 2 follows row i."""
    rest = weight.shape[1:]
    heads = weight.view(-1, head_dim, *rest)
    halves = heads[:, :dims].reshape(-1, 2, dims // 2, *rest).transpose(1, 2)
    turning = halves.reshape(-1, dims, *rest)
    if dims < head_dim:
        turning = torch.cat([turning, heads[:, dims:]], dim=1)
    return turning.reshape(weight.shape)
