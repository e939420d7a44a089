"""One step's batch as tensors: what the runner builds and the decoder reads.

A model whose layers have different windows sees a sequence's past in as many views, one for each of
`ModelShape.windows`; the others have one.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DecodeView:
    """Pages of a group's sequences (`page_rows`) and what of them is seen (`padding_bias`)."""

    rows: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [begin, end) of the step: sequences of similar length with one new token each."""

    begin: int
    end: int
    views: tuple[DecodeView, ...]


@dataclass(frozen=True, slots=True)
class PrefillView:
    """Pages of a chunk's past (None at the sequence's start) and what each token sees of it.

    bias is None where a chunk at the start sees all before each token.
    """

    rows: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows [begin, end) of the step: a chunk of one sequence."""

    begin: int
    end: int
    views: tuple[PrefillView, ...]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One mixed batch. All tensors but `sampled_rows` have one entry per token."""

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    slots: Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]
    sampled_rows: Tensor
