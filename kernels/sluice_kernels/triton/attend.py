"""Shared by decode and prefill: one tile of queries over a range of paged keys and values.

Online softmax (arXiv 2205.14135) in base 2. Rows of a tile are the query heads of one key/value
head, for one token or several. Each key is read once for all of them (arXiv 2305.13245).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import padded, softcapped

LOG2E = 1.4426950408889634


@triton.jit
def attend(
    acc, total, peak, query, places, pages, table, head, begin, end, scale,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, IS_EDGE: tl.constexpr,
):  # fmt: skip
    """Add the slots [begin, end) to (acc [rows, dims], total [rows], peak [rows]).

    query [rows, dims]; places [rows]: the last slot of a row. pages: the layer's cache; table: the
    sequence's blocks. scale includes log2(e), but not with SOFTCAP. IS_EDGE: some slot is hidden.
    """
    dims = tl.arange(0, query.shape[1])
    for at in range(begin, end, BLOCK):
        slots = at + tl.arange(0, BLOCK)
        blocks = tl.load(table + slots // PAGE, mask=slots < end, other=0).to(tl.int64)
        # Keys of a page lie before its values: [2, NUM_KV_HEADS, PAGE, HEAD_DIM].
        rows = ((blocks * 2 * NUM_KV_HEADS + head) * PAGE + slots % PAGE) * HEAD_DIM
        is_key = (dims < HEAD_DIM)[:, None]
        is_value = (dims < HEAD_DIM)[None, :]
        if IS_EDGE:  # what lies behind the end may be NaN, which zero times it would be too
            is_key = is_key & (slots < end)[None, :]
            is_value = is_value & (slots < end)[:, None]
        keys = tl.load(pages + rows[None, :] + dims[:, None], mask=is_key, other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1) * (SOFTCAP * 1.4426950408889634)
        if IS_EDGE:
            seen = slots[None, :] <= places[:, None]
            if WINDOW > 0:
                seen = seen & (slots[None, :] > places[:, None] - WINDOW)
            scores = tl.where(seen, scores, -1.0e30)
        highest = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - highest)
        weights = tl.exp2(scores - highest[:, None])
        at_values = pages + NUM_KV_HEADS * PAGE * HEAD_DIM + rows[:, None] + dims[None, :]
        values = tl.load(at_values, mask=is_value, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        peak = highest
    return acc, total, peak


class Pages(NamedTuple):
    """The sizes of a cache that a kernel's code depends on; itemsize: bytes of one number."""

    num_kv_heads: int
    size: int
    dim: int
    itemsize: int

    @property
    def key_bytes(self) -> int:
        """Bytes of one key, padded: a block holds fewer wide keys."""
        return padded(self.dim) * self.itemsize


def pages_of(cache: Tensor) -> Pages:
    """The sizes of a cache [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
    _, _, num_kv_heads, size, dim = cache.shape
    return Pages(num_kv_heads, size, dim, cache.element_size())


def constants(group: int, pages: Pages) -> dict[str, int]:
    """Compile-time constants of both kernels; group: query heads for each key/value head."""
    return {
        "NUM_KV_HEADS": pages.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": pages.dim,
        "PAGE": pages.size,
        "DIMS": padded(pages.dim, 16),  # the least that tensor cores take
        "BLOCK": 64 // max(pages.key_bytes // 256, 1),
    }


def reference(
    query: Tensor,
    cache: Tensor,
    table: Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the tokens at start, start + 1 ... of one sequence, written out in float32.

    query [count, num_heads, head_dim]; cache [num_blocks, 2, num_kv_heads, block_size, head_dim],
    which holds their own keys and values; table [num_pages]. Returns query's shape and dtype.
    """
    count, num_heads, _ = query.shape
    table = table[: -(-(start + count) // cache.shape[3])]
    found = cache[table.long()].float().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : start + count]
    keys, values = found.repeat_interleave(num_heads // cache.shape[2], dim=1)
    scores = torch.einsum("thd,hsd->hts", query.float(), keys) * scale
    scores = softcapped(scores, softcap)
    places = torch.arange(start, start + count, device=query.device)[:, None]
    slots = torch.arange(start + count, device=query.device)
    hidden = slots > places
    if window is not None:
        hidden |= slots <= places - window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hts,hsd->thd", weights, values).to(query.dtype)
