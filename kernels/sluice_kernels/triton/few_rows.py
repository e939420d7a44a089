"""Products of few rows: as fast as their weights are read, which is all that decoding waits for.

A program takes BLOCK_N outputs and one of SPLITS parts of the inputs. Weights are the left side of
the product, so that tensor cores' 64 rows are outputs and the few rows of the batch are padded to
16 at most. Parts of one output are joined by atomic additions to float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import padded


@triton.jit
def _few_rows(
    rows, weight, out, num_rows, num_inputs, num_outputs, row_stride, out_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch, inputs = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    inside = batch < num_rows
    at_weights = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    at_rows = rows + inputs[:, None] + batch[None, :] * row_stride
    acc = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for start in range(0, num_inputs, BLOCK_K):
        weights = tl.load(at_weights + start, eviction_policy="evict_first")
        given = tl.load(at_rows + start, mask=inside[None, :], other=0.0)
        acc = tl.dot(weights, given, acc)
    to = out + batch[None, :] * out_stride + outputs[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside[None, :])


def few_rows(rows: Tensor, weight: Tensor, config: tuple[int, int, int, int]) -> Tensor:
    """rows [num_rows, in] @ weight [out, in] -> [num_rows, out]."""
    num_rows, num_inputs = rows.shape
    num_outputs = weight.shape[0]
    block_n, block_k, warps, stages = config
    out = rows.new_empty(num_rows, num_outputs)
    _few_rows[num_outputs // block_n,](
        rows, weight, out, num_rows, num_inputs, num_outputs, rows.stride(0), num_outputs,
        ROWS=padded(num_rows, 16), BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
