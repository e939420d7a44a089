"""The encoder of texts: embeddings, and what its layers see, on rows of texts of any lengths."""

import math

import torch
from sluice_core.model.encoders import EncoderShape
from sluice_kernels.interface import Kernels
from torch import Tensor
from torch.nn.functional import pad

from ..models.linear import ReadTensor
from ..models.rope import Rope
from ..models.rotary import read_rotary
from .layers import Layers, Seen, read_norm
from .texts import FlatTexts

MAX_DISTANCE = 128
"""Tokens from which on MPNet's bias tells no distances apart."""


class Encoder:
    """A loaded model."""

    def __init__(self, shape: EncoderShape, read: ReadTensor, kernels: Kernels) -> None:
        self.shape, self._kernels = shape, kernels
        family, hidden = shape.family, shape.hidden_size
        self._words = read(f"{family.words}.weight", (shape.vocab_size, hidden))
        self._positions = self._types = self._bias = self._norm = None
        if family.positions:
            num_rows = shape.max_position + family.first_position
            self._positions = read(f"{family.positions}.weight", (num_rows, hidden))
        if family.types:
            self._types = read(f"{family.types}.weight", (shape.type_vocab_size, hidden))
        if family.relative_bias:
            size = shape.relative_buckets, shape.num_heads
            self._bias = read(f"{family.relative_bias}.weight", size)
        if family.embeddings_norm:
            self._norm = read_norm(shape, read, family.embeddings_norm, kernels)
        self._layers = Layers(shape, read, kernels)
        turning, dim = shape.rotary, shape.head_dim
        bases = (turning.theta, turning.sliding_theta) if turning is not None else ()
        self._rotaries = [read_rotary(Rope(base, dim), dim, self._words.device) for base in bases]

    def hidden(self, texts: FlatTexts) -> Tensor:
        """The last layer's output, [num_rows, hidden_size]."""
        rows = self._embedded(texts)
        return self._layers(rows if self._norm is None else self._norm(rows), self._seen(texts))

    def _embedded(self, texts: FlatTexts) -> Tensor:
        rows = self._words[texts.token_ids]
        if self._positions is not None:
            rows += self._positions[texts.positions + self.shape.family.first_position]
        if self._types is not None:
            knows_pairs = texts.kinds is not None and self.shape.type_vocab_size > 1
            rows += self._types[texts.kinds if knows_pairs else 0]
        return rows

    def _seen(self, texts: FlatTexts) -> Seen:
        groups, rotary, biases = texts.groups(), None, None
        longest, device = texts.lengths[-1], texts.token_ids.device
        if self._bias is not None:
            bias = self._bias[_buckets(longest, self.shape.relative_buckets, device)]
            whole = bias.permute(2, 0, 1)  # [num_heads, longest, longest]
            biases = [whole[:, : group.length, : group.length] for group in groups]
        if self.shape.rotary is not None:
            added = self._kernels.round_rows(len(texts.positions)) - len(texts.positions)
            positions = pad(texts.positions, (0, added))
            full, sliding = (each.at(positions).unsqueeze(1) for each in self._rotaries)
            rotary = full, sliding
        return Seen(groups, rotary, biases)


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
