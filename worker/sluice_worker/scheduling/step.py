"""One step as values: its work and its results. Pure."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from sluice_core.contract import AT_CAP_SHARE
from sluice_core.port import Background, EngineLimits, FinishReason

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepWork:
    """Tokens [start, start + num_tokens) of one sequence; `samples`: it yields the next token.

    `drafts`: guesses behind the sequence's own last token, counted in `num_tokens`; every position
    from that token on is sampled. `is_padding`: of a static batch, computed and discarded.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()
    is_padding: bool = False

    @property
    def is_decode(self) -> bool:
        """True if it is one token, with drafts or without."""
        return self.num_tokens == 1 + len(self.drafts)

    @property
    def num_samples(self) -> int:
        """Number of sampled positions: the last ones."""
        return 1 + len(self.drafts) if self.samples else 0

    @property
    def token_ids(self) -> list[int]:
        """The model's input."""
        own = self.sequence.token_ids[self.start : self.start + self.num_tokens]
        return [*own, *self.drafts]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass: its work, decodes first, and the record that the step model is fitted on.

    `num_kv_tokens`: context lengths summed over the work. `num_running`, `at_cap`: at its start.
    `num_decodes` excludes padding, `num_prefill_tokens` excludes drafts: both have own counts.
    `admitted`: requests that began with it. `prefill_follows`: the next step has prefill.
    `scores_prompts`: it scores prompts, so it takes longer than its numbers predict. `is_long`: the
    law made it longer than the gap target, for first tokens.
    """

    works: tuple[StepWork, ...]
    num_decodes: int
    num_kv_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int
    num_padding: int
    scores_prompts: bool
    num_running: int
    at_cap: bool
    limits: EngineLimits
    background: Background
    admitted: tuple[str, ...] = ()
    prefill_follows: bool = False
    is_long: bool = False

    @classmethod
    def of(
        cls,
        works: Seq[StepWork],
        num_running: int,
        limits: EngineLimits,
        admitted: Iterable[str],
        prefill_follows: bool,
        *,
        is_long: bool = False,
    ) -> "Step":
        """The step that does `works`."""
        num_draft_tokens = sum(len(work.drafts) for work in works)
        num_padding = sum(work.is_padding for work in works)
        num_decodes = sum(work.is_decode for work in works) - num_padding
        num_tokens = sum(work.num_tokens for work in works)
        return cls(
            works=tuple(works),
            num_decodes=num_decodes,
            num_kv_tokens=sum(work.start + work.num_tokens for work in works),
            num_prefill_tokens=num_tokens - num_decodes - num_draft_tokens - num_padding,
            num_draft_tokens=num_draft_tokens,
            num_padding=num_padding,
            scores_prompts=any(work.sequence.needs_prompt_scores for work in works),
            num_running=num_running,
            at_cap=num_running >= AT_CAP_SHARE * limits.cap,
            limits=limits,
            background=_background(works),
            admitted=tuple(admitted),
            prefill_follows=prefill_follows,
            is_long=is_long,
        )


def _background(works: Iterable[StepWork]) -> Background:
    own = [work for work in works if work.sequence.is_background]
    decodes = sum(work.is_decode for work in own)
    num_tokens = sum(work.num_tokens - len(work.drafts) for work in own)
    return Background(decodes, num_tokens - decodes, running=len(own))


@dataclass(frozen=True, slots=True)
class BookedToken:
    """A step's result for one sequence: a token, or a failure (`token_id` None)."""

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_preemptions: int = 0
    preempted_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
