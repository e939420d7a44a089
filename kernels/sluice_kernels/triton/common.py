"""Helpers of all Triton kernels: when a kernel runs, shape checks, and results of references."""

import torch
from torch import Tensor
from triton import knobs


def runs_kernel(tensor: Tensor) -> bool:
    """True if a wrapper launches its kernel for `tensor`; else it runs its reference."""
    return tensor.is_cuda or bool(knobs.runtime.interpret)


def padded(width: int, least: int = 1) -> int:
    """The least power of two that holds `width` (1 or more): the width of a Triton block."""
    return max(1 << (width - 1).bit_length(), least)


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores kept within plus and minus `softcap`; used by the references."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def require(condition: bool, sentence: str) -> None:
    """Raises ValueError with the `sentence` that states a wrapper's contract."""
    if not condition:
        raise ValueError(sentence)
