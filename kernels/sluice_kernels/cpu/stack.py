"""All layers by one call. From Python, each of a layer's eight operations takes 8 us more. That is
an eighth of the time of an 88 M model's decode step of one sequence."""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..interface import LayerParts, Spans
from .library import Library
from .panels import PanelLinear


class _Linear(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("panels", "scales", "shifts", "bias")),
        *((name, c_int) for name in ("outputs", "words", "gate")),
    ]


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm", "mlp_norm", "head_norm")),
        *((name, c_int) for name in ("is_sliding", "num_heads", "num_kv_heads", "head_dim")),
        ("window", c_int),
        *((name, c_float) for name in ("eps", "mlp_eps", "head_eps", "scale", "softcap")),
    ]


class _Step(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("rotary", "sliding_rotary", "blocks", "slots")),
        *((name, c_void_p) for name in ("tables", "starts", "offsets")),
        *((name, c_int) for name in ("num_rows", "width", "num_seqs", "num_pages")),
        *((name, c_int) for name in ("block_size", "itemsize")),
    ]


@dataclass(frozen=True, slots=True)
class Stack:
    """Implements `interface.LayerStack`. `parts`: of its layers; `layers` holds their addresses.
    `scratch_width`: numbers per row that the widest layer needs."""

    parts: Sequence[LayerParts]
    layers: ctypes.Array[_Layer]
    scratch_width: int
    library: Library

    def __call__(
        self,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        caches: Sequence[Tensor],
        slot_mapping: tuple[Tensor, ...],
        plan: object,
    ) -> Tensor:
        assert isinstance(plan, Spans)
        num_rows, width = residual.shape
        hidden = torch.empty_like(residual)
        scratch = torch.empty(num_rows, self.scratch_width, dtype=residual.dtype)
        addressed = (*rotary, *slot_mapping, plan.tables, plan.starts, plan.offsets)
        sizes = (num_rows, width, *plan.tables.shape, caches[0].shape[3], residual.itemsize)
        step = _Step(*(part.data_ptr() for part in addressed), *sizes)
        pages = (c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
        addresses = (residual.data_ptr(), hidden.data_ptr(), scratch.data_ptr())
        layers = (ctypes.addressof(self.layers), len(caches), ctypes.addressof(pages))
        self.library.call("run_layers", residual.dtype, *layers, ctypes.addressof(step), *addresses)
        return hidden


def stack_of(layers: Sequence[LayerParts], library: Library) -> Stack | None:
    """As `interface.RunsLayers.stack` says."""
    made = [_layer(part) for part in layers]
    own = [layer for layer in made if layer is not None]
    if not own or len(own) < len(made):
        return None
    widths = [
        max(layer.qkv.outputs + layer.num_heads * layer.head_dim, layer.gate_up.outputs)
        for layer in own
    ]
    scratch_width = max(widths) + layers[0].norm[0].shape[0]
    return Stack(layers, (_Layer * len(own))(*own), scratch_width, library)


def _layer(part: LayerParts) -> _Layer | None:
    parts = (part.qkv, part.output, part.gate_up, part.down)
    linears = [_Linear(*each.fields()) for each in parts if isinstance(each, PanelLinear)]
    if len(linears) < len(parts):
        return None
    heads = part.heads
    head_norm = None if heads.norm is None else heads.norm.data_ptr()
    norms = (part.norm[0].data_ptr(), part.mlp_norm[0].data_ptr(), head_norm)
    sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.window or 0)
    numbers = (part.norm[1], part.mlp_norm[1], heads.norm_eps, heads.scale, heads.softcap or 0.0)
    return _Layer(*linears, *norms, part.is_sliding, *sizes, *numbers)
