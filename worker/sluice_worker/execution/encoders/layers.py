"""The layers of an encoder: attention and MLP, on the rows of texts or images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate

import torch
from sluice_core.model.encoders import Activation, EncoderShape
from sluice_kernels.interface import AttendsTexts, Kernels, NormsTexts, Projection
from torch import Tensor
from torch.nn.functional import (
    gelu,
    layer_norm,
    pad,
    relu,
    scaled_dot_product_attention,
    silu,
)

from ..models.linear import Linear, ReadTensor, activated, fuse, made, read_linear, wide
from .texts import EqualLengths

Attend = Callable[[Tensor, int | None], Tensor]
"""(qkv [num_rows, 3, num_heads, head_dim], window) -> rows [num_rows, num_heads * head_dim]."""
ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_new": partial(gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "quick_gelu": lambda rows: rows * torch.sigmoid(1.702 * rows),
    "relu": relu,
    "silu": silu,
}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """weight, bias [width]; None for no bias. `own`: kernels that know it, in float32."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    own: NormsTexts | None

    def __call__(self, rows: Tensor, added: Tensor | None = None) -> Tensor:
        """The norm of rows + added, both [num_rows, width]."""
        if self.own is not None:
            return self.own.layer_norm(rows, added, self.weight, self.bias, self.eps)
        rows = rows if added is None else rows + added
        return layer_norm(rows, rows.shape[-1:], self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One layer. `attention_norm` is None in front of ModernBERT's first one. `up` is activated,
    unless it is gated. `is_sliding`: its tokens see a window."""

    attention_norm: LayerNorm | None
    qkv: Projection
    output: Projection
    mlp_norm: LayerNorm
    up: Projection
    down: Projection
    is_sliding: bool


@dataclass(frozen=True)
class Seen:
    """What all layers of a step share. `rotary`: complex64 [num_rows, 1, 1, head_dim / 2], for
    layers that see all and for sliding ones. `biases`: for the scores of each group."""

    groups: list[EqualLengths]
    rotary: tuple[Tensor, Tensor] | None = None
    biases: list[Tensor] | None = None

    @cached_property
    def offsets(self) -> Tensor:
        """First row of each text, and the number of rows, int64 on the CPU."""
        lengths = [group.length for group in self.groups for _ in range(group.num_texts)]
        return torch.tensor([0, *accumulate(lengths)])


def read_norm(shape: EncoderShape, read: ReadTensor, name: str, kernels: Kernels) -> LayerNorm:
    """A norm of a model's rows."""
    size = (shape.hidden_size,)
    weight = read(f"{name}.weight", size)
    bias = read(f"{name}.bias", size) if shape.norm_bias else None
    if not isinstance(kernels, NormsTexts):
        return LayerNorm(weight, bias, shape.norm_eps, None)
    return LayerNorm(
        weight.float(), None if bias is None else bias.float(), shape.norm_eps, kernels
    )


class Layers:
    """All layers of a model, and the norm behind them."""

    def __init__(self, shape: EncoderShape, read: ReadTensor, kernels: Kernels) -> None:
        self._shape, self._kernels = shape, kernels
        self._activation = ACTIVATIONS[shape.activation]
        self._layers = [self._read_layer(read, number) for number in range(shape.num_layers)]
        name = shape.family.final_norm
        self._final = read_norm(shape, read, name, kernels) if name else None

    def __call__(self, rows: Tensor, seen: Seen) -> Tensor:
        """rows [num_rows, hidden_size] -> the same of the last layer."""
        num_rows = len(rows)
        added = self._kernels.round_rows(num_rows) - num_rows
        if added:
            rows = pad(rows, (0, 0, 0, added))
        attend = self._attending(seen, rows)
        run = self._pre_norm if self._shape.family.pre_norm else self._post_norm
        for layer in self._layers:
            rows = run(layer, rows, seen, attend)
        rows = rows[:num_rows]
        return rows if self._final is None else self._final(rows)

    def _attending(self, seen: Seen, rows: Tensor) -> Attend:
        """The attention of a step."""
        kernels, is_causal = self._kernels, self._shape.family.is_causal
        is_even = self._shape.head_dim % 2 == 0
        if not isinstance(kernels, AttendsTexts) or seen.biases is not None or not is_even:
            return partial(_in_groups, seen, is_causal)
        plan = kernels.plan_texts(seen.offsets, rows)
        return lambda qkv, window: kernels.text_attention(qkv, plan, window, is_causal=is_causal)

    def _post_norm(self, layer: EncoderLayer, rows: Tensor, seen: Seen, attend: Attend) -> Tensor:
        assert layer.attention_norm is not None
        rows = layer.attention_norm(rows, self._attention(layer, rows, seen, attend))
        return layer.mlp_norm(rows, self._mlp(layer, rows))

    def _pre_norm(self, layer: EncoderLayer, rows: Tensor, seen: Seen, attend: Attend) -> Tensor:
        normed = rows if layer.attention_norm is None else layer.attention_norm(rows)
        rows = rows + self._attention(layer, normed, seen, attend)
        return rows + self._mlp(layer, layer.mlp_norm(rows))

    def _mlp(self, layer: EncoderLayer, rows: Tensor) -> Tensor:
        up = layer.up(rows)
        if self._shape.family.names.gated:
            first, second = up.chunk(2, dim=-1)
            return layer.down(self._activation(first) * second)
        return layer.down(up)

    def _attention(self, layer: EncoderLayer, rows: Tensor, seen: Seen, attend: Attend) -> Tensor:
        shape, window = self._shape, None
        qkv = layer.qkv(rows).view(len(rows), 3, shape.num_heads, shape.head_dim)
        if seen.rotary is not None:
            qkv = _rotated(qkv, seen.rotary[layer.is_sliding])
        if layer.is_sliding and shape.rotary is not None:
            window = shape.rotary.window
        return layer.output(attend(qkv, window))

    def _read_layer(self, read: ReadTensor, number: int) -> EncoderLayer:
        shape, names, kernels = self._shape, self._shape.family.names, self._kernels
        hidden, width = shape.hidden_size, shape.intermediate_size
        prefix = names.layer.format(number)
        rows = 3 * hidden // len(names.qkv)
        attention, mlp = shape.attention_bias, shape.mlp_bias
        qkv = [read_linear(read, prefix + name, rows, hidden, attention) for name in names.qkv]
        output = read_linear(read, prefix + names.output, hidden, hidden, attention)
        num_up = width * (2 if names.gated and names.gate is None else 1)
        up = read_linear(read, prefix + names.up, num_up, hidden, mlp)
        if names.gate is not None:
            up = fuse([read_linear(read, prefix + names.gate, width, hidden, mlp), up])
        down = read_linear(read, prefix + names.down, hidden, width, mlp)
        if names.scales is not None:
            first, second = (read(prefix + name, (hidden,)) for name in names.scales)
            output, down = _scaled(output, first), _scaled(down, second)
        has_norm = shape.family.first_norm or number > 0
        return EncoderLayer(
            read_norm(shape, read, prefix + names.attention_norm, kernels) if has_norm else None,
            wide(kernels, fuse(qkv)),
            made(kernels, output),
            read_norm(shape, read, prefix + names.mlp_norm, kernels),
            made(kernels, up)
            if names.gated
            else activated(kernels, up, shape.activation, self._activation),
            made(kernels, down),
            shape.rotary is not None and number in shape.rotary.sliding_layers,
        )


def _in_groups(seen: Seen, is_causal: bool, qkv: Tensor, window: int | None) -> Tensor:
    """Plain torch: texts of one length share a product."""
    num_rows, _, num_heads, head_dim = qkv.shape
    out = qkv.new_zeros(num_rows, num_heads, head_dim)
    biases: Sequence[Tensor | None] = seen.biases or [None] * len(seen.groups)
    for group, bias in zip(seen.groups, biases, strict=True):
        mask = bias if window is None else _near(group.length, window, qkv.device)
        parts = qkv[group.rows].view(group.num_texts, group.length, *qkv.shape[1:])
        q, k, v = parts.permute(2, 0, 3, 1, 4)  # [num_texts, num_heads, length, head_dim]
        found = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        out[group.rows] = found.transpose(1, 2).flatten(0, 1)
    return out.flatten(1)


def _near(length: int, window: int, device: torch.device) -> Tensor | None:
    """True where a token sees another; None where each sees all."""
    if length <= window + 1:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= window


def _scaled(part: Linear, factors: Tensor) -> Linear:
    """`part` with each of its outputs times a factor [out]."""
    factors, weight = factors.float(), part.weight
    bias = None if part.bias is None else (part.bias.float() * factors).to(weight.dtype)
    return Linear((weight.float() * factors[:, None]).to(weight.dtype), bias)


def _rotated(qkv: Tensor, turned: Tensor) -> Tensor:
    """Queries and keys turned: dimension i with i + head_dim / 2."""
    both = qkv[:, :2].float()
    half = both.shape[-1] // 2
    pairs = torch.complex(both[..., :half], both[..., half:]) * turned
    found = torch.cat([pairs.real, pairs.imag], dim=-1).to(qkv.dtype)
    return torch.cat([found, qkv[:, 2:]], dim=1)
