"""Drafts of sequences that speculate: added to decodes, verified, counted. Pure."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

from ..base.config import NgramSpeculation
from .kv_cache import KvCache
from .sequence import Sequence
from .speculation import (
    INDEXED_PER_STEP,
    Drafter,
    Growth,
    draft_length,
    is_eligible,
    num_right,
)
from .step import Counters, StepWork


class Verified(NamedTuple):
    """A verified draft. `tokens`: `num_right` right drafts and the model's next token; None stands
    for NaN logits. `is_spoiled`: a NaN lies behind them."""

    tokens: Seq[int | None]
    num_right: int
    is_spoiled: bool


class Drafts:
    """The drafts of all sequences that may speculate."""

    def __init__(self, config: NgramSpeculation, cache: KvCache, counters: Counters) -> None:
        self._config = config
        self._cache = cache
        self._counters = counters
        counters.accepted_by_position = [0] * config.num_speculative_tokens

    def watch(self, sequence: Sequence) -> None:
        """Give a newcomer its drafter, if its output can be guessed."""
        if is_eligible(sequence.request):
            sequence.drafter = Drafter(self._config)

    def add_to(self, decodes: list[StepWork], room: int, growth: Growth) -> list[StepWork]:
        """`decodes`, with drafts of at most `room` tokens if they are worth the step's time."""
        num_drafting = sum(work.sequence.is_drafting for work in decodes)
        if not num_drafting:
            return decodes
        num_decodes, kv_tokens = len(decodes), sum(work.start + 1 for work in decodes)
        length = draft_length(
            min(self._config.num_speculative_tokens, room // num_drafting),
            num_drafting,
            num_decodes,
            lambda drafted: growth(num_decodes, kv_tokens, drafted),
        )
        return [self._with_draft(work, length) for work in decodes]

    def _with_draft(self, work: StepWork, length: int) -> StepWork:
        sequence = work.sequence
        left = sequence.request.max_tokens - sequence.num_output_tokens
        most = min(length, left - 1)
        if most < 1 or sequence.drafter is None or not sequence.drafter.is_on:
            return work
        drafts = sequence.drafter.draft(sequence.token_ids, most)
        if not drafts or not self._cache.extend_for_drafts(sequence, len(drafts)):
            return work
        return replace(work, num_tokens=1 + len(drafts), drafts=drafts)

    def verify(self, work: StepWork, sampled: Seq[int | None]) -> Verified:
        """Keep the drafts that the model itself chose, and the token after them."""
        right = num_right(work.drafts, sampled)
        tokens = sampled[: right + 1]
        if sampled[right] is None and right < len(work.drafts):
            # A guess behind it may have spoiled it: kernels multiply it by a weight of zero, and
            # NaN remains.
            work.sequence.drafter, tokens = None, sampled[:right]
        return Verified(tokens, right, None in sampled[len(tokens) :])

    def count(self, work: StepWork, verified: Verified, num_booked: int) -> None:
        """Count a draft that put `num_booked` tokens into the output."""
        num_accepted = num_booked - (len(verified.tokens) > verified.num_right)
        self._counters.num_drafts += 1
        self._counters.draft_tokens += len(work.drafts)
        for position in range(num_accepted):
            self._counters.accepted_by_position[position] += 1
        if work.sequence.drafter is not None:
            work.sequence.drafter.judge(len(work.drafts), verified.num_right)

    def show(self, running: Iterable[Sequence]) -> None:
        """Let each drafter see its text after a step: at most INDEXED_PER_STEP tokens in all.

        The first take as many as they need, so all catch up in order of arrival.
        """
        left = INDEXED_PER_STEP
        for sequence in running:
            if sequence.drafter is not None:
                left -= sequence.drafter.see(sequence.token_ids, left)
