"""Attention of one new token per sequence over its paged keys and values: the plain reference."""

import torch
from torch import Tensor

from .gather_kv import gather_kv


def padding_bias(
    lengths: Tensor,
    num_slots: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """0 at slots of visible tokens, -inf elsewhere.

    lengths [num_seqs] int64. `window`: only the last `window` tokens are visible; None: all.
    Returns [num_seqs * num_kv_heads, 1, num_slots].
    """
    slots = torch.arange(num_slots, device=lengths.device)
    hidden = slots >= lengths[:, None]
    if window is not None:
        hidden |= slots < lengths[:, None] - window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=lengths.device)
    bias.masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(num_kv_heads, dim=0).unsqueeze(1)


def decode_attention(
    query: Tensor,
    cache: Tensor,
    rows: Tensor,
    bias: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Returns [num_seqs, num_heads * head_dim].

    query [num_seqs, num_heads, head_dim]; cache [num_blocks, 2, num_kv_heads, block_size,
    head_dim]; rows of `page_rows`; bias of `padding_bias` with num_slots = num_pages * block_size.
    `softcap`: a tanh keeps scores within plus and minus this.
    The query heads of one key/value head are the rows of one small matrix product.
    """
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape[2]
    keys, values = gather_kv(cache, rows, num_seqs)
    grouped = query.reshape(num_seqs * num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = keys.reshape(num_seqs * num_kv_heads, -1, head_dim).transpose(1, 2)
    if softcap is None:
        scores = torch.baddbmm(bias, grouped, keys, alpha=scale)
    else:
        scores = torch.bmm(grouped, keys).float().mul_(scale / softcap).tanh_().mul_(softcap)
        scores += bias
    # Softmax in float32 whatever the dtype, as transformers does.
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    out = torch.bmm(weights, values.reshape(num_seqs * num_kv_heads, -1, head_dim))
    return out.reshape(num_seqs, num_heads * head_dim)
