"""Root-mean-square norm, also of a residual stream after an addition."""

from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import rms_norm

from .common import padded, require, runs_kernel


@triton.jit
def _add_norm(
    residual, added, weight, out, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * WIDTH + columns, columns < WIDTH
    x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(added + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        x = rounded.to(tl.float32)  # what the next layer will read of it
    root = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (x * root * w).to(out.dtype.element_ty), mask=inside)


def add_norm(residual: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add to `residual` in place (unless `added` is None), and return the norm of the sum.

    residual, added [num_rows, width]; weight [width], of any floating dtype. Arithmetic is float32.
    """
    require(residual.is_contiguous(), "add_norm: the residual must be contiguous.")
    require(added is None or added.is_contiguous(), "add_norm: what is added must be contiguous.")
    if not runs_kernel(residual):
        residual += 0 if added is None else added
        return reference(residual, weight, eps)
    out = torch.empty_like(residual)
    num_rows, width = residual.shape
    constants = norm_constants(width, adds=added is not None)
    _add_norm[num_rows,](
        residual, residual if added is None else added, weight, out, eps, **constants
    )
    return out


@lru_cache
def norm_constants(width: int, *, adds: bool) -> Mapping[str, int]:
    """Compile-time constants of the kernel: one row per program, eight elements per thread."""
    warps = min(max(padded(width) // 256, 1), 16)
    return {"WIDTH": width, "BLOCK": padded(width), "ADDS": adds, "num_warps": warps}


def reference(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm in torch, in float32 as the kernel."""
    return rms_norm(rows.float(), weight.shape, weight.float(), eps).to(rows.dtype)
