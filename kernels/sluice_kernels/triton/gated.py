"""The middle of a gated MLP: activation of the gate, times the rest."""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import gelu, silu

from ..interface import Activation
from .common import require, runs_kernel

BLOCK = 1024


@triton.jit
def _gated(
    gate_up, out, width, row_stride, IS_GELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    at = gate_up + row * row_stride + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    if IS_GELU:  # 0.5 (1 + tanh z) is sigmoid 2z
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate * tl.sigmoid(2 * z)
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * width + columns, (gate * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [num_rows, 2 * width] -> [num_rows, width]."""
    require(gate_up.stride(1) == 1, "gated: rows must be contiguous.")
    if not runs_kernel(gate_up):
        return reference(gate_up, activation)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _gated[num_rows, -(-width // BLOCK)](
        gate_up, out, width, gate_up.stride(0), IS_GELU=activation != "silu", BLOCK=BLOCK
    )
    return out


def reference(gate_up: Tensor, activation: Activation) -> Tensor:
    """The same in torch, in float32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    active = silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")
    return (active * up).to(gate_up.dtype)
