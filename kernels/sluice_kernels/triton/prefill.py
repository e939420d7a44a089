"""Causal attention of chunks of several sequences over their pages, in tiles of queries.

A tile is a few tokens of one chunk with all query heads of one key/value head. The host knows every
chunk, so it cuts the tiles, and no program searches for its sequence.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .attend import LOG2E, Pages, attend, constants, pages_of, reference
from .common import padded, require, runs_kernel


@triton.jit(do_not_specialize=["table_stride"])
def _prefill(
    query, pages, tables, tiles, out, scale, query_stride, table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(1), tiles + tl.program_id(0) * 4
    table = tables + tl.load(tile).to(tl.int64) * table_stride
    first_token, start, count = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    token, heads = rows // GROUP, head * GROUP + rows % GROUP
    inside = (token < count)[:, None] & (dims < HEAD_DIM)[None, :]
    token_row = (first_token + token).to(tl.int64)
    at = (token_row * query_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    packed = tl.load(query + at, mask=inside, other=0.0)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), -1.0e30, tl.float32)
    places = start + token
    # Up to the tile's first token every row sees every slot, unless a window hides some.
    begin, middle = 0, (start + 1) // BLOCK * BLOCK
    if WINDOW > 0:
        begin = tl.maximum(start + 1 - WINDOW, 0) // BLOCK * BLOCK
        middle = begin
    else:
        acc, total, peak = attend(
            acc, total, peak, packed, places, pages, table, head, begin, middle, scale,
            NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK, WINDOW, SOFTCAP, False,
        )  # fmt: skip
    acc, total, peak = attend(
        acc, total, peak, packed, places, pages, table, head, middle, start + count, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    to = (token_row * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    found = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + to[:, None] + dims[None, :], found, mask=inside)


def cut_tiles(
    chunks: Sequence[tuple[int, int, int, int]], tokens_per_tile: int
) -> NDArray[np.int32]:
    """The same four numbers for each tile of each chunk, those with most to read first.

    chunks: (row of `tables`, first row of the query, position of that token, number of tokens).
    """
    tiles = [
        (table, row + done, start + done, min(tokens_per_tile, count - done))
        for table, row, start, count in chunks
        for done in range(0, count, tokens_per_tile)
    ]
    return np.array(sorted(tiles, key=lambda tile: -tile[2]), dtype=np.int32).reshape(-1, 4)


def tile_tokens(group: int, cache: Tensor) -> int:
    """Tokens of one tile, to pass to `cut_tiles` for `prefill` with this cache."""
    return prefill_constants(group, pages_of(cache))["ROWS"] // group


@lru_cache
def prefill_constants(group: int, pages: Pages) -> Mapping[str, int]:
    """Compile-time constants of the kernel, without window and softcap."""
    common, is_wide = constants(group, pages), pages.key_bytes > 256
    if pages.itemsize == 4:  # no tensor cores: products are made in registers
        small = {"ROWS": padded(group, 32), "BLOCK": 16}
        return common | small | {"num_warps": 8, "num_stages": 2}
    return common | {
        "ROWS": padded(group, 64 if is_wide else 128),
        "num_warps": 4 if is_wide else 8,
        "num_stages": 3 if is_wide else 2,  # two programs fit on an H100's processor
    }


def prefill(
    query: Tensor,
    tiles: Tensor,
    cache: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Returns [num_tokens, num_heads * head_dim]; rows outside all tiles are undefined.

    query: [num_tokens, num_heads, head_dim], rows of any stride. tiles: [num_tiles, 4] int32, from
    `cut_tiles`. cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]; it already holds the
    chunks' own keys and values. tables: [num_seqs, num_pages] int32.
    """
    num_tokens, num_heads, dim = query.shape
    require(query.stride(1) == dim and query.stride(2) == 1, "prefill: heads must be contiguous.")
    require(tables.stride(1) == 1 and cache.is_contiguous(), "prefill: pages must be contiguous.")
    compiled_for = prefill_constants(num_heads // cache.shape[2], pages_of(cache))
    out = query.new_empty(num_tokens, num_heads * dim)
    if not runs_kernel(query):
        for row, first, start, count in tiles.tolist():
            given = (cache, tables[row], start, scale, window, softcap)
            part = slice(first, first + count)
            out[part] = reference(query[part], *given).flatten(1)
        return out
    _prefill[tiles.shape[0], cache.shape[2]](
        query, cache, tables, tiles, out,
        scale if softcap else scale * LOG2E, query.stride(0), tables.stride(0),
        WINDOW=window or 0, SOFTCAP=softcap or 0.0, **compiled_for,
    )  # fmt: skip
    return out
