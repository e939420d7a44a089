"""From the rows of texts to one vector each, as `sluice_core.model.sentence` reads it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from sluice_core.model.sentence import Dense, DenseActivation, Pooling, Sentence
from torch import Tensor
from torch.nn.functional import gelu, linear, normalize, relu, silu

from ..models.linear import Linear, ReadTensor, read_linear
from .texts import FlatTexts

_ACTIVATIONS: Mapping[DenseActivation, Callable[[Tensor], Tensor]] = {
    "Identity": lambda rows: rows,
    "Tanh": torch.tanh,
    "ReLU": relu,
    "GELU": gelu,
    "SiLU": silu,
    "Sigmoid": torch.sigmoid,
}
ReadFolder = Callable[[str], ReadTensor]
"""The tensors of a folder of the checkpoint."""


@dataclass(frozen=True, slots=True)
class PooledRows:
    """The rows that count, float32, and the text of each. `places`: of a row, from 1."""

    rows: Tensor
    owners: Tensor
    places: Tensor
    num_texts: int

    def sum(self, rows: Tensor) -> Tensor:
        """The sum of the `rows` of each text."""
        return rows.new_zeros(self.num_texts, rows.shape[-1]).index_add_(0, self.owners, rows)

    @property
    def counts(self) -> Tensor:
        """Rows of each text, [num_texts, 1]; 1 for none."""
        found = torch.bincount(self.owners, minlength=self.num_texts)
        return found.clamp(min=1)[:, None].float()


class Pooler:
    """Makes a vector of each text."""

    def __init__(self, sentence: Sentence, read: ReadFolder) -> None:
        self._sentence = sentence
        self._behind = [_read_dense(layer, read) for layer in sentence.behind]

    def __call__(self, hidden: Tensor, texts: FlatTexts) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_texts, width]."""
        starts = torch.tensor(texts.offsets, device=hidden.device)
        skipped = texts.skipped if not self._sentence.include_prompt else None
        first = starts[:-1]
        rows, owners, places = hidden.float(), texts.owners, texts.positions + 1
        if skipped is not None:
            left = texts.positions >= skipped[owners]
            rows, owners, places = rows[left], owners[left], places[left]
            ends = first + skipped
            first = torch.where(ends < starts[1:], ends, first)
        pooled = PooledRows(rows, owners, places, len(texts.lengths))
        last = starts[1:] - 1
        parts = [
            self._part(mode, pooled, hidden[first].float(), hidden[last].float())
            for mode in self._sentence.modes
        ]
        found = torch.cat(parts, dim=-1)
        for step in self._behind:
            found = step(found)
        return found

    def _part(self, mode: Pooling, pooled: PooledRows, first: Tensor, last: Tensor) -> Tensor:
        match mode:
            case "cls":
                return first
            case "lasttoken":
                return last
            case "max":
                worst = pooled.rows.new_full((pooled.num_texts, pooled.rows.shape[-1]), -torch.inf)
                owners = pooled.owners[:, None].expand_as(pooled.rows)
                return worst.scatter_reduce_(0, owners, pooled.rows, reduce="amax")
            case "mean":
                return pooled.sum(pooled.rows) / pooled.counts
            case "mean_sqrt_len_tokens":
                return pooled.sum(pooled.rows) / pooled.counts.sqrt()
            case "weightedmean":
                weights = pooled.places[:, None].float()
                return pooled.sum(pooled.rows * weights) / pooled.sum(weights).clamp(min=1e-9)


def _read_dense(layer: Dense | None, read: ReadFolder) -> Callable[[Tensor], Tensor]:
    if layer is None:
        return partial(normalize, p=2.0, dim=-1)
    part = read_linear(read(layer.folder), "linear", layer.num_out, layer.num_in, layer.has_bias)
    return partial(_dense, part, _ACTIVATIONS[layer.activation])


def _dense(part: Linear, activation: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    bias = None if part.bias is None else part.bias.float()
    return activation(linear(rows, part.weight.float(), bias))
