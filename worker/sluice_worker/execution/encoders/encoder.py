"""The encoder: embeddings, layers of attention and MLP, on rows of texts of any lengths."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from sluice_core.model.encoders import Activation, EncoderShape
from sluice_kernels.interface import Kernels, Projection
from torch import Tensor
from torch.nn.functional import (
    gelu,
    layer_norm,
    pad,
    relu,
    scaled_dot_product_attention,
    silu,
)

from ..models.linear import ReadTensor, fuse, made, read_linear
from ..models.rope import Rope
from ..models.rotary import read_rotary
from .texts import EqualLengths, FlatTexts

MAX_DISTANCE = 128
"""Tokens from which on MPNet's bias tells no distances apart."""
_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "silu": silu,
}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight, bias [width]; None for no bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return layer_norm(rows, rows.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer. `attention_norm` is None in front of ModernBERT's first one. `is_sliding`: its
    tokens see a window."""

    attention_norm: LayerNorm | None
    qkv: Projection
    output: Projection
    mlp_norm: LayerNorm
    up: Projection
    down: Projection
    is_sliding: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """What all layers of a step share. `rotary`: complex64 [num_rows, 1, 1, head_dim / 2], for
    layers that see all and for sliding ones. `biases`, `windows`: for the scores of each group."""

    groups: list[EqualLengths]
    rotary: tuple[Tensor, Tensor] | None
    biases: list[Tensor | None]
    windows: list[Tensor | None]


class Encoder:
    """A loaded model."""

    def __init__(self, shape: EncoderShape, read: ReadTensor, kernels: Kernels) -> None:
        self.shape, self._kernels = shape, kernels
        family, hidden = shape.family, shape.hidden_size
        self._words = read(f"{family.words}.weight", (shape.vocab_size, hidden))
        self._positions = self._types = self._bias = None
        if family.positions:
            num_rows = shape.max_position + family.first_position
            self._positions = read(f"{family.positions}.weight", (num_rows, hidden))
        if family.types:
            self._types = read(f"{family.types}.weight", (shape.type_vocab_size, hidden))
        if family.relative_bias:
            size = shape.relative_buckets, shape.num_heads
            self._bias = read(f"{family.relative_bias}.weight", size)
        self._norm = self._read_norm(read, family.embeddings_norm)
        self._layers = [self._read_layer(read, number) for number in range(shape.num_layers)]
        self._final = self._read_norm(read, family.final_norm) if family.final_norm else None
        self._activation = _ACTIVATIONS[shape.activation]
        turning, dim = shape.rotary, shape.head_dim
        bases = (turning.theta, turning.sliding_theta) if turning is not None else ()
        self._rotaries = [read_rotary(Rope(base, dim), dim, self._words.device) for base in bases]

    def hidden(self, texts: FlatTexts) -> Tensor:
        """The last layer's output, [num_rows, hidden_size]."""
        num_rows = len(texts.token_ids)
        rows = self._norm(self._embedded(texts))
        added = self._kernels.round_rows(num_rows) - num_rows
        if added:
            rows = pad(rows, (0, 0, 0, added))
        seen = self._seen(texts)
        run = self._pre_norm if self.shape.family.pre_norm else self._post_norm
        for layer in self._layers:
            rows = run(layer, rows, seen)
        rows = rows[:num_rows]
        return rows if self._final is None else self._final(rows)

    def _embedded(self, texts: FlatTexts) -> Tensor:
        rows = self._words[texts.token_ids]
        if self._positions is not None:
            rows += self._positions[texts.positions + self.shape.family.first_position]
        if self._types is not None:
            knows_pairs = texts.kinds is not None and self.shape.type_vocab_size > 1
            rows += self._types[texts.kinds if knows_pairs else 0]
        return rows

    def _post_norm(self, layer: EncoderLayer, rows: Tensor, seen: Seen) -> Tensor:
        assert layer.attention_norm is not None
        rows = layer.attention_norm(rows + self._attention(layer, rows, seen))
        return layer.mlp_norm(rows + layer.down(self._activation(layer.up(rows))))

    def _pre_norm(self, layer: EncoderLayer, rows: Tensor, seen: Seen) -> Tensor:
        normed = rows if layer.attention_norm is None else layer.attention_norm(rows)
        rows = rows + self._attention(layer, normed, seen)
        up = layer.up(layer.mlp_norm(rows))
        if self.shape.family.names.gated:
            first, second = up.chunk(2, dim=-1)
            return rows + layer.down(self._activation(first) * second)
        return rows + layer.down(self._activation(up))

    def _attention(self, layer: EncoderLayer, rows: Tensor, seen: Seen) -> Tensor:
        shape = self.shape
        qkv = layer.qkv(rows).view(len(rows), 3, shape.num_heads, shape.head_dim)
        if seen.rotary is not None:
            qkv = _rotated(qkv, seen.rotary[layer.is_sliding])
        out = rows.new_zeros(len(rows), shape.num_heads, shape.head_dim)
        masks = seen.windows if layer.is_sliding else seen.biases
        for group, mask in zip(seen.groups, masks, strict=True):
            parts = qkv[group.rows].view(group.num_texts, group.length, *qkv.shape[1:])
            q, k, v = parts.permute(2, 0, 3, 1, 4)  # [num_texts, num_heads, length, head_dim]
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            out[group.rows] = found.transpose(1, 2).flatten(0, 1)
        return layer.output(out.flatten(1))

    def _seen(self, texts: FlatTexts) -> Seen:
        groups, rotary = texts.groups(), None
        longest, device = texts.lengths[-1], texts.token_ids.device
        biases: list[Tensor | None] = [None] * len(groups)
        windows = biases
        if self._bias is not None:
            bias = self._bias[_buckets(longest, self.shape.relative_buckets, device)]
            whole = bias.permute(2, 0, 1)  # [num_heads, longest, longest]
            biases = [whole[:, : group.length, : group.length] for group in groups]
        if (turning := self.shape.rotary) is not None:
            added = self._kernels.round_rows(len(texts.positions)) - len(texts.positions)
            positions = pad(texts.positions, (0, added))
            full, sliding = (each.at(positions).unsqueeze(1) for each in self._rotaries)
            rotary = full, sliding
            windows = [_window(group.length, turning.window, device) for group in groups]
        return Seen(groups, rotary, biases, windows)

    def _read_norm(self, read: ReadTensor, name: str) -> LayerNorm:
        size = (self.shape.hidden_size,)
        bias = read(f"{name}.bias", size) if self.shape.norm_bias else None
        return LayerNorm(read(f"{name}.weight", size), bias, self.shape.norm_eps)

    def _read_layer(self, read: ReadTensor, number: int) -> EncoderLayer:
        shape, names, kernels = self.shape, self.shape.family.names, self._kernels
        hidden, width = shape.hidden_size, shape.intermediate_size
        prefix = names.layer.format(number)
        rows = 3 * hidden // len(names.qkv)
        attention, mlp = shape.attention_bias, shape.mlp_bias
        qkv = [read_linear(read, prefix + name, rows, hidden, attention) for name in names.qkv]
        output = read_linear(read, prefix + names.output, hidden, hidden, attention)
        num_up = width * (2 if names.gated else 1)
        up = read_linear(read, prefix + names.up, num_up, hidden, mlp)
        down = read_linear(read, prefix + names.down, hidden, width, mlp)
        is_first = shape.family.pre_norm and number == 0
        return EncoderLayer(
            None if is_first else self._read_norm(read, prefix + names.attention_norm),
            made(kernels, fuse(qkv)),
            made(kernels, output),
            self._read_norm(read, prefix + names.mlp_norm),
            made(kernels, up),
            made(kernels, down),
            shape.rotary is not None and number in shape.rotary.sliding_layers,
        )


def _rotated(qkv: Tensor, turned: Tensor) -> Tensor:
    """Queries and keys turned: dimension i with i + head_dim / 2."""
    both = qkv[:, :2].float()
    half = both.shape[-1] // 2
    pairs = torch.complex(both[..., :half], both[..., half:]) * turned
    found = torch.cat([pairs.real, pairs.imag], dim=-1).to(qkv.dtype)
    return torch.cat([found, qkv[:, 2:]], dim=1)


def _window(length: int, window: int, device: torch.device) -> Tensor | None:
    """True where a token sees another; None where each sees all."""
    if length <= window + 1:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= window


def _buckets(length: int, num_buckets: int, device: torch.device) -> Tensor:
    """MPNet's bucket of each pair of tokens, int64 [length, length]: exact near by, then by the
    logarithm of the distance."""
    places = torch.arange(length, device=device)
    behind = places[:, None] - places  # of the query behind the key
    half = num_buckets // 2
    exact, distance = half // 2, behind.abs()
    share = torch.log(distance.float() / exact) / math.log(MAX_DISTANCE / exact)
    far = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + (behind < 0) * half
