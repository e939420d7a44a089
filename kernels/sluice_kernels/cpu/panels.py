"""Linear layers by the library's own products: weights in panels, in the order they are read."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..int8 import ZERO, onednn_int8, to_int8
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
    """panels int32 as `_Order.panels` says, a word being two neighbouring bfloat16; bias float32 of
    their outputs or None; outputs: those of a row that come out; gate: a number of GATES."""

    panels: Tensor
    bias: Tensor | None
    outputs: int
    gate: int
    library: Library

    def fields(self) -> Fields:
        bias = None if self.bias is None else self.bias.data_ptr()
        sizes = (self.outputs, _words(self.panels), self.gate)
        return self.panels.data_ptr(), None, None, bias, *sizes

    def __call__(self, rows: Tensor) -> Tensor:
        num_rows, width = rows.shape
        out = torch.empty(num_rows, self.outputs, dtype=rows.dtype)
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (rows.data_ptr(), self.panels.data_ptr(), bias, out.data_ptr())
        sizes = (num_rows, self.outputs, width // 2, self.gate)
        self.library.call("linear", rows.dtype, *addresses, *sizes)
        return out


@dataclass(frozen=True, slots=True)
class PanelInt8Linear:
    """As PanelLinear, a word being four bytes; scales and shifts float32 of the panels' outputs,
    shifts what ZERO adds to each."""

    panels: Tensor
    scales: Tensor
    shifts: Tensor
    bias: Tensor | None
    outputs: int
    gate: int
    library: Library

    def fields(self) -> Fields:
        bias = None if self.bias is None else self.bias.data_ptr()
        columns = (self.scales.data_ptr(), self.shifts.data_ptr())
        sizes = (self.outputs, _words(self.panels), self.gate)
        return self.panels.data_ptr(), *columns, bias, *sizes

    def __call__(self, rows: Tensor) -> Tensor:
        num_rows, width = rows.shape
        out = torch.empty(num_rows, self.outputs, dtype=rows.dtype)
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (rows.data_ptr(), self.panels.data_ptr(), bias, out.data_ptr())
        columns = (self.scales.data_ptr(), self.shifts.data_ptr())
        sizes = (num_rows, self.outputs, width // 4, self.gate)
        self.library.call("linear_of_bytes", rows.dtype, *addresses, *columns, *sizes)
        return out


def _words(panels: Tensor) -> int:
    """Words of a row, as `_Order.panels` says."""
    return panels.shape[1] * (TILE if panels.dim() == 5 else 1)


def panel_projection(library: Library, activation: Activation | None = None) -> MakeProjection:
    """Makes linear layers of the library's own products, for bfloat16; gated ones of `activation`
    as `Kernels.gated_projection` says."""

    def make(weight: Tensor, bias: Tensor | None, narrow: bool) -> Projection:
        if weight.shape[1] % 2:
            return library.gated(packed_projection(weight, bias, narrow), activation)
        order = _Order.of(library, weight.view(torch.int32).shape[1], activation is not None)
        wide = None if bias is None else order.of_outputs(bias.float())
        outputs = len(weight) // (2 if activation else 1)
        return PanelLinear(order.panels(weight), wide, outputs, GATES.index(activation), library)

    return make


def panel_int8_projection(library: Library, activation: Activation | None = None) -> MakeProjection:
    """Makes int8 linear layers of the library's own products, gated ones as above."""

    def make(weight: Tensor, bias: Tensor | None, narrow: bool) -> Projection:
        if weight.shape[1] % 4:
            return library.gated(onednn_int8(library)(weight, bias, narrow), activation)
        steps, scales = to_int8(weight)
        order = _Order.of(library, steps.view(torch.int32).shape[1], activation is not None)
        shifts = ZERO * steps.sum(dim=1, dtype=torch.float32)
        wide = None if bias is None else order.of_outputs(bias.float())
        outputs = len(weight) // (2 if activation else 1)
        own = (order.panels(steps), order.of_outputs(scales), order.of_outputs(shifts), wide)
        return PanelInt8Linear(*own, outputs, GATES.index(activation), library)

    return make


@dataclass(frozen=True, slots=True)
class _Order:
    """How a weight's outputs lie in panels: `width` of them in each, half of those a gate's and
    half what these let through where it `is_gated`."""

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
        """The words of weight [outputs, in], the outputs of a panel side by side: [panels, words,
        width]; for tiles two of them side by side: [panels, words / TILE, 2, TILE, TILE]."""
        words = self.of_outputs(weight).view(torch.int32)
        if not self.is_tiled:
            return words.view(-1, self.width, words.shape[1]).transpose(1, 2).contiguous()
        tiles = words.view(-1, 2, TILE, words.shape[1] // TILE, TILE)
        return tiles.permute(0, 3, 1, 4, 2).contiguous()
