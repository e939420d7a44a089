"""A step's work as the law of steps reads it (`sluice_core.law`). Pure."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol

from sluice_core.law import Division, Gaps, Prompt, StepLoad
from sluice_core.port import EngineLimits

from .sequence import Sequence
from .step import StepWork


class ChunkLaw(Protocol):
    """Divides steps: `sluice_core.law.Law`, whose methods say more."""

    def divide(self, limits: EngineLimits, load: StepLoad) -> Division: ...
    def chunk_limit(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> int: ...
    def step_ms(self, decodes: int, kv_tokens: int, prompt_tokens: int) -> float | None: ...
    def price_s(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> float: ...


def shape_of(decodes: Seq[StepWork]) -> tuple[int, int]:
    """The number of `decodes`, and the context that they read."""
    return len(decodes), sum(work.start + 1 for work in decodes)


def load_of(
    decodes: Seq[StepWork],
    prompts: Iterable[Sequence],
    limits: EngineLimits,
    now: float,
    *,
    may_hold: bool,
) -> StepLoad:
    """The load of a step. `prompts`: those that may have a place beside `decodes`. Gaps of
    background sequences may be of any length."""
    num, kv_tokens = shape_of(decodes)
    sequences = (work.sequence for work in decodes if not work.sequence.is_background)
    return StepLoad(
        now_s=now,
        prompts=[_prompt(sequence, limits) for sequence in prompts if not sequence.has_first],
        num_decodes=num,
        num_reserved=num,
        kv_tokens=kv_tokens,
        decodes=(Gaps(s.num_output_tokens, s.num_late, s.is_in_time, s.first_s) for s in sequences),
        may_hold=may_hold,
    )


def _prompt(sequence: Sequence, limits: EngineLimits) -> Prompt:
    request = sequence.request
    # Another answer to one prompt finds that prompt in the cache.
    will_find = request.is_another and not sequence.has_begun
    left = 1 if will_find else max(sequence.prefill_left, 1)
    times = request.arrived_s, sequence.due_s(limits)
    return Prompt(sequence, left, sequence.num_tokens, *times, request.priority)


def room_for_drafts(decodes: Seq[StepWork], law: ChunkLaw, limits: EngineLimits) -> int:
    """Tokens for drafts beside `decodes` within the gap target."""
    left = max(limits.max_num_batched_tokens - len(decodes), 0)
    return min(left, max(law.chunk_limit(limits, *shape_of(decodes)), 0))
