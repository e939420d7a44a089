"""Linear layers: plain, and packed once by oneDNN in the order that its products read.

F.linear reorders a bfloat16 weight at every call. Packing at load speeds a product of 1 row up 1.4
to 2.3 times, of 8 rows 1.5 times, of 512 rows not at all (AVX512-BF16, measured).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear

from .interface import Projection


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def into(self, out: Tensor, rows: Tensor) -> None:
        """Write the same to `out` [num_rows, out]."""
        torch.mm(rows, self.weight.t(), out=out)
        if self.bias is not None:
            out += self.bias


Pointwise = Literal["gelu", "gelu_pytorch_tanh"]
_ALGORITHMS: Mapping[Pointwise, str] = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """weight: oneDNN's own. activation: of each output, computed while it is in a register."""

    weight: Tensor
    bias: Tensor | None
    activation: Pointwise | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        name, algorithm = "none", ""
        if self.activation is not None:
            name, algorithm = "gelu", _ALGORITHMS[self.activation]
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, name, [], algorithm
        )
        return found


def plain_projection(weight: Tensor, bias: Tensor | None) -> Projection:
    """Make a layer of torch's own product."""
    return PlainLinear(weight, bias)


def packed_projection(weight: Tensor, bias: Tensor | None) -> Projection:
    """Packed, so that `weight` can be freed; plain if oneDNN has no product for its dtype."""
    if not can_pack(weight.dtype):
        return PlainLinear(weight, bias)
    return PackedLinear(torch.ops.mkldnn._reorder_linear_weight(weight), bias)


def can_pack(dtype: torch.dtype) -> bool:
    """True if oneDNN computes in `dtype` on this CPU."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def rounded_rows(num_rows: int) -> int:
    """`num_rows`, rounded up a little. oneDNN compiles a product for each new number of rows in
    one to four milliseconds. With few different numbers, all are soon compiled."""
    if num_rows <= 16:
        return num_rows
    step = 4 if num_rows <= 64 else 16 if num_rows <= 512 else 64
    return -(-num_rows // step) * step


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor, also of one that oneDNN packed."""
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes
