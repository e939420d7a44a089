"""The functions of the built C++ library."""

import ctypes
from ctypes import c_float, c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from ..interface import Activation, GatedLinear, MakeProjection, Projection

_P, _I, _F = c_void_p, c_int, c_float
# After is_bf16 and num_threads, as the sources declare them.
_SIGNATURES = {
    "paged_attention": [*6 * [_P], *8 * [_I], _F, _F],
    "text_attention": [*4 * [_P], *6 * [_I], _F],
    "layer_norm": [*5 * [_P], _I, _I, _F],
    "gelu_rows": [_I, _P, _I, _I],
    "add_norm": [*4 * [_P], _I, _I, _F],
    "rope_and_store": [*6 * [_P], *5 * [_I], _F],
    "gate": [_I, _P, _P, _I, _I],
    "to_bytes": [*3 * [_P], _I, _I],
    "scale": [*3 * [_P], _I, _I],
    "shared_head": [*3 * [_P], *3 * [_I]],
    "linear": [*4 * [_P], *4 * [_I]],
    "linear_of_bytes": [*6 * [_P], *4 * [_I]],
    "run_layers": [_P, _I, *5 * [_P]],
}


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
        """True if matrix units multiply rows of `words` words, of bfloat16 or bytes."""
        return self._tile_words > 0 and words % self._tile_words == 0

    def call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        """Call `name` on rows of `dtype`, with torch's number of threads."""
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

    def gating(self, make: MakeProjection, activation: Activation | None) -> MakeProjection:
        """`make`, of layers that are `gated`."""
        return lambda weight, bias: self.gated(make(weight, bias), activation)

    # Kernels of one row each, which int8 products need too

    def to_bytes(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scale rows, as `int8.ByteRows` says."""
        found = torch.empty(rows.shape, dtype=torch.uint8)
        scales = torch.empty(len(rows), dtype=torch.float32)
        addresses = (rows.data_ptr(), found.data_ptr(), scales.data_ptr())
        self.call("to_bytes", rows.dtype, *addresses, *rows.shape)
        return found, scales

    def scale_(self, products: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """Scale rows, as `int8.ByteRows` says."""
        added = None if bias is None else bias.data_ptr()
        addresses = (products.data_ptr(), scales.data_ptr(), added)
        self.call("scale", products.dtype, *addresses, *products.shape)
