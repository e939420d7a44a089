"""Causal attention of one sequence's chunk over its paged past and itself: the plain reference."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .gather_kv import gather_kv


def causal_bias(start: int, count: int, num_slots: int, like: Tensor) -> Tensor:
    """0 where the token at start + row may look at a slot and -inf elsewhere: [count, num_slots].

    Slots after the chunk's last token, in its last page, are hidden by the same comparison.
    """
    slots = torch.arange(num_slots, device=like.device)
    last_seen = torch.arange(start, start + count, device=like.device)
    bias = torch.zeros((count, num_slots), dtype=like.dtype, device=like.device)
    return bias.masked_fill_(slots > last_seen[:, None], float("-inf"))


def prefill_attention(
    query: Tensor, kv: Tensor, cache: Tensor, rows: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    """Returns [count, num_heads * head_dim].

    query [count, num_heads, head_dim]; kv [count, 2, num_kv_heads, head_dim], the chunk's own,
    already in the cache. A chunk at the sequence's start (rows and bias None) attends to itself
    alone, without the cache; any other goes over the pages `rows` with the `causal_bias`.
    """
    count = query.shape[0]
    if rows is None:
        keys, values = kv.permute(1, 2, 0, 3).unsqueeze(1)
    else:
        keys, values = gather_kv(cache, rows, 1)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=bias,
        is_causal=rows is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).reshape(count, -1)
