"""Linear layers by the library's own products: weights in panels, in the order they are read."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..int8 import ZERO, to_int8
from ..interface import Activation, MakeProjection, Projection
from ..linear import packed_projection
from .library import Library

PANEL = 64
"""Outputs of a panel: SLOTS of the sources."""
TILE = 16
"""Words of a tile's row and outputs of a tile: TILE of the sources."""
GATES: tuple[Activation | None, ...] = (None, "silu", "gelu_pytorch_tanh")
"""Gate of the sources."""

Fields = tuple[int, int | None, int | None, int | None, int, int, int]
"""A layer as stack.cpp's Linear: panels, scales, shifts, bias; outputs, words of a row, gate."""


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """panels: int32, ordered by `_Order.panels`; a word is two neighbouring bfloat16 or four bytes.
    scales, shifts, bias: float32, one per output of the panels, or None. Only bytes have scales
    and shifts; a shift is the sum that ZERO adds to its output. outputs: the number that a row
    returns. gate: an index into GATES."""

    panels: Tensor
    scales: Tensor | None
    shifts: Tensor | None
    bias: Tensor | None
    outputs: int
    gate: int
    library: Library

    def fields(self) -> Fields:
        columns = (self.scales, self.shifts, self.bias)
        scales, shifts, bias = (None if part is None else part.data_ptr() for part in columns)
        words = self.panels.shape[1] * (TILE if self.panels.dim() == 5 else 1)
        return self.panels.data_ptr(), scales, shifts, bias, self.outputs, words, self.gate

    def __call__(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), self.outputs, dtype=rows.dtype)
        panels, scales, shifts, bias, *sizes = self.fields()
        addresses = (rows.data_ptr(), panels, bias, out.data_ptr())
        name, columns = ("linear", ()) if scales is None else ("linear_of_bytes", (scales, shifts))
        self.library.call(name, rows.dtype, *addresses, *columns, len(rows), *sizes)
        return out


def panel_projection(library: Library, activation: Activation | None = None) -> MakeProjection:
    """Makes linear layers of the library's own products, for bfloat16. With `activation` they are
    gated, as in `Kernels.projection`."""

    def make(weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.shape[1] % 2:
            return library.gated(packed_projection(weight, bias), activation)
        return _made(library, activation, weight, (None, None, bias))

    return make


def panel_int8_projection(library: Library, activation: Activation | None = None) -> MakeProjection:
    """Makes int8 linear layers of the library's own products, gated as above. If a row is no whole
    number of words, the layer stays wide."""

    def make(weight: Tensor, bias: Tensor | None) -> Projection:
        if weight.shape[1] % 4:
            return library.gated(packed_projection(weight, bias), activation)
        steps, scales = to_int8(weight)
        shifts = ZERO * steps.sum(dim=1, dtype=torch.float32)
        return _made(library, activation, steps, (scales, shifts, bias))

    return make


def _made(
    library: Library,
    activation: Activation | None,
    weight: Tensor,
    columns: tuple[Tensor | None, ...],
) -> PanelLinear:
    """weight [outputs, in] and its columns (scales, shifts, bias) in the order of panels."""
    order = _Order.of(library, weight.view(torch.int32).shape[1], activation is not None)
    scales, shifts, bias = (
        None if part is None else order.of_outputs(part.float()) for part in columns
    )
    outputs = len(weight) // (2 if activation else 1)
    gate = GATES.index(activation)
    return PanelLinear(order.panels(weight), scales, shifts, bias, outputs, gate, library)


@dataclass(frozen=True, slots=True)
class _Order:
    """The order of a weight's outputs in panels of `width` outputs. If `is_gated`, half of a panel
    are gates and half the outputs that they multiply."""

    width: int
    is_tiled: bool
    is_gated: bool

    @classmethod
    def of(cls, library: Library, words: int, is_gated: bool) -> Self:
        is_tiled = library.has_tiles(words)
        return cls(2 * TILE if is_tiled else PANEL, is_tiled, is_gated)

    def of_outputs(self, values: Tensor) -> Tensor:
        """values [outputs, ...], filled up with zeros, in the order of the panels."""
        num_parts = 2 if self.is_gated else 1
        each, inner = self.width // num_parts, values.shape[1:]
        parts = values.reshape(num_parts, -1, *inner)
        if missing := -parts.shape[1] % each:
            parts = torch.nn.functional.pad(parts, [0, 0] * len(inner) + [0, missing])
        return parts.reshape(num_parts, -1, each, *inner).transpose(0, 1).reshape(-1, *inner)

    def panels(self, weight: Tensor) -> Tensor:
        """The words of weight [outputs, in], a panel's outputs side by side: [panels, words,
        width]. With tiles two lie side by side: [panels, words / TILE, 2, TILE, TILE]."""
        words = self.of_outputs(weight).view(torch.int32)
        if not self.is_tiled:
            return words.view(-1, self.width, words.shape[1]).transpose(1, 2).contiguous()
        tiles = words.view(-1, 2, TILE, words.shape[1] // TILE, TILE)
        return tiles.permute(0, 3, 1, 4, 2).contiguous()
