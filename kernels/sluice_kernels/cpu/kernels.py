"""The operations of a step by the C++ kernels; products of their own or by oneDNN."""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from ..int8 import ZERO, onednn_int8, to_int8
from ..interface import Activation, GatedLinear, Heads, MakeProjection, Projection, Spans
from ..linear import packed_projection, plain_projection

DTYPES = (torch.float32, torch.bfloat16)
_P, _I, _F = c_void_p, c_int, c_float
# After is_bf16 and num_threads, as the sources declare them.
_SIGNATURES = {
    "paged_attention": [*6 * [_P], *8 * [_I], _F, _F],
    "add_norm": [*4 * [_P], _I, _I, _F],
    "turn_and_store": [*6 * [_P], *5 * [_I], _F],
    "gate": [_I, _P, _P, _I, _I],
    "to_bytes": [*3 * [_P], _I, _I],
    "scale": [*3 * [_P], _I, _I],
    "shared_head": [*3 * [_P], *3 * [_I]],
    "linear": [*4 * [_P], *4 * [_I]],
    "linear_of_bytes": [*6 * [_P], *4 * [_I]],
}
PANEL = 64
"""Outputs of a panel: SLOTS of the sources."""
TILE = 16
"""Words of a tile's row and outputs of a tile: TILE of the sources."""
GATES: tuple[Activation | None, ...] = (None, "silu", "gelu_pytorch_tanh")
"""Gate of the sources."""


class Library:
    """The functions of a built library: addresses and numbers in, nothing out."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {name: getattr(library, name) for name in _SIGNATURES}
        for name, function in self._functions.items():
            function.argtypes = [c_int, c_int, *_SIGNATURES[name]]
            function.restype = None
        self._tile_words: int = library.tile_words()

    def has_tiles(self, words: int) -> bool:
        """Whether rows of so many words, of bfloat16 or bytes, are multiplied by matrix units."""
        return self._tile_words > 0 and words % self._tile_words == 0

    def call(self, name: str, dtype: torch.dtype, *arguments: float | None) -> None:
        """`name` on rows of `dtype`, with torch's number of threads."""
        self._functions[name](dtype == torch.bfloat16, torch.get_num_threads(), *arguments)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: [num_rows, 2 * width] -> [num_rows, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        addresses = (gate_up.data_ptr(), out.data_ptr())
        self.call("gate", gate_up.dtype, activation != "silu", *addresses, rows, width)
        return out

    def gated(self, linear: Projection, activation: Activation | None) -> Projection:
        """`linear`, with its outputs gated by `activation` if there is one."""
        return linear if activation is None else GatedLinear(linear, activation, self.gate)

    # Kernels of one row each, which int8 products need too

    def to_bytes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As `int8.ByteRows` says."""
        found = torch.empty(rows.shape, dtype=torch.uint8)
        scales = torch.empty(len(rows), dtype=torch.float32)
        addresses = (rows.data_ptr(), found.data_ptr(), scales.data_ptr())
        self.call("to_bytes", rows.dtype, *addresses, *rows.shape)
        return found, scales

    def scale_(self, products: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """As `int8.ByteRows` says."""
        added = None if bias is None else bias.data_ptr()
        addresses = (products.data_ptr(), scales.data_ptr(), added)
        self.call("scale", products.dtype, *addresses, *products.shape)


@dataclass(frozen=True, slots=True)
class SharedLinear:
    """weight [out, in] is used elsewhere too and stays as it is; float32 comes out."""

    weight: Tensor
    library: Library

    def __call__(self, rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), len(self.weight), dtype=torch.float32)
        addresses = (rows.data_ptr(), self.weight.data_ptr(), out.data_ptr())
        self.library.call("shared_head", rows.dtype, *addresses, *out.shape, rows.shape[1])
        return out


@dataclass(frozen=True, slots=True)
class PanelLinear:
    """panels int32 as `_Order.panels` says, a word being two neighbouring bfloat16; bias float32 of
    their outputs or None; outputs: those of a row that come out; gate: a number of GATES."""

    panels: Tensor
    bias: Tensor | None
    outputs: int
    gate: int
    library: Library

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

    def __call__(self, rows: Tensor) -> Tensor:
        num_rows, width = rows.shape
        out = torch.empty(num_rows, self.outputs, dtype=rows.dtype)
        bias = None if self.bias is None else self.bias.data_ptr()
        addresses = (rows.data_ptr(), self.panels.data_ptr(), bias, out.data_ptr())
        columns = (self.scales.data_ptr(), self.shifts.data_ptr())
        sizes = (num_rows, self.outputs, width // 4, self.gate)
        self.library.call("linear_of_bytes", rows.dtype, *addresses, *columns, *sizes)
        return out


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


@dataclass(frozen=True, slots=True)
class CppKernels:
    """For float32 and bfloat16. All tensors are contiguous and on the CPU."""

    library: Library
    make_projection: MakeProjection
    name: str
    round_rows: Callable[[int], int] = int
    make_gated: Callable[[Activation], MakeProjection] | None = None

    def projection(self, weight: Tensor, bias: Tensor | None, *, narrow: bool) -> Projection:
        return self.make_projection(weight, bias, narrow)

    def shared_projection(self, weight: Tensor) -> Projection:
        if weight.shape[1] % 2:
            return plain_projection(weight, None, False)
        return SharedLinear(weight, self.library)

    def plan(self, spans: Spans, cache: Tensor, windows: tuple[int | None, ...]) -> Spans:
        return spans

    def norm(self, stream: Tensor, mixed: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(stream)
        added = None if mixed is None else mixed.data_ptr()
        addresses = (stream.data_ptr(), added, weight.data_ptr(), out.data_ptr())
        self.library.call("add_norm", stream.dtype, *addresses, *stream.shape, eps)
        return out

    def turn_and_store(
        self, rows: Tensor, turns: Tensor, heads: Heads, cache: Tensor, places: tuple[Tensor, ...]
    ) -> None:
        norm = None if heads.norm is None else heads.norm.data_ptr()
        self.library.call(
            "turn_and_store",
            rows.dtype,
            *(rows.data_ptr(), turns.data_ptr(), norm, cache.data_ptr()),
            *(place.data_ptr() for place in places),
            *(rows.shape[0], heads.num_heads, heads.num_kv_heads, heads.head_dim, cache.shape[3]),
            heads.norm_eps,
        )

    def attention(self, rows: Tensor, heads: Heads, cache: Tensor, plan: object) -> Tensor:
        assert isinstance(plan, Spans)
        num_rows = rows.shape[0]
        out = torch.empty(num_rows, heads.num_heads * heads.head_dim, dtype=rows.dtype)
        if num_rows > (num_tokens := int(plan.offsets[-1])):
            out[num_tokens:] = 0
        self.library.call(
            "paged_attention",
            rows.dtype,
            *(rows.data_ptr(), cache.data_ptr(), out.data_ptr()),
            *(part.data_ptr() for part in (plan.tables, plan.starts, plan.offsets)),
            *(*plan.tables.shape, rows.stride(0)),
            *(heads.num_heads, heads.num_kv_heads, heads.head_dim, cache.shape[3]),
            *(heads.window or 0, heads.scale, heads.softcap or 0.0),
        )
        return out

    def gated_projection(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, *, narrow: bool
    ) -> Projection:
        if self.make_gated is not None:
            return self.make_gated(activation)(weight, bias, narrow)
        return self.library.gated(self.projection(weight, bias, narrow=narrow), activation)
