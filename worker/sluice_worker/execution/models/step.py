"""One step's batch as tensors: what the runner builds and the decoder reads."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepInput:
    """One mixed batch. All tensors but `sampled_rows` have one entry per token.

    token_ids: padded if the kernels want more rows (`round_rows`); results of padding are unused.
    plan: the result of the kernels' `plan` for the batch's spans.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    slots: Tensor
    plan: object
    sampled_rows: Tensor
