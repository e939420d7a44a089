"""What the kernels share: when they run, and how they ask for their shapes."""

import triton
from torch import Tensor
from triton import knobs


def runs_kernel(tensor: Tensor) -> bool:
    """Whether a wrapper launches its kernel for `tensor`, or runs its reference."""
    return tensor.is_cuda or bool(knobs.runtime.interpret)


def padded(width: int, least: int = 1) -> int:
    """The power of two that holds `width`: what a block of Triton's can be wide."""
    return max(int(triton.next_power_of_2(width)), least)


def require(condition: bool, sentence: str) -> None:
    """Raises ValueError with the `sentence` that states a wrapper's contract."""
    if not condition:
        raise ValueError(sentence)
