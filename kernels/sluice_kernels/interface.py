"""The interface between a step and its kernels: plain torch, C++ and Triton implement it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True, slots=True)
class Spans:
    """A step's tokens: rows [offsets[i], offsets[i + 1]) are sequence i's from starts[i] on.

    tables [num_seqs, num_pages], padded with a block that is never written; starts [num_seqs];
    offsets [num_seqs + 1]; all int64 on the CPU. Sequences with one token come first, the shorter
    before the longer.
    """

    tables: Tensor
    starts: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer's attention.

    norm: float32 [num_heads + num_kv_heads, head_dim], factors of normed queries and keys; None if
    these are not normed. scale: factor of the scores. softcap: a tanh keeps scores within plus and
    minus this. window: tokens that a token sees, itself included.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    norm: Tensor | None
    norm_eps: float


Projection = Callable[[Tensor], Tensor]
"""A linear layer: rows [num_rows, in] -> [num_rows, out]."""


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """activation(gate) * up of a layer that gives both, as `Kernels.projection` says."""

    linear: Projection
    activation: Activation
    gate: Callable[[Tensor, Activation], Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        return self.gate(self.linear(rows), self.activation)


MakeProjection = Callable[[Tensor, Tensor | None], Projection]
"""(weight, bias) -> the layer, as `Kernels.projection` says."""


@runtime_checkable
class SharesWeights(Protocol):
    """Kernels that are faster than plain torch for a weight that is used elsewhere too."""

    def shared_projection(self, weight: Tensor) -> Projection:
        """The layer of weight [out, in], which stays as it is: no second copy is held."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of most layers. Norms are a weight, float32 [hidden_size], and eps. is_sliding:
    positions use the second of a step's rotary factors."""

    norm: tuple[Tensor, float]
    qkv: Projection
    heads: Heads
    output: Projection
    mlp_norm: tuple[Tensor, float]
    gate_up: Projection
    down: Projection
    is_sliding: bool


class LayerStack(Protocol):
    """Layers in a row."""

    def __call__(
        self,
        residual: Tensor,
        rotary: tuple[Tensor, Tensor],
        caches: Sequence[Tensor],
        slot_mapping: tuple[Tensor, ...],
        plan: object,
    ) -> Tensor:
        """Run as many layers as `caches`; return the last one's output. residual [num_rows,
        hidden_size] becomes the residual to add it to. Other arguments: see `rope_and_store`."""


@runtime_checkable
class RunsLayers(Protocol):
    """Kernels that can run layers in a row, without a call for each operation."""

    def stack(self, layers: Sequence[LayerParts]) -> LayerStack | None:
        """`layers` as one stack; None if they have parts of other kernels."""


@runtime_checkable
class AttendsTexts(Protocol):
    """Kernels that know attention over texts of any lengths, without padding between them."""

    def plan_texts(self, offsets: Tensor, like: Tensor) -> object:
        """The part of it that all layers of a step share. offsets: int64 [num_texts + 1] on the
        CPU, rows of text i are [offsets[i], offsets[i + 1]). like: a tensor of the rows' dtype and
        device."""

    def text_attention(
        self, qkv: Tensor, plan: object, window: int | None, *, is_causal: bool
    ) -> Tensor:
        """Attention within each text: [num_rows, num_heads * head_dim].

        qkv [num_rows, 3, num_heads, head_dim], contiguous. window: tokens that a token sees to
        each side, None for all. What rows behind the last text give is finite on a CPU.
        """


@runtime_checkable
class NormsTexts(Protocol):
    """Kernels that know what stands between an encoder's products. All tensors are contiguous."""

    def layer_norm(
        self, rows: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """The layer norm of rows + added, both [num_rows, width]; weight, bias: float32 [width]."""

    def gelu_(self, rows: Tensor, *, is_tanh: bool) -> Tensor:
        """GELU in place, by erf or in its tanh form; rows [num_rows, width]."""


class Kernels(Protocol):
    """The operations of a step. cache: [num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    @property
    def name(self) -> str:
        """Name of the kernels in use, for the log."""

    def projection(
        self, weight: Tensor, bias: Tensor | None, activation: Activation | None, *, narrow: bool
    ) -> Projection:
        """The layer of weight [out, in] and bias [out], which it takes over.

        activation: the first half of the outputs gates the second: activation(gate) * up,
        [num_rows, out / 2]. narrow: True if these kernels may quantise it.
        """

    def round_rows(self, num_rows: int) -> int:
        """Rows to compute for a step of `num_rows`; the results of added rows are discarded."""

    def plan(self, spans: Spans, cache: Tensor, windows: tuple[int | None, ...]) -> object:
        """The part of attention that all layers of a step share, computed once from `spans`.

        `cache`: one layer's. `windows`: the different windows of the layers.
        """

    def norm(self, residual: Tensor, hidden: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `hidden` to `residual` in place and return its root-mean-square norm.

        All [num_tokens, width]; weight float32 [width], a factor of the norm.
        """

    def rope_and_store(
        self,
        rows: Tensor,
        rotary: Tensor,
        heads: Heads,
        cache: Tensor,
        slot_mapping: tuple[Tensor, ...],
    ) -> None:
        """Norm and rotate queries and keys in place, and store keys and values.

        rows [num_tokens, num_heads + 2 * num_kv_heads, head_dim], contiguous; rotary complex64
        [num_tokens, 1, head_dim / 2]; slot_mapping: block and slot of each token, int64.
        """

    def attention(self, rows: Tensor, heads: Heads, cache: Tensor, plan: object) -> Tensor:
        """Attention of the queries in `rows`, whose keys are stored: [num_rows, num_heads *
        head_dim]. Rows that `round_rows` added give zeros."""
