"""The encoder of images: patches as rows, the layers, and one vector or the classes of each."""

from collections.abc import Callable
from functools import partial

import torch
from sluice_core.model.images import CHANNELS, ImageShape, JointShape, Pixels
from sluice_kernels.interface import Kernels
from torch import Tensor
from torch.nn.functional import interpolate, linear, normalize, scaled_dot_product_attention

from ..models.linear import Linear, ReadTensor, read_linear
from .layers import ACTIVATIONS, Layers, Seen, read_norm
from .texts import EqualLengths, FlatTexts

ImageEnding = Callable[[Tensor], Tensor]
"""rows [num_images, num_rows, hidden_size] -> float32 [num_images, width]."""


class ImageEncoder:
    """A loaded model."""

    def __init__(
        self, shape: ImageShape, pixels: Pixels, read: ReadTensor, kernels: Kernels
    ) -> None:
        self._patch, self._pixels = shape.patch_size, pixels
        family, hidden = shape.family, shape.hidden_size
        kernel = read(f"{family.patches}.weight", (hidden, CHANNELS, self._patch, self._patch))
        bias = read(f"{family.patches}.bias", (hidden,)) if family.patch_bias else None
        self._patches = Linear(kernel.flatten(1), bias)
        parts = pixels.mean, pixels.std
        self._mean, self._std = (torch.tensor(part, device=kernel.device) for part in parts)
        tokens = [_row(read, name, hidden) for name in family.tokens]
        self._tokens = torch.stack(tokens)[None] if tokens else kernel.new_zeros(1, 0, hidden)
        self._positions = _positions(shape, pixels, read)
        name = family.first_norm
        self._first = read_norm(shape.layers, read, name, kernels) if name else None
        self._layers = Layers(shape.layers, read, kernels)

    def hidden(self, images: Tensor) -> Tensor:
        """uint8 [num_images, height, width, 3] -> the last layer's output, [num_images, num_rows,
        hidden_size]."""
        rows = torch.cat([self._tokens.expand(len(images), -1, -1), self._patched(images)], dim=1)
        num, length, hidden = rows.shape
        rows = (rows + self._positions).flatten(0, 1)
        rows = rows if self._first is None else self._first(rows)
        return self._layers(rows, Seen([EqualLengths(0, num, length)])).view(num, length, hidden)

    def _patched(self, images: Tensor) -> Tensor:
        """A row of each patch: a convolution whose steps do not overlap."""
        pixels, side, weight = self._pixels, self._patch, self._patches.weight
        values = (images.float() * pixels.scale - self._mean) / self._std
        down, across = (length // side for length in pixels.shape)
        values = values[:, : down * side, : across * side].to(weight.dtype)
        parts = values.view(len(images), down, side, across, side, CHANNELS)
        patches = parts.permute(0, 1, 3, 5, 2, 4).reshape(len(images), down * across, -1)
        return self._patches(patches)


def _row(read: ReadTensor, name: str, hidden: int) -> Tensor:
    """A learnt row; those of `*_token` are stored with two more dimensions."""
    return read(name, (1, 1, hidden) if name.endswith("_token") else (hidden,)).view(hidden)


def _positions(shape: ImageShape, pixels: Pixels, read: ReadTensor) -> Tensor:
    """Positions [num_rows, hidden_size]; those of another size are made of the stored ones."""
    family, hidden, num = shape.family, shape.hidden_size, shape.layers.max_position
    flat = family.positions.endswith(".weight")
    stored = read(family.positions, (num, hidden) if flat else (1, num, hidden)).view(num, hidden)
    down, across = (side // shape.patch_size for side in pixels.shape)
    side, of_tokens = shape.image_size // shape.patch_size, len(family.tokens)
    if pixels.shape == (shape.image_size, shape.image_size):
        return stored
    grid = stored[of_tokens:].float().view(1, side, side, hidden).permute(0, 3, 1, 2)
    grid = interpolate(grid, size=(down, across), mode="bicubic", align_corners=False)
    rows = grid.permute(0, 2, 3, 1).reshape(down * across, hidden).to(stored.dtype)
    return torch.cat([stored[:of_tokens], rows])


def first_row(rows: Tensor) -> Tensor:
    """The vector of a model without a head: its first row."""
    return rows[:, 0].float()


def read_classifier(shape: ImageShape, num_classes: int, read: ReadTensor) -> ImageEnding:
    """The head of a classifier."""
    hidden = shape.hidden_size
    if shape.family.ending == "first_two":
        names = ("cls_classifier", "distillation_classifier")
        heads = [read_linear(read, name, num_classes, hidden, has_bias=True) for name in names]
        return partial(_mean_of_two, heads)
    takes_mean = shape.family.ending == "first_and_mean"
    width = hidden * (2 if takes_mean else 1)
    return partial(_classes, read_linear(read, "classifier", num_classes, width, True), takes_mean)


def _mean_of_two(heads: list[Linear], rows: Tensor) -> Tensor:
    first, second = (head(rows[:, at]) for at, head in enumerate(heads))
    return (first + second).float() / 2


def _classes(head: Linear, takes_mean: bool, rows: Tensor) -> Tensor:
    found = rows[:, 0]
    if takes_mean:
        found = torch.cat([found, rows[:, 1:].mean(dim=1)], dim=1)
    return head(found).float()


def read_image_vectors(shape: JointShape, read: ReadTensor, kernels: Kernels) -> ImageEnding:
    """The vectors of images in the space of texts, of the length 1."""
    if shape.family.is_siglip:
        return _AttentionPool(shape.images, read, kernels)
    name = "visual_projection"
    part = read_linear(read, name, shape.width, shape.images.hidden_size, has_bias=False)
    return lambda rows: normalize(part(rows[:, 0]).float(), dim=-1)


class _AttentionPool:
    """SigLIP's head: one learnt row sees all rows of an image."""

    def __init__(self, shape: ImageShape, read: ReadTensor, kernels: Kernels) -> None:
        hidden, prefix = shape.hidden_size, "vision_model.head."
        self._num_heads = shape.layers.num_heads
        self._activation = ACTIVATIONS[shape.layers.activation]
        width, attention = shape.layers.intermediate_size, f"{prefix}attention."
        self._out = read_linear(read, f"{attention}out_proj", hidden, hidden, has_bias=True)
        self._norm = read_norm(shape.layers, read, f"{prefix}layernorm", kernels)
        self._up = read_linear(read, f"{prefix}mlp.fc1", width, hidden, has_bias=True)
        self._down = read_linear(read, f"{prefix}mlp.fc2", hidden, width, has_bias=True)
        weight = read(f"{attention}in_proj_weight", (3 * hidden, hidden))
        bias = read(f"{attention}in_proj_bias", (3 * hidden,))
        probe = read(f"{prefix}probe", (1, 1, hidden))
        self._query = linear(probe, weight[:hidden], bias[:hidden])
        self._keys = Linear(weight[hidden:], bias[hidden:])

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [num_images, num_rows, hidden_size] -> float32 [num_images, hidden_size]."""
        num, length, hidden = rows.shape
        query = self._query.expand(num, 1, hidden).view(num, 1, self._num_heads, -1)
        both = self._keys(rows).view(num, length, 2, self._num_heads, -1)
        keys, values = both.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query.transpose(1, 2), keys, values)
        found = self._out(found.transpose(1, 2).reshape(num, hidden))
        more = self._activation(self._up(self._norm(found)))
        return normalize((found + self._down(more)).float(), dim=-1)


class TextVectors:
    """The vectors of texts in the space of images, of the length 1: CLIP's from the row of the end
    token, SigLIP's from the last."""

    def __init__(self, shape: JointShape, read: ReadTensor) -> None:
        self._eos = None if shape.family.is_siglip else shape.eos_token_id
        has_bias = shape.family.is_siglip
        name = "text_model.head" if has_bias else "text_projection"
        self._part = read_linear(read, name, shape.width, shape.texts.hidden_size, has_bias)

    def __call__(self, hidden: Tensor, texts: FlatTexts) -> Tensor:
        """hidden [num_rows, hidden_size] -> float32 [num_texts, width]."""
        bounds = zip(texts.offsets, texts.offsets[1:], strict=False)
        at = [self._place(texts.token_ids[start:end], start, end) for start, end in bounds]
        return normalize(self._part(hidden[at]).float(), dim=-1)

    def _place(self, token_ids: Tensor, start: int, end: int) -> int:
        """The row of a text that counts, as transformers has it."""
        if self._eos is None:
            return end - 1
        marks = token_ids if self._eos == 2 else (token_ids == self._eos).int()
        return start + int(marks.argmax())
