"""The decoder: embeddings, layers of paged attention and gated MLP, logits of the sampled rows.

Weights that read the same input are fused (q, k and v; gate and up), so that a step of a small
model, whose time is mostly the calls themselves, makes few of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sluice_kernels.decode_attention import decode_attention
from sluice_kernels.prefill_attention import prefill_attention
from sluice_kernels.store_kv import store_kv
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from .config import DecoderConfig
from .linear import Linear
from .rotary import interleave_halves, inverse_frequencies, rotate_, rotations

ReadTensor = Callable[[str, tuple[int, ...]], Tensor]
"""(name, shape) -> the tensor, on its device and in its dtype, or a typed error."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [begin, end) of the step: sequences of similar length with one new token each."""

    begin: int
    end: int
    rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows [begin, end) of the step: a chunk of one sequence. None at the sequence's start."""

    begin: int
    end: int
    rows: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class StepInput:
    """One mixed batch. All tensors but `sampled_rows` have one entry per token."""

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    slots: Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]
    sampled_rows: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A loaded model."""

    def __init__(self, config: DecoderConfig, read: ReadTensor) -> None:
        shape = config.shape
        self.config = config
        self.embedding = read("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
        self.layers = [_read_layer(config, index, read) for index in range(shape.num_layers)]
        self.norm = read("model.norm.weight", (shape.hidden_size,))
        head = self.embedding
        if not shape.tie_word_embeddings:
            head = read("lm_head.weight", (shape.vocab_size, shape.hidden_size))
        self.head = Linear(head, None)
        frequencies = inverse_frequencies(config.rope, shape.head_dim)
        self.frequencies = frequencies.to(self.embedding.device)
        self.scale = float(shape.head_dim**-0.5)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights; tied embeddings count once."""
        linears = [
            part
            for layer in self.layers
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        tensors = [self.embedding, self.norm, self.head.weight]
        tensors += [
            norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)
        ]
        tensors += [part.weight for part in linears]
        tensors += [part.bias for part in linears if part.bias is not None]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    def hidden(self, step: StepInput, caches: list[Tensor]) -> Tensor:
        """The last layer's output for every token of the step, [num_tokens, hidden_size].

        caches: per layer [num_blocks, 2, num_kv_heads, block_size, head_dim], written in place.
        """
        stream = self.embedding[step.token_ids]  # [num_tokens, hidden_size]
        turns = rotations(step.positions, self.frequencies)
        width, eps = (self.config.shape.hidden_size,), self.config.norm_eps
        for layer, cache in zip(self.layers, caches, strict=True):
            normed = rms_norm(stream, width, layer.attention_norm, eps)
            mixed = self._attend(layer, cache, normed, turns, step)
            stream += layer.output(mixed)
            normed = rms_norm(stream, width, layer.mlp_norm, eps)
            gate, up = layer.gate_up(normed).chunk(2, dim=-1)
            stream += layer.down(silu(gate).mul_(up))
        return stream

    def logits(self, hidden: Tensor) -> Tensor:
        """What `hidden` [num_rows, hidden_size] predicts, float32 [num_rows, vocab_size]."""
        last = rms_norm(hidden, (self.config.shape.hidden_size,), self.norm, self.config.norm_eps)
        return self.head(last).float()

    def _attend(
        self, layer: Layer, cache: Tensor, normed: Tensor, turns: Tensor, step: StepInput
    ) -> Tensor:
        """[num_tokens, num_heads * head_dim]."""
        shape = self.config.shape
        heads = layer.qkv(normed).view(len(normed), -1, shape.head_dim)
        rotate_(heads[:, : shape.num_heads + shape.num_kv_heads], turns)
        query = heads[:, : shape.num_heads]
        kv = heads[:, shape.num_heads :].view(-1, 2, shape.num_kv_heads, shape.head_dim)
        store_kv(cache, kv, step.blocks, step.slots)
        parts = [
            decode_attention(query[g.begin : g.end], cache, g.rows, g.bias, self.scale)
            for g in step.decodes
        ]
        parts += [
            prefill_attention(
                query[p.begin : p.end], kv[p.begin : p.end], cache, p.rows, p.bias, self.scale
            )
            for p in step.prefills
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_layer(config: DecoderConfig, index: int, read: ReadTensor) -> Layer:
    shape = config.shape
    hidden, width, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    query, kv = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    layer = f"model.layers.{index}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    qkv_parts = [(attention + "q_proj", query), (attention + "k_proj", kv)]
    rotated = _read_parts(read, qkv_parts, hidden, config.attention_bias)
    value = _read_parts(read, [(attention + "v_proj", kv)], hidden, config.attention_bias)
    return Layer(
        attention_norm=read(layer + "input_layernorm.weight", (hidden,)),
        qkv=_fuse([*(_interleaved(part, head_dim) for part in rotated), *value]),
        output=_fuse(
            _read_parts(read, [(attention + "o_proj", hidden)], query, config.attention_bias)
        ),
        mlp_norm=read(layer + "post_attention_layernorm.weight", (hidden,)),
        gate_up=_fuse(
            _read_parts(
                read,
                [(mlp + "gate_proj", width), (mlp + "up_proj", width)],
                hidden,
                config.mlp_bias,
            )
        ),
        down=_fuse(_read_parts(read, [(mlp + "down_proj", hidden)], width, config.mlp_bias)),
    )


def _read_parts(
    read: ReadTensor, parts: Sequence[tuple[str, int]], columns: int, has_bias: bool
) -> list[Linear]:
    return [
        Linear(
            read(f"{name}.weight", (rows, columns)),
            read(f"{name}.bias", (rows,)) if has_bias else None,
        )
        for name, rows in parts
    ]


def _interleaved(part: Linear, head_dim: int) -> Linear:
    bias = None if part.bias is None else interleave_halves(part.bias, head_dim)
    return Linear(interleave_halves(part.weight, head_dim), bias)


def _fuse(parts: Sequence[Linear]) -> Linear:
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
