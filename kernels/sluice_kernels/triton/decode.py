"""Attention of one new token for each sequence over its pages, split over long contexts.

A program takes one sequence, one key/value head with its query heads, and one split of the slots
(Flash-Decoding). A second kernel joins the splits. The grid fixes the number of splits, not the
lengths, so a CUDA graph serves all lengths. A sequence's length decides how many splits it uses: a
long one among short ones uses more, and a split without slots ends at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend import LOG2E, Pages, attend, constants, pages_of, reference
from .common import padded, require, runs_kernel

MIN_SPLITS, MAX_SPLITS = 8, 32
"""Range of the number of splits; in a large batch, too, a longer sequence may use `MIN_SPLITS`."""
USUAL_BLOCKS = 16
"""Blocks (64 slots each) of a usual context: no more programs read it than fill the GPU."""
PROGRAMS_PER_SM = 4
"""Programs for each processor (SM): at head_dim 128 three fit at once; more even out lengths."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The largest number of parts of a context, and the least number of blocks of a part."""

    num: int
    min_blocks: int


@triton.jit
def _shared(
    length, min_blocks, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, WINDOW: tl.constexpr
):
    """The first slot that a sequence's new token sees, and how many a split reads from there on."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    blocks = tl.cdiv(tl.cdiv(length - first, BLOCK), NUM_SPLITS)
    return first, tl.maximum(blocks, min_blocks) * BLOCK


@triton.jit(do_not_specialize=["table_stride", "min_blocks"])
def _decode(
    query, pages, tables, lengths, parts, sums, scale, query_stride, table_stride, min_blocks,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first, share = _shared(length, min_blocks, BLOCK, NUM_SPLITS, WINDOW)
    begin = first + split * share
    if begin >= length:
        return
    end = tl.minimum(begin + share, length)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIMS)
    heads = head * GROUP + rows
    inside = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    packed = tl.load(query + sequence.to(tl.int64) * query_stride + at, mask=inside, other=0.0)
    acc = tl.zeros((ROWS, DIMS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), -1.0e30, tl.float32)
    acc, total, peak = attend(
        acc, total, peak, packed, tl.zeros((ROWS,), tl.int32) + length - 1, pages,
        tables + sequence.to(tl.int64) * table_stride, head, begin, end, scale,
        NUM_KV_HEADS, HEAD_DIM, PAGE, BLOCK, WINDOW, SOFTCAP, True,
    )  # fmt: skip
    place = (sequence * NUM_KV_HEADS * GROUP + heads) * NUM_SPLITS + split
    tl.store(parts + place[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
    tl.store(sums + place * 2, total, mask=rows < GROUP)
    tl.store(sums + place * 2 + 1, peak, mask=rows < GROUP)


@triton.jit(do_not_specialize=["min_blocks"])
def _join(
    parts, sums, lengths, out, min_blocks, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths + row // NUM_HEADS)
    first, share = _shared(length, min_blocks, BLOCK, NUM_SPLITS, WINDOW)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, DIMS)
    is_used = first + splits * share < length
    places = row * NUM_SPLITS + splits
    peaks = tl.load(sums + places * 2 + 1, mask=is_used, other=-1.0e30)
    weights = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(tl.load(sums + places * 2, mask=is_used, other=0.0) * weights, 0)
    inside = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    part = tl.load(parts + places[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    found = tl.sum(part * weights[:, None], 0) / tl.maximum(total, 1.0e-30)
    tl.store(out + row * HEAD_DIM + dims, found.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def choose_splits(num_seqs: int, num_kv_heads: int, num_processors: int) -> Splits:
    """Splits: 8, 16 or 32. Usual contexts use as many as give each of the GPU's processors enough
    programs, and longer ones use more."""
    programs = num_seqs * num_kv_heads
    wanted = min(padded(-(-PROGRAMS_PER_SM * num_processors // programs)), MAX_SPLITS)
    return Splits(max(wanted, MIN_SPLITS), max(USUAL_BLOCKS // wanted, 1))


def _by_reference(
    query: Tensor,
    lengths: Tensor,
    cache: Tensor,
    tables: Tensor,
    out: Tensor,
    rest: tuple[float, int | None, float | None],
) -> Tensor:
    for row, length in enumerate(lengths.tolist()):
        given = (cache, tables[row], length - 1, *rest)
        out[row] = reference(query[row : row + 1], *given).flatten() if length else 0.0
    return out


def decode(
    query: Tensor,
    lengths: Tensor,
    cache: Tensor,
    tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    splits: Splits,
    out: Tensor | None = None,
) -> Tensor:
    """Returns [num_seqs, num_heads * head_dim], `out` if given; zeros for a row of length 0.

    query: [num_seqs, num_heads, head_dim], rows of any stride. lengths: [num_seqs] int32, the new
    token included. cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]. tables: [num_seqs
    or more, num_pages] int32, read only as far as `lengths`. splits.num: a power of two.
    """
    num_seqs, num_heads, dim = query.shape
    require(query.stride(1) == dim and query.stride(2) == 1, "decode: heads must be contiguous.")
    require(tables.stride(1) == 1 and cache.is_contiguous(), "decode: pages must be contiguous.")
    if out is None:
        out = query.new_empty(num_seqs, num_heads * dim)
    require(out.is_contiguous(), "decode: rows of the output must be contiguous.")
    if not runs_kernel(query):
        return _by_reference(query, lengths, cache, tables, out, (scale, window, softcap))
    kept = num_seqs * num_heads * splits.num
    parts = query.new_empty(kept, dim, dtype=torch.float32)
    sums = query.new_empty(kept, 2, dtype=torch.float32)
    variant = num_heads, pages_of(cache), splits.num, window, softcap
    _decode[num_seqs, cache.shape[2], splits.num](
        query, cache, tables, lengths, parts, sums,
        scale if softcap else scale * LOG2E, query.stride(0), tables.stride(0), splits.min_blocks,
        **decode_constants(*variant),
    )  # fmt: skip
    _join[num_seqs * num_heads,](
        parts, sums, lengths, out, splits.min_blocks, **join_constants(*variant)
    )
    return out


@lru_cache
def decode_constants(
    num_heads: int, pages: Pages, num_splits: int, window: int | None, softcap: float | None
) -> Mapping[str, int | float]:
    """Compile-time constants of the kernel."""
    group = num_heads // pages.num_kv_heads
    return constants(group, pages) | {
        "ROWS": padded(group, 16),
        "NUM_SPLITS": num_splits,
        "WINDOW": window or 0,
        "SOFTCAP": softcap or 0.0,
        # The fastest of 36 on an H100; in float32 so few threads need too many registers each.
        "num_warps": 2 if pages.itemsize < 4 else 4,
        "num_stages": 3 if pages.itemsize < 4 else 5,
    }


@lru_cache
def join_constants(
    num_heads: int, pages: Pages, num_splits: int, window: int | None, softcap: float | None
) -> Mapping[str, int | float]:
    """The same of the joining kernel."""
    decoded = decode_constants(num_heads, pages, num_splits, window, softcap)
    shared = ("HEAD_DIM", "DIMS", "BLOCK", "NUM_SPLITS", "WINDOW")
    return {"NUM_HEADS": num_heads} | {name: decoded[name] for name in shared}
