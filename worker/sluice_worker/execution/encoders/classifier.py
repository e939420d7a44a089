"""From the rows of texts to the numbers of their classes."""

from collections.abc import Callable, Mapping

import torch
from sluice_core.model.architecture import ModelShape
from sluice_core.model.encoders import EncoderShape
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, relu

from ..models.decoder import DecoderBody
from ..models.linear import Linear, ReadTensor, read_linear
from .texts import FlatTexts

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "relu": relu,
    "tanh": torch.tanh,
}


class EncoderHead:
    """A classifier behind an encoder: of each text's first row, or the mean of all."""

    def __init__(self, shape: EncoderShape, num_classes: int, read: ReadTensor) -> None:
        names, width = shape.family.head, shape.hidden_size
        assert names is not None  # as all classifiers of texts have one
        self._first = read_linear(read, names.first, width, width, shape.head_bias)
        self._activation = _ACTIVATIONS[names.activation]
        self._norm: Linear | None = None
        if names.norm is not None:
            bias = read(f"{names.norm}.bias", (width,)) if shape.norm_bias else None
            self._norm = Linear(read(f"{names.norm}.weight", (width,)), bias)
        self._last = read_linear(read, names.last, num_classes, width, has_bias=True)
        self._eps, self._pools_mean = shape.norm_eps, shape.pools_mean

    def __call__(self, hidden: Tensor, texts: FlatTexts) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_texts, num_classes]."""
        if self._pools_mean:
            sums = torch.zeros(len(texts.lengths), hidden.shape[-1], device=hidden.device)
            sums = sums.index_add_(0, texts.owners, hidden.float())
            rows = sums / torch.tensor(texts.lengths, device=hidden.device)[:, None]
        else:
            rows = hidden[texts.offsets[:-1]]
        rows = self._activation(self._first(rows.to(hidden.dtype)))
        if self._norm is not None:
            rows = layer_norm(rows, rows.shape[-1:], self._norm.weight, self._norm.bias, self._eps)
        return self._last(rows).float()


class DecoderHead:
    """A classifier behind a decoder: of each text's last row."""

    def __init__(self, shape: ModelShape, num_classes: int, read: ReadTensor) -> None:
        self._last = read_linear(read, "score", num_classes, shape.hidden_size, has_bias=False)

    def __call__(self, hidden: Tensor, texts: FlatTexts) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_texts, num_classes]."""
        return self._last(hidden[[end - 1 for end in texts.offsets[1:]]]).float()


class TokenHead:
    """The score of each text's last row: the logit of one token, less that of another."""

    def __init__(
        self, head: Tensor, model: DecoderBody, true_id: int, false_id: int | None
    ) -> None:
        """head [vocab_size, hidden_size]; its logits are bent as `model` bends them."""
        ids = [true_id] if false_id is None else [true_id, false_id]
        self._rows, self._model = head[ids].float(), model

    def __call__(self, hidden: Tensor, texts: FlatTexts) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_texts, 1]."""
        last = hidden[[end - 1 for end in texts.offsets[1:]]].float()
        true, *false = self._model.bent(last @ self._rows.t()).unbind(dim=-1)
        return (true - false[0] if false else true)[:, None]
