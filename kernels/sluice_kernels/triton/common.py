"""What the kernels share: when they run, how they ask for shapes, what their references say."""

import torch
from torch import Tensor
from triton import knobs


def runs_kernel(tensor: Tensor) -> bool:
    """Whether a wrapper launches its kernel for `tensor`, or runs its reference."""
    return tensor.is_cuda or bool(knobs.runtime.interpret)


def padded(width: int, least: int = 1) -> int:
    """The power of two that holds `width`, 1 or more: what a block of Triton's can be wide."""
    return max(1 << (width - 1).bit_length(), least)


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that stay within plus and minus `softcap`: the references' own."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def require(condition: bool, sentence: str) -> None:
    """Raises ValueError with the `sentence` that states a wrapper's contract."""
    if not condition:
        raise ValueError(sentence)
