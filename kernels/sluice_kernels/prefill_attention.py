"""Causal attention of one sequence's chunk over its paged past and itself: the plain reference."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .gather_kv import gather_kv


def causal_bias(
    start: int, count: int, num_slots: int, like: Tensor, window: int | None = None
) -> Tensor:
    """0 where the token at start + row may see a slot and -inf elsewhere: [count, num_slots].

    `window`: tokens that a token sees, itself included. The same comparison hides slots after the
    chunk's last token in its last page.
    """
    slots = torch.arange(num_slots, device=like.device)
    last_seen = torch.arange(start, start + count, device=like.device)[:, None]
    hidden = slots > last_seen
    if window is not None:
        hidden |= slots <= last_seen - window
    bias = torch.zeros((count, num_slots), dtype=like.dtype, device=like.device)
    return bias.masked_fill_(hidden, float("-inf"))


def prefill_attention(
    query: Tensor, kv: Tensor, cache: Tensor, rows: Tensor | None, bias: Tensor | None, scale: float
) -> Tensor:
    """Returns [count, num_heads * head_dim].

    query [count, num_heads, head_dim]; kv [count, 2, num_kv_heads, head_dim], the chunk's own,
    already in the cache. A chunk at the sequence's start (rows None) attends to itself alone,
    without the cache. Any other attends to the pages `rows`. bias: from `causal_bias`; None for a
    chunk at the start whose tokens see all tokens before them.
    """
    keys, values = _context(kv, cache, rows)
    out = scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).reshape(query.shape[0], -1)


def capped_prefill_attention(
    query: Tensor,
    kv: Tensor,
    cache: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    max_scores_bytes: int,
) -> Tensor:
    """`prefill_attention` with scores kept within plus and minus `softcap` by a tanh.

    Scores are written out in float32, for as many tokens at once as `max_scores_bytes` holds.
    """
    count, num_heads, head_dim = query.shape
    keys, values = (part.squeeze(0) for part in _context(kv, cache, rows))
    num_kv_heads, num_slots = keys.shape[:2]
    tile = max(max_scores_bytes // (4 * num_heads * num_slots), 1)
    outs = []
    for begin in range(0, count, tile):
        part = query[begin : begin + tile]
        if bias is None:
            shown = causal_bias(begin, len(part), num_slots, query)
        else:
            shown = bias[begin : begin + tile]
        grouped = part.view(len(part), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = (grouped.flatten(1, 2) @ keys.transpose(1, 2)).float()
        scores.mul_(scale / softcap).tanh_().mul_(softcap)
        scores.view(num_kv_heads, -1, len(part), num_slots).add_(shown)
        out = scores.softmax(dim=-1).to(query.dtype) @ values
        outs.append(out.view(num_heads, len(part), head_dim).transpose(0, 1))
    return torch.cat(outs).reshape(count, -1)


def _context(kv: Tensor, cache: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values, each [1, num_kv_heads, num_slots, head_dim]."""
    if rows is None:
        keys, values = kv.permute(1, 2, 0, 3).unsqueeze(1)
        return keys, values
    return gather_kv(cache, rows, 1)
