"""Runs steps on the device: builds the mixed batch, one forward, one token per sampling row.

The only module of the engine that holds tensors between steps: the weights and the KV cache.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from sluice_kernels.decode_attention import padding_bias
from sluice_kernels.gather_kv import page_rows
from sluice_kernels.prefill_attention import causal_bias
from torch import Tensor

from .edits import Editor
from .models.decoder import Decoder
from .models.step import DecodeGroup, DecodeView, PrefillSpan, PrefillView, StepInput
from .sampler import Draw, joined, sample, score
from .sequence import Sequence
from .sizing import MAX_GATHER_BYTES, blocks_for
from .step import Work

Indices = NDArray[np.int64]
View = TypeVar("View", DecodeView, PrefillView)
PROMPT_ROWS = 32
"""Prompt positions scored at once: logits of a whole chunk would need memory that is not planned.
"""


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
        self._windows = model.config.shape.windows
        self._null_block = num_blocks  # pads the tables of shorter sequences

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
        """A token for each sampled position, in order; None where its logits are not finite.

        Scores that requests ask for are left in their sequences.
        """
        ordered = sorted(works, key=_by_length)
        step = self.build(ordered)
        hidden = self.model.hidden(step, self.caches)
        logits = self.model.logits(hidden[step.sampled_rows])
        places = [(work, ahead) for work in ordered for ahead in range(work.num_samples)]
        tokens = sample(logits, [self._draw(work.sequence, ahead) for work, ahead in places])
        self._score(logits, [work.sequence for work, _ in places], tokens)
        self._score_prompts(hidden, ordered)
        drawn = iter(tokens)
        found = {id(work): [next(drawn) for _ in range(work.num_samples)] for work in ordered}
        return [token for work in works for token in found[id(work)]]

    def clear(self, blocks: Seq[int]) -> None:
        """Zero the pages of `blocks`."""
        if blocks:
            for cache in self.caches:
                cache[list(blocks)] = 0

    def _draw(self, sequence: Sequence, ahead: int) -> Draw:
        request, token_ids = sequence.request, sequence.token_ids
        sampling = request.sampling
        forbidden, edits = sequence.forbidden_tokens(self.eos_token_ids, ahead), None
        if sampling.edits_logits:
            if sequence.editor is None:
                vocab_size = self.model.config.shape.vocab_size
                sequence.editor = Editor(sampling, request.prompt_token_ids, vocab_size)
            edits = sequence.editor.edits(token_ids)
            forbidden += sequence.editor.bad_words(token_ids)
        return Draw(
            temperature=request.temperature,
            seed=sequence.seed,
            index=sequence.num_tokens + ahead,
            forbidden=tuple(forbidden),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            edits=edits,
        )

    def _score(self, logits: Tensor, sequences: Seq[Sequence], tokens: Seq[int | None]) -> None:
        asked = [
            (row, sequence, token, sequence.request.sampling.logprobs + 1)
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
            if token is not None and sequence.request.sampling.logprobs is not None
        ]
        if not asked:
            return
        rows, scored, chosen, widths = zip(*asked, strict=True)
        for sequence, scores in zip(scored, score(logits, rows, chosen, widths), strict=True):
            sequence.scores = scores

    def _score_prompts(self, hidden: Tensor, works: Seq[Work]) -> None:
        end = 0
        for work in works:
            begin, end = end, end + work.num_tokens
            if work.sequence.needs_prompt_scores:
                self._score_prompt(hidden[begin:end], work)

    def _score_prompt(self, hidden: Tensor, work: Work) -> None:
        """Scores of the prompt tokens that follow those of `work` and have none yet."""
        sequence = work.sequence
        prompt = sequence.request.prompt_token_ids
        width = (sequence.request.sampling.prompt_logprobs or 0) + 1
        first = max(sequence.num_scored_tokens, work.start + 1)
        last = min(work.start + work.num_tokens, len(prompt) - 1)
        parts = []
        for at in range(first, last + 1, PROMPT_ROWS):
            tokens = prompt[at : min(at + PROMPT_ROWS, last + 1)]
            row = at - 1 - work.start
            logits = self.model.logits(hidden[row : row + len(tokens)])
            parts += score(logits, range(len(tokens)), tokens, [width] * len(tokens))
        if parts:
            sequence.prompt_scores = joined(parts)
            sequence.num_scored_tokens = last + 1

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
        longest = max(work.start + 1 for work in members)
        views = self._views(longest, lambda window: self._decode_view(members, window))
        return DecodeGroup(begin, end, views)

    def _decode_view(self, works: Seq[Work], window: int | None) -> DecodeView:
        """The pages that hold what a window shows, and their first one may hold more."""
        lengths = np.array([work.start + 1 for work in works], dtype=np.int64)
        first_pages = np.zeros_like(lengths)
        if window is not None:
            first_pages = np.maximum(lengths - window, 0) // self.block_size
        lengths -= first_pages * self.block_size
        num_pages = blocks_for(int(lengths.max()), self.block_size)
        tables = np.full((len(works), num_pages), self._null_block, dtype=np.int64)
        for row, (work, first) in enumerate(zip(works, first_pages, strict=True)):
            used = work.sequence.block_ids[first : first + num_pages]
            tables[row, : len(used)] = used
        num_kv_heads = self.model.config.shape.num_kv_heads
        num_slots, dtype = num_pages * self.block_size, self.model.embedding.dtype
        return DecodeView(
            page_rows(self._tensor(tables), num_kv_heads),
            padding_bias(self._tensor(lengths), num_slots, num_kv_heads, dtype, window),
        )

    def _prefill_span(self, work: Work, end: int) -> PrefillSpan:
        longest = work.start + work.num_tokens
        views = self._views(longest, lambda window: self._prefill_view(work, window))
        return PrefillSpan(end - work.num_tokens, end, views)

    def _prefill_view(self, work: Work, window: int | None) -> PrefillView:
        start, count, like = work.start, work.num_tokens, self.model.embedding
        if start == 0:
            bias = None if window is None else causal_bias(0, count, count, like, window)
            return PrefillView(None, bias)
        first = 0 if window is None else max(start + 1 - window, 0) // self.block_size
        table = work.sequence.block_ids[first : blocks_for(start + count, self.block_size)]
        rows = page_rows(self._tensor(np.array([table])), self.model.config.shape.num_kv_heads)
        start -= first * self.block_size
        return PrefillView(
            rows, causal_bias(start, count, len(table) * self.block_size, like, window)
        )

    def _views(self, longest: int, make: Callable[[int | None], View]) -> tuple[View, ...]:
        """One view for each window of the model; those that hide nothing are the same."""
        windows = [None if w is None or w >= longest else w for w in self._windows]
        made = {window: make(window) for window in dict.fromkeys(windows)}
        return tuple(made[window] for window in windows)

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
