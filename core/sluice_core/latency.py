"""The time of a step, and the batch that fits into a target. Pure.

Worker, operator and simulator share one law. It gives the largest batch, the largest chunk of
prefill, and the time of a request.
"""

from dataclasses import dataclass
from math import floor, inf

from msgspec import Struct

from .bounded import NonNegative

MIN_CHUNK_TOKENS = 32
"""Prefill tokens per step even if the step model leaves no room, so that every prefill ends."""
TARGET_MARGIN = 0.85
"""Share of the target that the predicted step quantile may fill. A step's record leaves out
the way to the socket: sampling, framing, the event loop."""
NO_LIMIT = 1 << 30


class StepLaw(Struct, frozen=True):
    """step_ms = a + b * decodes + c * kv_tokens + d * prefill_tokens."""

    a: NonNegative
    b: NonNegative
    c: NonNegative
    d: NonNegative

    def step_ms(self, decodes: float, kv_tokens: float, prefill_tokens: float) -> float:
        """Mean time of a step."""
        return self.a + self.b * decodes + self.c * kv_tokens + self.d * prefill_tokens

    def at_context(self, kv_per_seq: float) -> "StepLaw":
        """The law where each decode has `kv_per_seq` tokens: their time is part of `b`."""
        return StepLaw(self.a, self.b + self.c * kv_per_seq, 0.0, self.d)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Steps whose decodes all have a typical context, with their tail.

    `law`: a result of `StepLaw.at_context`. `stretch`: the asked quantile over the mean.
    `stall_ms`: time that the tail adds to every batch. One of the two is neutral.
    `correction`: at most 1, where measured gaps prove the tail too long.
    """

    law: StepLaw
    stretch: float = 1.0
    stall_ms: float = 0.0
    correction: float = 1.0

    def mean_ms(self, decodes: float, prefill_tokens: float) -> float:
        """Mean time of a step."""
        return self.law.step_ms(decodes, 0, prefill_tokens)

    def full_ms(self, cap: int) -> float:
        """Mean time of the longest step that is a gap of some request, at a full cap.

        Either all decode, or all but one decode beside the smallest prefill chunk of that one.
        """
        beside_chunk = self.mean_ms(cap - 1, MIN_CHUNK_TOKENS) if cap > 1 else 0.0
        return max(self.mean_ms(cap, 0), beside_chunk)

    def fitted_tail_ms(self, cap: int) -> float:
        """The asked quantile of a full cap's longest step, by the records of steps alone."""
        return self.full_ms(cap) * self.stretch + self.stall_ms

    def tail_ms(self, cap: int) -> float:
        """The asked quantile of a full cap's longest step."""
        return self.fitted_tail_ms(cap) * self.correction

    def largest_batch(self, tail_ms: float, ceiling: int) -> int:
        """The largest cap whose tail is at most `tail_ms`: 0..`ceiling`."""
        mean_ms = (tail_ms / self.correction - self.stall_ms) / self.stretch
        decodes = self._decodes_within(mean_ms - self.mean_ms(0, 0), ceiling)
        beside_chunk = self._decodes_within(mean_ms - self.mean_ms(0, MIN_CHUNK_TOKENS), ceiling)
        return min(decodes, beside_chunk + 1, ceiling)

    def _decodes_within(self, spare_ms: float, ceiling: int) -> int:
        if spare_ms <= 0:
            return 0
        decode_ms = self.law.b
        return ceiling if decode_ms * ceiling <= spare_ms else floor(spare_ms / decode_ms)

    def request_ms(self, concurrency: float, output_steps: float, prompt_tokens: float) -> float:
        """Time of one request among `concurrency`: its decodes, and the prefills of all."""
        decode = output_steps * self.mean_ms(concurrency, 0)
        return decode + concurrency * self.law.d * prompt_tokens

    def most_within(self, due_ms: float, output_steps: float, prompt_tokens: float) -> float:
        """The most requests at once such that each ends within `due_ms`. Infinite if one more costs
        nothing, under 1 if not even one is in time."""
        fixed_ms = self.request_ms(0, output_steps, prompt_tokens)
        each_ms = self.request_ms(1, output_steps, prompt_tokens) - fixed_ms
        return (due_ms - fixed_ms) / each_ms if each_ms > 0 else inf

    def prefill_s(self, prompt_tokens: float) -> float:
        """Seconds that the prefill of one prompt takes."""
        return self.law.d * prompt_tokens / 1000


def predicted_cap(
    law: StepLaw, resid_q: float, *, itl_ms: float, kv_per_seq: float, ceiling: int
) -> int:
    """The largest cap whose longest step stays within the inter-token target.

    `resid_q`: the step's tail over its mean. The cap is at least 1: only evidence can show that
    even one sequence misses the target.
    """
    step_time = StepTime(law.at_context(kv_per_seq), stretch=max(resid_q, 1.0))
    return max(1, step_time.largest_batch(TARGET_MARGIN * itl_ms, ceiling))


@dataclass(frozen=True, slots=True)
class Tail:
    """By how much steps exceed the model, times the slowdown of their interference.

    `ms`: measured minus predicted time: P99.5 of all steps or, if larger, P99.9 of the usual noise
    of chunks. Not a ratio: a hiccup (a throttled CPU, another process) lasts as long in a short
    step as in a long one. `stretch`: P90 of a prefill token's time over its mean, at least 1. A
    token after a long context takes longer, which a model linear in tokens cannot express.
    `chunk_ms`: mean time that a chunk of any size adds by itself, as where only steps without one
    are CUDA graphs.
    """

    ms: float = 0.0
    stretch: float = 1.0
    chunk_ms: float = 0.0


def chunk_limit(
    law: StepLaw,
    tail: Tail,
    itl_ms: float,
    decodes: int,
    kv_tokens: int,
    slowdown: float = 1.0,
) -> int:
    """Prefill tokens that keep the step's tail within the target; may be negative."""
    least_ms = law.step_ms(decodes, kv_tokens, 0) + tail.chunk_ms
    room_ms = itl_ms - max(tail.ms, 0.0) - slowdown * least_ms
    # A chunk's own context counts as well: at most itself, beside what came before it.
    per_token_ms = slowdown * (law.c + law.d * tail.stretch)
    return int(room_ms / per_token_ms) if per_token_ms > 0 else NO_LIMIT
