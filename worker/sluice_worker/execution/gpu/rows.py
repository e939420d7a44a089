"""The rows of a step that sample, and those of the step after it. Pure.

The device can run ahead: of the next step of decodes only the token ids are unknown, and these are
on the device. So it is launched before this step's tokens are read. Meanwhile the host schedules,
reports and admits. Rows depend only on their own sequence; rows of sequences that have ended are
discarded. Their writes lie behind the end of the sequence, in a block that is not full and so not
shared. A later owner writes before it reads.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ...scheduling.sequence import Sequence
from ...scheduling.step import StepWork
from ..sampler import Draw

DrawOf = Callable[[Sequence, int], Draw]
"""(sequence, tokens ahead of its next one) -> the draw of that token."""


@dataclass(frozen=True, slots=True)
class Row:
    """The token behind `position` of a sequence is sampled; `block` is where `position` lies.

    source: the row of the step before that sampled the token at `position`; -1: the host has it.
    """

    sequence: Sequence
    position: int
    block: int
    draw: Draw
    source: int = -1

    def is_of(self, work: StepWork, block_size: int) -> bool:
        """True if `work` asks for this row, at the same position and block."""
        return (
            work.sequence is self.sequence
            and (work.start, work.num_tokens, work.num_samples) == (self.position, 1, 1)
            and work.sequence.block_ids[self.position // block_size] == self.block
        )


def rows_of(works: Seq[StepWork], block_size: int, draw_of: DrawOf) -> list[Row] | None:
    """One row for each work that samples; None if one needs the host between the steps."""
    rows = []
    for work in works:
        sequence = work.sequence
        if work.num_samples > 1 or sequence.needs_prompt_scores:
            return None
        if not work.samples:
            continue
        row = _row(sequence, work.start + work.num_tokens - 1, block_size, draw_of, -1)
        if row is None:
            return None
        rows.append(row)
    return rows


def decodes_of(works: Seq[StepWork], draws: Seq[Draw], block_size: int) -> list[Row] | None:
    """One row for each work, however it is drawn; None unless all do no more than decode."""
    if not all(_only_decodes(work) for work in works):
        return None
    return [
        Row(work.sequence, work.start, work.sequence.block_ids[work.start // block_size], draw)
        for work, draw in zip(works, draws, strict=True)
    ]


def _only_decodes(work: StepWork) -> bool:
    sampled = work.num_tokens, work.num_samples
    return sampled == (1, 1) and not work.sequence.needs_prompt_scores


def rows_after(sampled: Iterable[tuple[int, Row]], block_size: int, draw_of: DrawOf) -> list[Row]:
    """The next step's rows, or none if one continuing sequence cannot run ahead.

    It would need a forward of its own beside the one that ran ahead.
    `sampled`: each row with its place among the device's kept tokens.
    """
    following = []
    for source, row in sampled:
        sequence, position = row.sequence, row.position + 1
        request = sequence.request
        if position + 1 - sequence.num_prompt_tokens >= request.max_tokens:
            continue  # the token that is being sampled is its last
        if position // block_size >= len(sequence.block_ids) or sequence.is_drafting:
            return []
        next_row = _row(sequence, position, block_size, draw_of, source)
        if next_row is None:
            return []
        following.append(next_row)
    return following


def _row(
    sequence: Sequence, position: int, block_size: int, draw_of: DrawOf, source: int
) -> Row | None:
    draw = draw_of(sequence, position + 1 - sequence.num_tokens)
    sampling = sequence.request.sampling
    if draw.is_edited or sampling.logprobs is not None or sampling.label_ids:
        return None
    return Row(sequence, position, sequence.block_ids[position // block_size], draw, source)
