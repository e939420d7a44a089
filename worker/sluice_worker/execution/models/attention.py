"""Attention over paged keys and values, with options for the architectures' differences."""

from dataclasses import dataclass

import torch
from sluice_kernels.interface import Heads, Kernels, Projection
from torch import Tensor

from .config import DecoderConfig
from .linear import Linear, ReadTensor, fuse, made, read_linear, split
from .norm import read_norm_weight
from .rotary import interleave_halves
from .step import StepInput


@dataclass(frozen=True, slots=True)
class Attention:
    """qkv: queries, keys and values of all heads, with a head's rotary dimensions interleaved."""

    qkv: Projection
    output: Projection
    heads: Heads
    kernels: Kernels

    def __call__(
        self,
        rows: Tensor,
        rotary: Tensor,
        cache: Tensor,
        step: StepInput,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """rows [num_rows, hidden_size] -> the same, or those `wanted`; keys and values of all
        tokens go to `cache`."""
        qkv = self.qkv(rows).view(rows.shape[0], -1, self.heads.head_dim)
        slot_mapping = (step.blocks, step.slots)
        self.kernels.rope_and_store(qkv[: len(step.slots)], rotary, self.heads, cache, slot_mapping)
        if wanted is not None and not len(wanted):  # a chunk that ends no prompt
            return self.output(rows.new_empty(0, self.heads.num_heads * self.heads.head_dim))
        seen = self.kernels.attention(qkv, self.heads, cache, step.plan)
        return self.output(seen if wanted is None else seen[wanted])


def read_attention(
    config: DecoderConfig, index: int, read: ReadTensor, kernels: Kernels
) -> Attention:
    """The attention of a layer."""
    shape, name = config.shape, f"model.layers.{index}.self_attn."
    query = shape.num_heads * shape.head_dim
    output = read_linear(read, name + "o_proj", shape.hidden_size, query, shape.output_bias)
    heads = Heads(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=config.attention_scale,
        softcap=shape.attention_softcap,
        window=shape.window(index),
        norm=_read_head_norm(config, name, read) if shape.family.qk_norm else None,
        norm_eps=config.norm_eps,
    )
    qkv = made(kernels, _read_qkv(config, name, read))
    return Attention(qkv, made(kernels, output), heads, kernels)


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
