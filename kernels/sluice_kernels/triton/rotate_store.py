"""Norm and rotation of queries and keys, and keys and values into their slots: one pass.

Keys go from registers to their page; they are written nowhere else.
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import rms_norm

from .attend import Pages, pages_of
from .common import padded, require, runs_kernel


@triton.jit
def _rotate_store(
    heads, rotary, norm, pages, blocks, slots, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, :, None]
    at = 2 * pair + tl.arange(0, 2)[None, None, :]  # [ROWS, PAIRS, 2], so that loads are wide
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (at < HEAD_DIM)
    turning = head < NUM_HEADS + NUM_KV_HEADS
    place = heads + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM + at
    found = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        square = tl.sum(tl.sum(found * found, 2), 1)[:, None, None] / HEAD_DIM
        weight = tl.load(norm + head * HEAD_DIM + at, mask=inside & turning, other=1.0)
        found *= tl.where(turning, tl.rsqrt(square + eps) * weight.to(tl.float32), 1.0)
    one = (at % 2 == 0).to(tl.float32)  # no turn at all, which is what values get
    turn = tl.load(rotary + token * HEAD_DIM + at, mask=(at < HEAD_DIM) & turning, other=0.0)
    cos, sin = tl.split(tl.where(turning, turn, one))
    x, y = tl.split(found)
    turned = tl.join(x * cos - y * sin, x * sin + y * cos).to(heads.dtype.element_ty)
    tl.store(place, turned, mask=inside & (head < NUM_HEADS))
    block = tl.load(blocks + token)
    row = (block * 2 * NUM_KV_HEADS + head - NUM_HEADS) * PAGE + tl.load(slots + token)
    if block >= 0:
        tl.store(pages + row * HEAD_DIM + at, turned, mask=inside & (head >= NUM_HEADS))


def rotate_store(
    heads: Tensor,
    rotary: Tensor,
    norm: Tensor | None,
    eps: float,
    cache: Tensor,
    blocks: Tensor,
    slots: Tensor,
    num_heads: int,
) -> None:
    """Rotate the queries in `heads` in place; store rotated keys, and values, in `cache`.

    heads: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]. rotary: complex64 [num_tokens, 1,
    head_dim / 2]. norm: [num_heads + num_kv_heads, head_dim], factors of queries and keys after a
    root-mean-square norm, or None. blocks, slots: [num_tokens] int64, a token's place in the cache;
    block -1 stores nothing. Afterwards only the queries in `heads` are valid.
    """
    num_tokens, all_heads, dim = heads.shape
    require(all_heads == num_heads + 2 * cache.shape[2], "rotate_store: heads are q, k and v.")
    require(heads.is_contiguous() and rotary.is_contiguous(), "rotate_store: rows contiguous.")
    if not runs_kernel(heads):
        reference(heads, rotary, norm, eps, cache, blocks, slots, num_heads)
        return
    constants = rotate_constants(num_heads, pages_of(cache), norm is not None)
    _rotate_store[num_tokens, -(-all_heads // constants["ROWS"])](
        heads, torch.view_as_real(rotary), heads if norm is None else norm, cache, blocks, slots,
        eps,
        **constants,
    )  # fmt: skip


@lru_cache
def rotate_constants(num_heads: int, pages: Pages, has_norm: bool) -> Mapping[str, int]:
    """Compile-time constants of the kernel: a program takes heads of 512 elements together."""
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": pages.num_kv_heads,
        "HEAD_DIM": pages.dim,
        "PAGE": pages.size,
        "ROWS": padded(max(512 // pages.dim, 1)),
        "PAIRS": padded(pages.dim // 2),
        "HAS_NORM": has_norm,
        "num_warps": 2,
    }


def reference(
    heads: Tensor,
    rotary: Tensor,
    norm: Tensor | None,
    eps: float,
    cache: Tensor,
    blocks: Tensor,
    slots: Tensor,
    num_heads: int,
) -> None:
    """Do the same in torch, except that `heads` also gets the rotated keys."""
    turning = heads[:, : num_heads + cache.shape[2]].float()
    if norm is not None:
        turning = rms_norm(turning, turning.shape[-1:], None, eps) * norm
    pairs = torch.view_as_complex(turning.view(*turning.shape[:-1], -1, 2))
    heads[:, : num_heads + cache.shape[2]] = torch.view_as_real(pairs * rotary).flatten(-2)
    kept = blocks >= 0
    kv = heads[kept, num_heads:].view(-1, 2, *cache.shape[2:3], heads.shape[2])
    cache[blocks[kept], :, :, slots[kept]] = kv
