"""Edits of one request's logits by its parameters, as index arrays. No torch, no clock.

Penalties count tokens as they come, so a step costs only the new tokens, not the whole text.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sluice_core.work import Sampling

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """The edits of one row. Token ids are in the vocabulary, each at most once per array.

    `allowed` None: all. `seen`: tokens with penalties. Positive logits are divided by
    `repetition`, others multiplied; then all are lowered by `charge`.
    """

    allowed: Ids | None
    bias_ids: Ids
    bias: Values
    seen: Ids
    repetition: float
    charge: Values


class Editor:
    """Makes the edits of one sequence as it grows."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], vocab_size: int) -> None:
        bias = {i: value for i, value in sampling.logit_bias.items() if 0 <= i < vocab_size}
        self._sampling = sampling
        self._allowed = None
        if sampling.allowed_token_ids is not None:
            self._allowed = _within(sampling.allowed_token_ids, vocab_size)
        self._bias_ids = np.array(list(bias), dtype=np.int64)
        self._bias = np.array(list(bias.values()), dtype=np.float32)
        self._num_prompt = len(prompt)
        self._num_counted = len(prompt)
        self._seen = array("q")
        self._counts = array("d")  # of the output only
        self._slots: dict[int, int] = {}
        if sampling.repetition_penalty != 1:
            for token in _within(set(prompt), vocab_size).tolist():
                self._slot(token)

    def edits(self, token_ids: Sequence[int]) -> Edits:
        """The edits for the token that follows `token_ids`, which only ever grow."""
        self._count(token_ids)
        sampling = self._sampling
        counts = np.array(self._counts, dtype=np.float64)
        charge = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
        return Edits(
            allowed=self._allowed,
            bias_ids=self._bias_ids,
            bias=self._bias,
            seen=np.array(self._seen, dtype=np.int64),
            repetition=sampling.repetition_penalty,
            charge=charge.astype(np.float32),
        )

    def bad_words(self, token_ids: Sequence[int]) -> Iterable[int]:
        """Tokens that would complete a bad word whose beginning ends the output."""
        last = token_ids[-1] if len(token_ids) else None
        for word in self._sampling.bad_words:
            if len(word) > 1 and word[-2] != last:
                continue  # true for nearly all: a slice for each of 256 words took 100 ms a step
            start = len(token_ids) - len(word) + 1
            if start >= self._num_prompt and tuple(token_ids[start:]) == word[:-1]:
                yield word[-1]

    def _count(self, token_ids: Sequence[int]) -> None:
        sampling = self._sampling
        if (
            sampling.repetition_penalty == 1
            and not sampling.presence_penalty
            and not sampling.frequency_penalty
        ):
            return
        for token in token_ids[self._num_counted :]:
            self._counts[self._slot(token)] += 1
        self._num_counted = len(token_ids)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._seen)
            self._seen.append(token)
            self._counts.append(0)
        return slot


def _within(tokens: Iterable[int], vocab_size: int) -> Ids:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), dtype=np.int64)
