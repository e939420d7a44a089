"""The time of a first token besides waiting, learned from earlier first tokens. Pure.

The step model gives the time of a prefill alone. HTTP, a busy event loop and decodes in the same
steps add to it; the prefix cache saves some. With only the mean, admission under overload would be
a coin toss for every request at the edge. So the deviation is learned as well, as in TCP's
retransmission timeout (RFC 6298).
"""

import math

from sluice_core.contract import StepModel

WEIGHT = 0.1
DEVIATIONS = 2.0
"""Mean deviations above the mean: with 2, 95 % of accepted requests are in time at 3 x capacity."""
MAX_SLOWNESS = 20.0
OVERHEAD_MS = 30.0
"""A prefill of this time alone teaches both parts of an `Excess` equally. A shorter one mostly
teaches the added part; else a chat's HTTP cost would be multiplied for a long prompt."""
FADE_S = 60.0
"""Without new values an `Excess` fades by e in this time: refused requests teach nothing."""


class Excess:
    """added_ms + factor * alone_ms, followed by steps of normalised least mean squares."""

    def __init__(self) -> None:
        self._added_ms = self._factor = 0.0

    def at(self, alone_ms: float) -> float:
        return self._added_ms + self._factor * alone_ms

    def follow(self, alone_ms: float, measured_ms: float) -> None:
        """Go `WEIGHT` of the way to `measured_ms`."""
        error_ms = measured_ms - self.at(alone_ms)
        step = WEIGHT * error_ms / (OVERHEAD_MS**2 + alone_ms**2)
        self._added_ms = max(0.0, self._added_ms + step * OVERHEAD_MS**2)
        self._factor = max(0.0, self._factor + step * alone_ms)

    def fade(self, kept: float) -> None:
        self._added_ms *= kept
        self._factor *= kept


class PrefillTime:
    """The excess over the model, and the uncached share of prompts."""

    def __init__(self) -> None:
        self._mean, self._deviation = Excess(), Excess()
        self._uncached_share = 1.0
        self._learned_s = 0.0

    def learn(
        self, model: StepModel, num_tokens: int, cached_tokens: int, seconds: float, now_s: float
    ) -> None:
        """Learn the `seconds` from admission to first token of a prompt of `num_tokens`."""
        kept, self._learned_s = self._kept(now_s), now_s
        self._mean.fade(kept)
        self._deviation.fade(kept)
        uncached = num_tokens - cached_tokens
        alone_ms = model.a + model.d * uncached
        excess_ms = max(0.0, min(seconds * 1e3, MAX_SLOWNESS * alone_ms) - alone_ms)
        error_ms = abs(excess_ms - self._mean.at(alone_ms))
        self._mean.follow(alone_ms, excess_ms)
        self._deviation.follow(alone_ms, error_ms)
        self._uncached_share += WEIGHT * (uncached / num_tokens - self._uncached_share)

    def uncached(self, num_tokens: int) -> float:
        """Mean number of tokens to compute of a prompt of `num_tokens`."""
        return num_tokens * self._uncached_share

    def upper_ms(self, model: StepModel, num_tokens: int, now_s: float) -> float:
        """Time from admission to the first token that few prompts of `num_tokens` exceed."""
        alone_ms = model.a + model.d * self.uncached(num_tokens)
        excess_ms = self._mean.at(alone_ms) + DEVIATIONS * self._deviation.at(alone_ms)
        return alone_ms + self._kept(now_s) * excess_ms

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._learned_s) / FADE_S)
