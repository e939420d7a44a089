"""A decoder as an encoder of texts: each token sees those before it."""

from itertools import accumulate

import torch
from sluice_core.model.sizing import blocks_for
from sluice_kernels.interface import Spans
from torch import Tensor
from torch.nn.functional import pad

from ..models.decoder import DecoderBody
from ..models.step import StepInput
from .texts import FlatTexts


class DecodedTexts:
    """Decoder and pages of keys and values. All layers share one layer's pages: nothing is read
    of a text once its layer is done."""

    def __init__(self, model: DecoderBody, block_size: int) -> None:
        self.model, self._block_size = model, block_size
        self._pages = self._allocated(1)

    def hidden(self, texts: FlatTexts) -> Tensor:
        """The last layer's normed output, [num_rows, hidden_size]."""
        model, kernels = self.model, self.model.kernels
        used = [blocks_for(length, self._block_size) for length in texts.lengths]
        firsts = [0, *accumulate(used)]
        if firsts[-1] >= len(self._pages):
            self._pages = self._allocated(firsts[-1])
        num_rows = len(texts.positions)
        starts = torch.tensor(firsts, device=texts.positions.device)
        step = StepInput(
            token_ids=pad(texts.token_ids, (0, kernels.round_rows(num_rows) - num_rows)),
            positions=texts.positions,
            blocks=starts[texts.owners] + texts.positions // self._block_size,
            slots=texts.positions % self._block_size,
            plan=kernels.plan(
                self._spans(texts, used, firsts), self._pages, model.config.shape.windows
            ),
            sampled_rows=texts.positions[:0],
        )
        rows = model.norm(model.hidden(step, [self._pages] * model.config.shape.num_layers))
        if not bool(rows.isfinite().all()):
            self._pages.zero_()  # masked slots are multiplied too
        return rows

    def _spans(self, texts: FlatTexts, used: list[int], firsts: list[int]) -> Spans:
        never_written = len(self._pages) - 1
        tables = torch.full((len(used), max(used)), never_written)
        for row, (first, num) in enumerate(zip(firsts, used, strict=False)):
            tables[row, :num] = torch.arange(first, first + num)
        return Spans(tables, torch.zeros(len(used), dtype=torch.int64), torch.tensor(texts.offsets))

    def _allocated(self, num_blocks: int) -> Tensor:
        shape, words = self.model.config.shape, self.model.embedding
        size = (num_blocks + 1, 2, shape.num_kv_heads, self._block_size, shape.head_dim)
        return torch.zeros(size, dtype=words.dtype, device=words.device)
