"""The least logit that top-k, top-p and min-p keep in a row, found on the device.

Nothing is sorted: the edge is searched among the bits of the logits, which order as integers do.
Each pass over the row rules out three quarters of the remaining values: eight passes for bfloat16,
sixteen for float32. A row without a cut is not read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import runs_kernel, softcapped

BLOCK = 8192
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Number of last bits that are zero in a float32 converted from the dtype."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of rows, each [num_rows]. float32: temperatures (0: the likeliest),
    top_p (1: all) and min_p. int64: top_k (0: all) and seeds."""

    temperatures: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor


@triton.jit
def bent(x, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(x / softcap)."""
    if HAS_SOFTCAP:
        x = (2 * tl.sigmoid(2 * x / softcap) - 1) * softcap
    return x


@triton.jit
def _read(row, columns, width):
    return tl.load(row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)


@triton.jit
def _keys(x, ZEROS: tl.constexpr):
    """Whole numbers in the order of `x`, float32 of which the last `ZEROS` bits are zero."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> ZEROS).to(tl.int64)


@triton.jit
def _number(key, ZEROS: tl.constexpr):
    """The float32 that has this key."""
    bits = (key << ZEROS).to(tl.int32)
    of_negative = (bits | ((1 << ZEROS) - 1)) ^ 0x7FFFFFFF
    return tl.where(key < 0, of_negative, bits).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, best, temperature, softcap, HAS_SOFTCAP: tl.constexpr):
    """Probabilities as parts of the largest, whose logit is `best`; 0 behind the row's end."""
    below = bent(x, softcap, HAS_SOFTCAP) - bent(best, softcap, HAS_SOFTCAP)
    return tl.where(x > -float("inf"), tl.exp(below / temperature), 0.0)


@triton.jit
def _least(
    row, width, low, high, limit, best, temperature, softcap,
    COUNTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ZEROS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key from `low` to `high` above which lie fewer tokens, or weights of a smaller sum,
    than `limit`."""
    while low < high:
        span = high - low
        first, second, third = low + (span >> 2), low + (span >> 1), low + (3 * span >> 2)
        above_first = tl.zeros([BLOCK], tl.float32)
        above_second = above_first
        above_third = above_first
        for begin in range(0, width, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            x = _read(row, columns, width)
            if COUNTS:
                each = tl.where(columns < width, 1.0, 0.0)
            else:
                each = _weights(x, best, temperature, softcap, HAS_SOFTCAP)
            keys = _keys(x, ZEROS)
            above_first += tl.where(keys > first, each, 0.0)
            above_second += tl.where(keys > second, each, 0.0)
            above_third += tl.where(keys > third, each, 0.0)
        if tl.sum(above_first, 0) < limit:
            high = first
        elif tl.sum(above_second, 0) < limit:
            low, high = first + 1, second
        elif tl.sum(above_third, 0) < limit:
            low, high = second + 1, third
        else:
            low = third + 1
    return low


@triton.jit
def _edge(
    row, width, top_k, top_p, min_p, best, temperature, softcap,
    HAS_SOFTCAP: tl.constexpr, ZEROS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The least key that is kept; `best`: the largest logit."""
    high = _keys(best, ZEROS)
    lowest = tl.zeros([BLOCK], tl.int64) + high
    for begin in range(0, width, BLOCK):
        x = _read(row, begin + tl.arange(0, BLOCK), width)
        is_kept = _weights(x, best, temperature, softcap, HAS_SOFTCAP) >= min_p
        lowest = tl.minimum(lowest, tl.where(is_kept, _keys(x, ZEROS), high))
    low = tl.min(lowest, 0)
    if top_k < width:
        low = _least(
            row, width, low, high, top_k.to(tl.float32), best, temperature, softcap,
            True, HAS_SOFTCAP, ZEROS, BLOCK,
        )  # fmt: skip
    if top_p < 1:
        left = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, width, BLOCK):
            x = _read(row, begin + tl.arange(0, BLOCK), width)
            each = _weights(x, best, temperature, softcap, HAS_SOFTCAP)
            left += tl.where(_keys(x, ZEROS) >= low, each, 0.0)
        low = _least(
            row, width, low, high, top_p * tl.sum(left, 0), best, temperature, softcap,
            False, HAS_SOFTCAP, ZEROS, BLOCK,
        )  # fmt: skip
    return low


@triton.jit
def _cut(
    logits, temperatures, top_ps, min_ps, top_ks, floors, width, row_stride, softcap,
    HAS_SOFTCAP: tl.constexpr, ZEROS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row, temperature = logits + at * row_stride, tl.load(temperatures + at)
    top_k, top_p, min_p = tl.load(top_ks + at), tl.load(top_ps + at), tl.load(min_ps + at)
    top_k = tl.where(top_k > 0, top_k, width)
    floor = -float("inf")
    if (temperature > 0) & ((top_k < width) | (top_p < 1) | (min_p > 0)):
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        for begin in range(0, width, BLOCK):
            highest = tl.maximum(highest, _read(row, begin + tl.arange(0, BLOCK), width))
        best = tl.max(highest, 0)
        if tl.abs(best) < float("inf"):  # else nothing of the row is chosen
            low = _edge(
                row, width, top_k, top_p, min_p, best, temperature, softcap,
                HAS_SOFTCAP, ZEROS, BLOCK,
            )  # fmt: skip
            floor = _number(low, ZEROS)
    tl.store(floors + at, floor)


def cut(logits: Tensor, draws: Draws, softcap: float | None = None) -> Tensor:
    """Returns float32 [num_rows]: the least logit to keep; minus infinity to keep all.

    logits [num_rows, width] of a dtype in `ZERO_BITS`; `softcap` is applied before drawing. Equal
    logits are kept or left out together. Order and meaning are those of the worker's sampler:
    min-p and top-k, then the smallest set that has `top_p` of the rest.
    """
    if not runs_kernel(logits):
        return reference(logits, draws, softcap)
    num_rows, width = logits.shape
    floors = logits.new_empty(num_rows, dtype=torch.float32)
    _cut[(num_rows,)](
        logits, draws.temperatures, draws.top_p, draws.min_p, draws.top_k, floors,
        width, logits.stride(0), softcap or 1.0, **cut_constants(logits.dtype, softcap is not None),
    )  # fmt: skip
    return floors


def cut_constants(dtype: torch.dtype, has_softcap: bool) -> dict[str, int]:
    """Compile-time constants of the kernel."""
    return {"HAS_SOFTCAP": has_softcap, "ZEROS": ZERO_BITS[dtype], "BLOCK": BLOCK, "num_warps": 32}


def reference(logits: Tensor, draws: Draws, softcap: float | None) -> Tensor:
    """The same in torch, by sorting."""
    ordered = logits.float().sort(dim=1, descending=True).values
    scores = softcapped(ordered, softcap)
    is_drawn = draws.temperatures > 0
    temperatures = torch.where(is_drawn, draws.temperatures, 1.0)
    weights = ((scores - scores[:, :1]) / temperatures[:, None]).exp()
    width = logits.shape[1]
    top_k = torch.where(draws.top_k > 0, draws.top_k, width).clamp_max(width)
    kth = ordered.gather(1, top_k[:, None] - 1)
    weights *= (weights >= draws.min_p[:, None]) & (ordered >= kth)
    before = weights.cumsum(dim=1) - weights
    is_kept = (before < draws.top_p[:, None] * weights.sum(dim=1, keepdim=True)) & (weights > 0)
    floors = torch.where(is_kept, ordered, float("inf")).amin(dim=1)
    is_cut = (top_k < width) | (draws.top_p < 1) | (draws.min_p > 0)
    return torch.where(is_drawn & is_cut, floors, -float("inf"))
