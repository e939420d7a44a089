"""A linear layer as it is read: parts with the same input become one.

A small model's step time is mostly the calls themselves, so it should make few calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from sluice_kernels.interface import Activation, Kernels, NormsTexts, Projection
from sluice_kernels.linear import PackedLinear, Pointwise
from torch import Tensor
from torch.nn.functional import linear

ReadTensor = Callable[[str, tuple[int, ...]], Tensor]
"""(name, shape) -> the tensor, on its device and in its dtype, or a typed error."""


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [..., in] -> [..., out], in plain torch."""
        return linear(rows, self.weight, self.bias)


def read_linear(read: ReadTensor, name: str, rows: int, columns: int, has_bias: bool) -> Linear:
    """The linear layer `name` of a checkpoint."""
    return Linear(
        read(f"{name}.weight", (rows, columns)),
        read(f"{name}.bias", (rows,)) if has_bias else None,
    )


def split(part: Linear, sizes: Sequence[int]) -> list[Linear]:
    """`part` cut into layers of so many rows each."""
    weights = torch.split(part.weight, list(sizes))
    biases = [None] * len(sizes) if part.bias is None else torch.split(part.bias, list(sizes))
    return [Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def fuse(parts: Sequence[Linear]) -> Linear:
    """All of `parts` as one; either all have a bias or none has."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def activated(
    kernels: Kernels, part: Linear, name: str, activation: Callable[[Tensor], Tensor]
) -> Projection:
    """`part` as the kernels compute it, and the activation of that `name` behind it."""
    projection = made(kernels, part)
    known: tuple[Pointwise, ...] = get_args(Pointwise)
    for pointwise in known:
        if pointwise == name and isinstance(projection, PackedLinear):
            return replace(projection, activation=pointwise)
    if isinstance(kernels, NormsTexts) and name in ("gelu", "gelu_new", "gelu_pytorch_tanh"):
        return lambda rows: kernels.gelu_(projection(rows), is_tanh=name != "gelu")
    return lambda rows: activation(projection(rows))


def made(kernels: Kernels, part: Linear, activation: Activation | None = None) -> Projection:
    """`part` as the kernels compute it, quantised where they quantise."""
    return kernels.projection(part.weight, part.bias, activation, narrow=True)


def wide(kernels: Kernels, part: Linear) -> Projection:
    """`part` as the kernels compute it, never quantised. With an encoder's queries, keys and values
    in int8, the least cosine of 400 texts to MiniLM's own is 0.991; with these wide, 0.997."""
    return kernels.projection(part.weight, part.bias, None, narrow=False)
