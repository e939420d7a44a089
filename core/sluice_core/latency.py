"""The time of a step, and the batch that fits into a target. Pure.

Worker, operator and simulator share one law. It gives the largest batch, the largest chunk of
prefill, and the time of a request.
"""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import floor, inf

from msgspec import Struct

from .bounded import NonNegative

MIN_CHUNK_TOKENS = 32
"""Prefill tokens per step even if the step model leaves no room, so that every prefill ends."""
TARGET_MARGIN = 0.85
"""Share of the target that the predicted step quantile may fill. A step's record leaves out
the way to the socket: sampling, framing, the event loop."""
FIRST_CONTEXT = 512
"""Tokens of KV cache that the first cap allows each sequence, at most half of max_model_len: the
longest context at which a start times decodes. With 1,024 a CPU worker of short chats began at a
cap of 3 where 13 would hold, and had 3 to 10 points fewer smooth and good requests in 45 s of
bursts from cold. With 256 one of 830 tokens a request began too high: 5 to 10 points."""
NO_LIMIT = 1 << 30
STEPS_TO_END = 2
"""Steps within which a text or an image ends: that during which it comes, and its own."""
TAIL_QUANTILE = 0.995
"""Share of steps that are in time without a chunk and stay so with one. Two minutes give some
hundred records: at P99.9, two hiccups left no room for prefill. From 0.98 to 0.999 the chunks of a
GPU with five stalls in 40 s vary by 2 %. With 1.5 hiccups of 20 to 45 ms a second, chunks have 430
tokens on a median, at 0.98 1,170: 96 or 100 % of its requests are good, 81 smooth."""
NORMAL_TAIL = 2.41
"""A normal's P99.9 above its median, over its P90 above it. On the same GPU chunks grow by 6 % at
1.5 and shrink by 8 % at 3.5. With 15 % of noise these are 26 % and 35 %; smooth requests vary by 1
point."""


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

    `steps_ms`, `chunks_ms`: measured minus predicted times, ascending: of all recent steps, and of
    those with a chunk unless these are few. Not ratios: a hiccup (a throttled CPU, another process)
    lasts as long in a short step as in a long one. `stretch`: P90 of a prefill token's time over
    its mean, at least 1. A token after a long context takes longer, which a model linear in tokens
    cannot express. `chunk_ms`: mean time that a chunk of any size adds by itself, as where only
    steps without one are CUDA graphs.
    """

    steps_ms: Seq[float] = ()
    chunks_ms: Seq[float] = ()
    stretch: float = 1.0
    chunk_ms: float = 0.0

    def ms_within(self, room_ms: float) -> float:
        """Find what to leave for the tail where a step without a chunk leaves `room_ms`.

        A chunk answers only for what it adds. It may make one step in two hundred late, of those
        that would be in time without it. A residual over all the room is late anyway.

        Chunks are the longest steps, and so is their noise. There are some hundred at most, and the
        largest may be a hiccup. Their P99.9 is estimated from their P90, as if they were normal.
        """
        tail_ms = 0.0
        if num := bisect_right(self.steps_ms, room_ms):
            tail_ms = max(tail_ms, quantile(self.steps_ms, TAIL_QUANTILE, num))
        if num := bisect_right(self.chunks_ms, room_ms):
            median, high = (quantile(self.chunks_ms, share, num) for share in (0.5, 0.9))
            tail_ms = max(tail_ms, median + NORMAL_TAIL * (high - median))
        return tail_ms


def quantile(ordered: Seq[float], share: float, num: int) -> float:
    """Find the quantile of the first `num` of ascending values, as `np.quantile` does."""
    place = share * (num - 1)
    below = floor(place)
    low, high = ordered[below], ordered[min(below + 1, num - 1)]
    return low + (high - low) * (place - below)


def chunk_limit(
    law: StepLaw,
    tail: Tail,
    itl_ms: float,
    decodes: int,
    kv_tokens: int,
    slowdown: float = 1.0,
) -> int:
    """Prefill tokens that keep the step's tail within the target; may be negative."""
    room_ms = itl_ms - slowdown * law.step_ms(decodes, kv_tokens, 0)
    room_ms -= tail.ms_within(room_ms) + slowdown * tail.chunk_ms
    # A chunk's own context counts as well: at most itself, beside what came before it.
    per_token_ms = slowdown * (law.c + law.d * tail.stretch)
    return int(room_ms / per_token_ms) if per_token_ms > 0 else NO_LIMIT
