"""Runs steps on the device: builds the mixed batch, one forward, one token per sampling row.

The only module of the engine that holds tensors between steps: the weights and the KV cache.
"""

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from sluice_core.model.sizing import blocks_for
from sluice_kernels.interface import Spans
from torch import Tensor
from torch.nn.functional import pad

from ..scheduling.edits import Editor
from ..scheduling.sequence import Sequence
from ..scheduling.step import StepWork
from .models.decoder import Decoder
from .models.step import StepInput
from .sampler import Draw, joined, sample, score, score_labels

Indices = NDArray[np.int64]
Tokens = dict[int, list[int | None]]
"""Sampled tokens of each work, by the work's identity."""
CACHE_LINE = 64
TOUCHED_AHEAD = 1 << 30
"""Bytes of unused pages touched in advance: the most that a burst takes. With a large, little used
pool, more would take memory from others."""
TOUCHED_AT_ONCE = 1 << 24
"""Bytes touched at once: a millisecond, or thirty on a virtual machine that gave memory back."""
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
        self._touched = 0 if self.device.type == "cpu" else num_blocks  # a GPU's are all there

    def _allocate(self, num_blocks: int) -> list[Tensor]:
        """Pages of zeros: masked slots are multiplied too. The last page is never written."""
        shape = self.model.config.shape
        page = (2, shape.num_kv_heads, self.block_size, shape.head_dim)
        dtype = self.model.embedding.dtype
        size = (num_blocks + 1, *page)
        return [_zeros(size, dtype, self.device) for _ in range(shape.num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(cache.nbytes for cache in self.caches)

    @property
    def is_ahead(self) -> bool:
        """True if the device has begun with the decodes of the next step."""
        return False

    @torch.inference_mode()
    def execute(self, works: Seq[StepWork], prefill_follows: bool = False) -> list[int | None]:
        """A token for each sampled position, in order; None if its logits are not finite.

        Requested scores are stored in their sequences. prefill_follows: the next step has prefill,
        so its decodes do not run ahead.
        """
        found = self._run(sorted(works, key=by_length))
        return [token for work in works for token in found[id(work)]]

    def _run(self, works: Seq[StepWork]) -> Tokens:
        """The same of `works` in the order of their lengths."""
        places = [(work, ahead) for work in works for ahead in range(work.num_samples)]
        draws = [self._draw(work.sequence, ahead) for work, ahead in places]
        logits, hidden = self._forward(works, draws)
        tokens = self._sample(logits, draws)
        self._score(logits, [work.sequence for work, _ in places], tokens)
        if hidden is not None:
            self._score_prompts(hidden, works)
        drawn = iter(tokens)
        return {id(work): [next(drawn) for _ in range(work.num_samples)] for work in works}

    def _forward(self, works: Seq[StepWork], draws: Seq[Draw]) -> tuple[Tensor, Tensor | None]:
        """Logits of all `draws`, and the last layer's output if prompts may be scored."""
        step = self.build(works)
        num_sampled = len(step.sampled_rows)
        sampled = pad(step.sampled_rows, (0, self._num_more(num_sampled)))
        scores_prompts = any(work.sequence.needs_prompt_scores for work in works)
        is_partial = num_sampled < len(step.positions) and not scores_prompts
        hidden = self.model.hidden(step, self.caches, sampled if is_partial else None)
        logits = self.model.logits(hidden if is_partial else hidden[sampled])[:num_sampled]
        return logits, hidden if scores_prompts else None

    def _sample(self, logits: Tensor, draws: Seq[Draw]) -> list[int | None]:
        return sample(logits, draws)

    def use_idle_time(self) -> bool:
        """Prepare something, in a fraction of a second; False if nothing is left to prepare."""
        return False

    def touch_ahead(self, first_unused: int) -> bool:
        """Touch some pages likely needed next; blocks from `first_unused` on are unused. False if
        enough are touched. So the system finds memory for them now and not in a step."""
        block_bytes = self.num_bytes // (self._null_block + 1)
        first = max(self._touched, first_unused)
        wanted = min(first_unused + TOUCHED_AHEAD // block_bytes, self._null_block)
        self._touched = max(first, min(first + max(TOUCHED_AT_ONCE // block_bytes, 1), wanted))
        self.clear(range(first, self._touched))
        return self._touched < wanted

    def clear(self, blocks: Seq[int]) -> None:
        """Zero the pages of `blocks`."""
        if not blocks:
            return
        rows = self._tensor(np.array(blocks, dtype=np.int64))  # one upload; the host does not wait
        for cache in self.caches:
            cache.index_fill_(0, rows, 0)

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
        for row, sequence in enumerate(sequences):
            if labels := sequence.request.sampling.label_ids:
                sequence.scores = score_labels(logits[row], labels)
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

    def _score_prompts(self, hidden: Tensor, works: Seq[StepWork]) -> None:
        end = 0
        for work in works:
            begin, end = end, end + work.num_tokens
            if work.sequence.needs_prompt_scores:
                self._score_prompt(hidden[begin:end], work)

    def _score_prompt(self, hidden: Tensor, work: StepWork) -> None:
        """Scores of the prompt tokens that follow those of `work` and have none yet."""
        sequence = work.sequence
        width = (sequence.request.sampling.prompt_logprobs or 0) + 1
        first = max(sequence.num_scored_tokens, work.start + 1)
        last = min(work.start + work.num_tokens, sequence.num_prompt_tokens - 1)
        parts = []
        for at in range(first, last + 1, PROMPT_ROWS):
            tokens = sequence.token_ids[at : min(at + PROMPT_ROWS, last + 1)]
            row = at - 1 - work.start
            logits = self.model.logits(hidden[row : row + len(tokens)])
            parts += score(logits, range(len(tokens)), tokens, [width] * len(tokens))
        if parts:
            sequence.prompt_scores = joined(parts)
            sequence.num_scored_tokens = last + 1

    def build(self, works: Seq[StepWork]) -> StepInput:
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
        token_ids += [0] * self._num_more(len(token_ids))
        return StepInput(
            token_ids=self._tensor(np.array(token_ids, dtype=np.int64)),
            positions=self._tensor(positions),
            blocks=self._tensor(blocks),
            slots=self._tensor(positions % self.block_size),
            plan=self.model.kernels.plan(self._spans(works, ends), self.caches[0], self._windows),
            sampled_rows=self._tensor(np.array(sampled, dtype=np.int64)),
        )

    def _num_more(self, num_rows: int) -> int:
        return self.model.kernels.round_rows(num_rows) - num_rows

    def _blocks(self, work: StepWork) -> Indices:
        table = np.array(work.sequence.block_ids, dtype=np.int64)
        return table[_positions(work) // self.block_size]

    def _spans(self, works: Seq[StepWork], ends: Indices) -> Spans:
        used = [blocks_for(work.start + work.num_tokens, self.block_size) for work in works]
        tables = np.full((len(works), max(used)), self._null_block, dtype=np.int64)
        for row, (work, count) in enumerate(zip(works, used, strict=True)):
            tables[row, :count] = work.sequence.block_ids[:count]
        starts = np.array([work.start for work in works], dtype=np.int64)
        offsets = np.concatenate([[0], ends])
        return Spans(*(torch.from_numpy(part) for part in (tables, starts, offsets)))

    def _tensor(self, values: Indices) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # torch.zeros does not use calloc. With calloc the system zeroes a page at its first touch, so a
    # large pool takes no time or memory before it is needed. It starts at a cache line, so that no
    # vector of a page crosses two.
    num_bytes = math.prod(size) * dtype.itemsize
    raw = np.zeros(num_bytes + CACHE_LINE, dtype=np.uint8)
    skipped = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[skipped : skipped + num_bytes]).view(dtype).view(size)


def by_length(work: StepWork) -> tuple[bool, int]:
    """Decodes first, shorter contexts before longer ones."""
    return work.num_tokens > 1, work.start


def _positions(work: StepWork) -> Indices:
    return np.arange(work.start, work.start + work.num_tokens, dtype=np.int64)
