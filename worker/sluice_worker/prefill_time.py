"""What a first token takes besides waiting, learned from those that came. Pure.

The step model tells a prefill alone; chunks that share their steps with decodes take longer, and
the prefix cache spares some. Those who have to decide whether a deadline can be met need more than
the mean: under overload every request at the edge would be a coin toss. So the deviation is learned
as well, as TCP learns its retransmission timeout (RFC 6298).
"""

from .contract import StepModel

WEIGHT = 0.1
DEVIATIONS = 2.0
"""Mean deviations above the mean: with 2, 95 % of the accepted are in time at 3 x capacity."""
MAX_SLOWNESS = 20.0


class PrefillTime:
    """Ratios of measured to predicted time, and the share of prompts that is not cached."""

    def __init__(self) -> None:
        self._slowness = self._uncached_share = 1.0
        self._deviation = 0.0

    def learn(self, model: StepModel, num_tokens: int, cached_tokens: int, seconds: float) -> None:
        """A prompt of `num_tokens` had its first token `seconds` after its admission."""
        uncached = num_tokens - cached_tokens
        alone_ms = model.a + model.d * uncached
        if alone_ms > 0:
            error = min(max(1.0, seconds * 1e3 / alone_ms), MAX_SLOWNESS) - self._slowness
            self._slowness += WEIGHT * error
            self._deviation += WEIGHT * (abs(error) - self._deviation)
        self._uncached_share += WEIGHT * (uncached / num_tokens - self._uncached_share)

    def upper_ms(self, model: StepModel, num_tokens: int) -> float:
        """From admission to the first token sent, which few prompts of `num_tokens` exceed."""
        slowness = self._slowness + DEVIATIONS * self._deviation
        return slowness * (model.a + model.d * num_tokens * self._uncached_share)
