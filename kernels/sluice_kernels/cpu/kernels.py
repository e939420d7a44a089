"""The operations of a step by the C++ kernels; products of their own or by oneDNN."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..interface import Activation, Heads, LayerParts, LayerStack, MakeProjection, Projection, Spans
from ..linear import plain_projection
from .library import Library
from .stack import stack_of

DTYPES = (torch.float32, torch.bfloat16)


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
class CppKernels:
    """For float32 and bfloat16. All tensors are contiguous and on the CPU."""

    library: Library
    making: Callable[[Activation | None, bool], MakeProjection]
    name: str
    round_rows: Callable[[int], int] = int

    def projection(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, *, narrow: bool
    ) -> Projection:
        return self.making(activation, narrow)(weight, bias)

    def shared_projection(self, weight: Tensor) -> Projection:
        if weight.shape[1] % 2:
            return plain_projection(weight, None)
        return SharedLinear(weight, self.library)

    def plan(self, spans: Spans, cache: Tensor, windows: tuple[int | None, ...]) -> Spans:
        return spans

    def norm(self, residual: Tensor, hidden: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        added = None if hidden is None else hidden.data_ptr()
        addresses = (residual.data_ptr(), added, weight.data_ptr(), out.data_ptr())
        self.library.call("add_norm", residual.dtype, *addresses, *residual.shape, eps)
        return out

    def rope_and_store(
        self,
        rows: Tensor,
        rotary: Tensor,
        heads: Heads,
        cache: Tensor,
        slot_mapping: tuple[Tensor, ...],
    ) -> None:
        norm = None if heads.norm is None else heads.norm.data_ptr()
        self.library.call(
            "rope_and_store",
            rows.dtype,
            *(rows.data_ptr(), rotary.data_ptr(), norm, cache.data_ptr()),
            *(place.data_ptr() for place in slot_mapping),
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

    def layer_norm(
        self, rows: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        out = torch.empty_like(rows)
        parts = (rows, added, weight, bias, out)
        addresses = (None if part is None else part.data_ptr() for part in parts)
        self.library.call("layer_norm", rows.dtype, *addresses, *rows.shape, eps)
        return out

    def gelu_(self, rows: Tensor, *, is_tanh: bool) -> Tensor:
        self.library.call("gelu_rows", rows.dtype, is_tanh, rows.data_ptr(), *rows.shape)
        return rows

    def plan_texts(self, offsets: Tensor, like: Tensor) -> Tensor:
        return offsets

    def text_attention(
        self, qkv: Tensor, plan: object, window: int | None, *, is_causal: bool
    ) -> Tensor:
        assert isinstance(plan, Tensor)
        num_rows, _, num_heads, head_dim = qkv.shape
        out = torch.empty(num_rows, num_heads * head_dim, dtype=qkv.dtype)
        if num_rows > (num_tokens := int(plan[-1])):
            out[num_tokens:] = 0
        self.library.call(
            "text_attention",
            qkv.dtype,
            *(qkv.data_ptr(), qkv[:, 1].data_ptr(), out.data_ptr(), plan.data_ptr()),
            *(len(plan) - 1, qkv.stride(0), num_heads, head_dim, window or 0, is_causal),
            head_dim**-0.5,
        )
        return out

    def stack(self, layers: Sequence[LayerParts]) -> LayerStack | None:
        # Rows that are added for oneDNN have no place in the cache.
        return stack_of(layers, self.library) if self.round_rows is int else None
