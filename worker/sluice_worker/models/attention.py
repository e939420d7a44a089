"""Attention over paged keys and values, with what the architectures differ in as options."""

from dataclasses import dataclass

import torch
from sluice_kernels.decode_attention import decode_attention
from sluice_kernels.prefill_attention import capped_prefill_attention, prefill_attention
from sluice_kernels.store_kv import store_kv
from torch import Tensor
from torch.nn.functional import rms_norm

from ..sizing import MAX_SCORES_BYTES
from .config import DecoderConfig
from .linear import Linear, ReadTensor, fuse, read_linear, split
from .norm import read_norm_weight
from .rotary import interleave_halves, rotate_
from .step import PrefillSpan, StepInput


@dataclass(frozen=True, slots=True)
class Attention:
    """qkv: queries, keys and values of all heads, the turning dimensions of a head interleaved.

    head_norm: [num_heads + num_kv_heads, head_dim], what normed queries and keys are multiplied by,
    or None where they are not normed. view: which of the step's views it looks at.
    """

    qkv: Linear
    output: Linear
    head_norm: Tensor | None
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    view: int

    def __call__(self, rows: Tensor, turns: Tensor, cache: Tensor, step: StepInput) -> Tensor:
        """rows [num_tokens, hidden_size] -> the same; keys and values go to `cache`."""
        heads = self.qkv(rows).view(len(rows), -1, self.head_dim)
        turning = heads[:, : self.num_heads + self.num_kv_heads]
        if self.head_norm is not None:
            normed = rms_norm(turning.float(), (self.head_dim,), None, self.norm_eps)
            turning.copy_(normed.mul_(self.head_norm))
        rotate_(turning, turns)
        query = heads[:, : self.num_heads]
        kv = heads[:, self.num_heads :].view(-1, 2, self.num_kv_heads, self.head_dim)
        store_kv(cache, kv, step.blocks, step.slots)
        parts = []
        for group in step.decodes:
            view, part = group.views[self.view], query[group.begin : group.end]
            parts.append(
                decode_attention(part, cache, view.rows, view.bias, self.scale, self.softcap)
            )
        parts += [self._prefill(query, kv, cache, span) for span in step.prefills]
        return self.output(parts[0] if len(parts) == 1 else torch.cat(parts))

    def _prefill(self, query: Tensor, kv: Tensor, cache: Tensor, span: PrefillSpan) -> Tensor:
        view, rows = span.views[self.view], slice(span.begin, span.end)
        query, kv = query[rows], kv[rows]
        if self.softcap is None:
            return prefill_attention(query, kv, cache, view.rows, view.bias, self.scale)
        return capped_prefill_attention(
            query, kv, cache, view.rows, view.bias, self.scale, self.softcap, MAX_SCORES_BYTES
        )


def read_attention(config: DecoderConfig, index: int, read: ReadTensor) -> Attention:
    """The attention of a layer."""
    shape, name = config.shape, f"model.layers.{index}.self_attn."
    query = shape.num_heads * shape.head_dim
    qkv = _read_qkv(config, name, read)
    return Attention(
        qkv=qkv,
        output=read_linear(read, name + "o_proj", shape.hidden_size, query, shape.output_bias),
        head_norm=_read_head_norm(config, name, read) if shape.family.qk_norm else None,
        norm_eps=config.norm_eps,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=config.attention_scale,
        softcap=shape.attention_softcap,
        view=shape.windows.index(shape.window(index)),
    )


def _read_qkv(config: DecoderConfig, name: str, read: ReadTensor) -> Linear:
    shape, dims = config.shape, config.rope.dims
    hidden, has_bias = shape.hidden_size, shape.qkv_bias
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if shape.family.fused:
        fused = read_linear(read, name + "qkv_proj", query + 2 * kv, hidden, has_bias)
        parts = split(fused, (query, kv, kv))
    else:
        sizes = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        parts = [read_linear(read, name + n, sizes[n], hidden, has_bias) for n in sizes]
    turning = [_interleaved(part, shape.head_dim, dims) for part in parts[:2]]
    return fuse([*turning, parts[2]])


def _interleaved(part: Linear, head_dim: int, dims: int) -> Linear:
    bias = None if part.bias is None else interleave_halves(part.bias, head_dim, dims)
    return Linear(interleave_halves(part.weight, head_dim, dims), bias)


def _read_head_norm(config: DecoderConfig, name: str, read: ReadTensor) -> Tensor:
    shape = config.shape
    counts = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}
    return torch.cat(
        [
            interleave_halves(weight, shape.head_dim, config.rope.dims).expand(count, -1)
            for part, count in counts.items()
            for weight in [read_norm_weight(config, read, name + part, shape.head_dim)]
        ]
    )
