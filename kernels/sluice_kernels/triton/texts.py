"""Attention over texts that lie behind each other, without padding, in tiles of queries.

Each token sees its whole text, a window to each side, or what came before it. Online softmax
(arXiv 2205.14135) in base 2. The host cuts the tiles, as for prompts.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .attend import LOG2E
from .common import padded, require, runs_kernel


@triton.jit
def _span(
    first, length,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """The tokens that a tile can see: the first one, of a whole block, and the end."""
    begin, end = 0, length
    if IS_CAUSAL:
        end = tl.minimum(length, first + ROWS)
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW, 0) // BLOCK * BLOCK
        end = tl.minimum(length, first + ROWS + WINDOW)
    return begin, end


@triton.jit
def _seen(there, slots, places, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The pairs of a query and a token that it sees."""
    seen = there[None, :]
    if IS_CAUSAL:
        seen = seen & (slots[None, :] <= places[:, None])
    if WINDOW > 0:
        seen = seen & (slots[None, :] <= places[:, None] + WINDOW)
        seen = seen & (slots[None, :] >= places[:, None] - WINDOW)
    return seen


@triton.jit
def _texts(
    qkv, tiles, out, scale, stride,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(1), tiles + tl.program_id(0) * 3
    start, length, first = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    dims, places = tl.arange(0, DIMS), first + tl.arange(0, ROWS)
    inside = (places < length)[:, None] & (dims < HEAD_DIM)[None, :]
    base = qkv + start.to(tl.int64) * stride + head * HEAD_DIM
    query = tl.load(base + places[:, None] * stride + dims[None, :], mask=inside, other=0.0)
    acc, total = tl.zeros((ROWS, DIMS), tl.float32), tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), -1.0e30, tl.float32)
    begin, end = _span(first, length, ROWS, BLOCK, WINDOW, IS_CAUSAL)
    for at in range(begin, end, BLOCK):
        slots = at + tl.arange(0, BLOCK)
        there = slots < length
        keys = tl.load(
            base + NUM_HEADS * HEAD_DIM + slots[None, :] * stride + dims[:, None],
            mask=there[None, :] & (dims < HEAD_DIM)[:, None], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        seen = _seen(there, slots, places, WINDOW, IS_CAUSAL)
        scores = tl.where(seen, scores, -1.0e30)
        highest = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - highest)
        weights = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0)
        values = tl.load(
            base + 2 * NUM_HEADS * HEAD_DIM + slots[:, None] * stride + dims[None, :],
            mask=there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = highest
    to = (start + places).to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    found = (acc / tl.maximum(total, 1.0e-30)[:, None]).to(out.dtype.element_ty)
    tl.store(out + to[:, None] + dims[None, :], found, mask=inside)


def cut_texts(offsets: Sequence[int], rows_per_tile: int) -> NDArray[np.int32]:
    """(first row of the text, its length, first token) of each tile, the longest texts first."""
    tiles = [
        (start, end - start, first)
        for start, end in zip(offsets, offsets[1:], strict=False)
        for first in range(0, end - start, rows_per_tile)
    ]
    return np.array(sorted(tiles, key=lambda tile: -tile[1]), dtype=np.int32).reshape(-1, 3)


def rows_per_tile(itemsize: int) -> int:
    """Tokens of a tile, to pass to `cut_texts`. Float32 has no tensor cores."""
    return 32 if itemsize == 4 else 64


def text_constants(num_heads: int, dim: int, itemsize: int) -> dict[str, int]:
    """Compile-time constants of the kernel, without window and cause."""
    return {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": dim,
        "ROWS": rows_per_tile(itemsize),
        "DIMS": padded(dim, 16),  # the least that tensor cores take
        "BLOCK": 32 if itemsize == 4 else 64,
        "num_warps": 4,
    }


def text_attention(qkv: Tensor, tiles: Tensor, window: int | None, *, is_causal: bool) -> Tensor:
    """Returns [num_rows, num_heads * head_dim]; rows outside all texts are undefined.

    qkv: [num_rows, 3, num_heads, head_dim], contiguous. tiles: int32 [num_tiles, 3], from
    `cut_texts`. window: tokens that a token sees to each side, None for all.
    """
    num_rows, _, num_heads, dim = qkv.shape
    require(qkv.is_contiguous(), "text_attention: rows must be contiguous.")
    out = qkv.new_empty(num_rows, num_heads * dim)
    if not runs_kernel(qkv):
        for start, length, first in tiles.tolist():
            if first == 0:
                part = slice(start, start + length)
                out[part] = reference(qkv[part], window, is_causal=is_causal)
        return out
    compiled_for = text_constants(num_heads, dim, qkv.element_size())
    _texts[tiles.shape[0], num_heads](
        qkv, tiles, out, dim**-0.5 * LOG2E, qkv.stride(0),
        WINDOW=window or 0, IS_CAUSAL=is_causal, **compiled_for,
    )  # fmt: skip
    return out


def reference(qkv: Tensor, window: int | None, *, is_causal: bool) -> Tensor:
    """Attention of one text [length, 3, num_heads, head_dim], written out in float32."""
    query, keys, values = qkv.float().permute(1, 2, 0, 3)
    places = torch.arange(len(qkv), device=qkv.device)
    distance = places[:, None] - places
    seen = distance >= 0 if is_causal else distance.abs() <= (window or len(qkv))
    scores = query @ keys.transpose(1, 2) * qkv.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    found: Tensor = (weights @ values).transpose(0, 1).reshape(len(qkv), -1).to(qkv.dtype)
    return found
