"""What the kernels share: when they run, how they ask for shapes, what their references say."""

import torch
import triton
from torch import Tensor
from triton import knobs


def runs_kernel(tensor: Tensor) -> bool:
    """Whether a wrapper launches its kernel for `tensor`, or runs its reference."""
    return tensor.is_cuda or bool(knobs.runtime.interpret)


def padded(width: int, least: int = 1) -> int:
    """The power of two that holds `width`: what a block of Triton's can be wide."""
    return max(int(triton.next_power_of_2(width)), least)


def softcapped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores that stay within plus and minus `softcap`: the references' own."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def require(condition: bool, sentence: str) -> None:
    """Raises ValueError with the `sentence` that states a wrapper's contract."""
    if not condition:
        raise ValueError(sentence)
