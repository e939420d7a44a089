"""Runs steps on the device: builds the mixed batch, one forward, one token per sampling row.

The only module of the engine that holds tensors between steps: the weights and the KV cache.
"""

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from sluice_kernels.decode_attention import padding_bias
from sluice_kernels.gather_kv import page_rows
from sluice_kernels.prefill_attention import causal_bias
from torch import Tensor

from .models.decoder import DecodeGroup, Decoder, PrefillSpan, StepInput
from .sampler import Draw, sample
from .sizing import MAX_GATHER_BYTES, blocks_for
from .step import Work

Indices = NDArray[np.int64]


class Runner:
    """A decoder with its paged KV cache."""

    def __init__(
        self, model: Decoder, num_blocks: int, block_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.device = model.embedding.device
        self.caches = self._allocate(num_blocks)
        self._null_block = num_blocks  # pads the tables of shorter sequences
        self._generator = torch.Generator(self.device)

    def _allocate(self, num_blocks: int) -> list[Tensor]:
        """Pages of zeros, finite as masked slots are multiplied too; the last is never written."""
        shape = self.model.config.shape
        page = (2, shape.num_kv_heads, self.block_size, shape.head_dim)
        dtype = self.model.embedding.dtype
        size = (num_blocks + 1, *page)
        return [_zeros(size, dtype, self.device) for _ in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(cache.nbytes for cache in self.caches)

    @torch.inference_mode()
    def execute(self, works: Seq[Work]) -> list[int | None]:
        """A token for each sampled position, in order; None where its logits are not finite."""
        ordered = sorted(works, key=_by_length)
        logits = self.model.forward(self.build(ordered), self.caches)
        draws = [self._draw(work, ahead) for work in ordered for ahead in range(work.num_samples)]
        tokens = iter(sample(logits, draws, self._generator))
        found = {id(work): [next(tokens) for _ in range(work.num_samples)] for work in ordered}
        return [token for work in works for token in found[id(work)]]

    def clear(self, blocks: Seq[int]) -> None:
        """Zero the pages of `blocks`."""
        if blocks:
            for cache in self.caches:
                cache[list(blocks)] = 0

    def _draw(self, work: Work, ahead: int) -> Draw:
        sequence = work.sequence
        return Draw(
            temperature=sequence.request.temperature,
            seed=sequence.seed,
            index=sequence.num_tokens + ahead,
            forbidden=tuple(sequence.forbidden_tokens(self.eos_token_ids, ahead)),
        )

    def build(self, works: Seq[Work]) -> StepInput:
        """The batch as tensors; `works` decodes first, those sorted by length."""
        positions = np.concatenate([_positions(work) for work in works])
        blocks = np.concatenate([self._blocks(work) for work in works])
        token_ids = [token for work in works for token in work.token_ids]
        ends = np.cumsum([work.num_tokens for work in works])
        sampled = [
            int(end) - left
            for work, end in zip(works, ends, strict=True)
            for left in range(work.num_samples, 0, -1)
        ]
        num_decodes = sum(1 for work in works if work.num_tokens == 1)
        return StepInput(
            token_ids=self._tensor(np.array(token_ids, dtype=np.int64)),
            positions=self._tensor(positions),
            blocks=self._tensor(blocks),
            slots=self._tensor(positions % self.block_size),
            decodes=tuple(self._decode_groups(works[:num_decodes])),
            prefills=tuple(
                self._prefill_span(work, int(end))
                for work, end in zip(works[num_decodes:], ends[num_decodes:], strict=True)
            ),
            sampled_rows=self._tensor(np.array(sampled, dtype=np.int64)),
        )

    def _blocks(self, work: Work) -> Indices:
        table = np.array(work.sequence.block_ids, dtype=np.int64)
        return table[_positions(work) // self.block_size]

    def _decode_groups(self, works: Seq[Work]) -> list[DecodeGroup]:
        pages = [blocks_for(work.start + 1, self.block_size) for work in works]
        page_bytes = self.caches[0][0].nbytes
        return [
            self._decode_group(works, begin, end)
            for begin, end in _split(pages, MAX_GATHER_BYTES // page_bytes)
        ]

    def _decode_group(self, works: Seq[Work], begin: int, end: int) -> DecodeGroup:
        members = works[begin:end]
        lengths = np.array([work.start + 1 for work in members], dtype=np.int64)
        num_pages = blocks_for(int(lengths.max()), self.block_size)
        tables = np.full((len(members), num_pages), self._null_block, dtype=np.int64)
        for row, work in enumerate(members):
            used = work.sequence.block_ids[:num_pages]
            tables[row, : len(used)] = used
        num_kv_heads = self.model.config.shape.num_kv_heads
        return DecodeGroup(
            begin=begin,
            end=end,
            rows=page_rows(self._tensor(tables), num_kv_heads),
            bias=padding_bias(
                self._tensor(lengths),
                num_pages * self.block_size,
                num_kv_heads,
                self.model.embedding.dtype,
            ),
        )

    def _prefill_span(self, work: Work, end: int) -> PrefillSpan:
        if work.start == 0:
            return PrefillSpan(end - work.num_tokens, end, None, None)
        num_pages = blocks_for(work.start + work.num_tokens, self.block_size)
        table = np.array([work.sequence.block_ids[:num_pages]], dtype=np.int64)
        num_slots = num_pages * self.block_size
        return PrefillSpan(
            begin=end - work.num_tokens,
            end=end,
            rows=page_rows(self._tensor(table), self.model.config.shape.num_kv_heads),
            bias=causal_bias(work.start, work.num_tokens, num_slots, self.model.embedding),
        )

    def _tensor(self, values: Indices) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # calloc, which torch.zeros does not use: the system zeroes a page when it is first touched, so
    # a large pool takes neither time nor memory before it is needed.
    raw = np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(size)


def _by_length(work: Work) -> tuple[bool, int]:
    return work.num_tokens > 1, work.start


def _positions(work: Work) -> Indices:
    return np.arange(work.start, work.start + work.num_tokens, dtype=np.int64)


def _split(pages: Seq[int], max_pages: int) -> list[tuple[int, int]]:
    """Groups of neighbours (sorted by pages) such that padding at most doubles what is read.

    Each group costs its calls in every layer, so one is cut only where that saves more, or where
    its padded pages would be over `max_pages`.
    """
    groups, begin = [], 0
    for end in range(1, len(pages)):
        padded = pages[end] * (end + 1 - begin)
        if pages[end] > 2 * pages[begin] + 2 or padded > max_pages:
            groups.append((begin, end))
            begin = end
    return [*groups, (begin, len(pages))] if pages else []
