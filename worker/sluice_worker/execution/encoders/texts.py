"""The texts of one step as rows without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor


class EqualLengths(NamedTuple):
    """`num_texts` of `length` tokens each, in rows from `start` on."""

    start: int
    num_texts: int
    length: int

    @property
    def rows(self) -> slice:
        """Rows of the group."""
        return slice(self.start, self.start + self.num_texts * self.length)


@dataclass(frozen=True, slots=True)
class FlatTexts:
    """Texts in order of their lengths. Rows [offsets[i], offsets[i + 1]) are text i's.

    token_ids, positions, owners: int64 [num_rows]; `owners`: the text of each row. lengths: of
    each text, at least 1. skipped: int64 [num_texts], tokens of a prompt at the start of each.
    kinds: int64 [num_rows], 1 for the tokens of a pair's second text; None if there is none.
    """

    token_ids: Tensor
    positions: Tensor
    owners: Tensor
    lengths: tuple[int, ...]
    skipped: Tensor
    kinds: Tensor | None = None

    @staticmethod
    def of(
        token_ids: Sequence[Sequence[int]],
        device: torch.device,
        *,
        skipped: Sequence[int] | None = None,
        seconds: Sequence[int] | None = None,
    ) -> "FlatTexts":
        """Texts whose lengths ascend. `seconds`: tokens at the end of each that are the second
        text's."""
        lengths = tuple(map(len, token_ids))
        assert all(a <= b for a, b in zip(lengths, lengths[1:], strict=False))
        flat = [token_id for text in token_ids for token_id in text]
        counts = torch.tensor(lengths, dtype=torch.int64, device=device)
        starts = counts.cumsum(0) - counts
        owners = torch.repeat_interleave(counts)
        positions = torch.arange(len(owners), device=device) - starts[owners]
        kinds = None
        if seconds and any(seconds):
            firsts = counts - torch.tensor(seconds, dtype=torch.int64, device=device)
            kinds = (positions >= firsts[owners]).long()
        return FlatTexts(
            torch.tensor(flat, dtype=torch.int64, device=device),
            positions,
            owners,
            lengths,
            torch.tensor(skipped or [0] * len(lengths), dtype=torch.int64, device=device),
            kinds,
        )

    @property
    def offsets(self) -> list[int]:
        """The first row of each text, and the number of rows."""
        return [0, *accumulate(self.lengths)]

    def groups(self) -> list[EqualLengths]:
        """Texts of one length, whose attention is one product."""
        found, start = [], 0
        for length, same in groupby(self.lengths):
            count = sum(1 for _ in same)
            found.append(EqualLengths(start, count, length))
            start += count * length
        return found
