"""Rotary positions as one complex product per layer.

The rows of the query and key projections are reordered at load so that the two halves that a
rotation mixes lie side by side; scores do not change, as queries and keys are reordered alike.
"""

import math

import torch
from torch import Tensor

from .config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position / wavelengths - low) / (high - low)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def rotations(positions: Tensor, frequencies: Tensor) -> Tensor:
    """positions [num_tokens] -> complex64 [num_tokens, 1, head_dim / 2]."""
    angles = positions.float()[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def rotate_(heads: Tensor, turns: Tensor) -> None:
    """Rotate heads [num_tokens, num_heads, head_dim] in place by `rotations`."""
    pairs = heads.float().view(
        *heads.shape[:-1], -1, 2
    )  # a copy only where the dtype is not float32
    turned = torch.view_as_complex(pairs).mul_(turns)
    if heads.dtype != torch.float32:
        heads.copy_(torch.view_as_real(turned).flatten(-2))


def interleave_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the output rows of a projection so that dimension i is followed by i + head_dim/2."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)
