"""The token budget of the next step. Pure.

Decodes come first, each with its drafts. Prefill gets the tokens that keep the step within the
inter-token target, but always a smallest chunk, so that it ends.
"""

from sluice_core.contract import StepModel
from sluice_core.latency import MIN_CHUNK_TOKENS
from sluice_core.steptime import MIN_JUDGED, REFIT_S, StepRecord, StepTimes
from sluice_core.wire import EngineLimits


class Budget:
    """The step model, and the budgets that follow from it.

    The model is fitted once a second, and after each of the first steps: vLLM brings no profile.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self.num_steps = 0
        self._refitted_s = 0.0

    def tokens(
        self, limits: EngineLimits, decodes: int, kv_tokens: int, per_decode: int = 1
    ) -> int:
        """The token budget of a step with prefill. `per_decode`: a token and its drafts."""
        reserved = decodes * per_decode
        room = max(limits.max_num_batched_tokens - reserved, 1)
        chunk = self.times.chunk_limit(limits.itl_ms, decodes, kv_tokens)
        return reserved + min(room, max(chunk, MIN_CHUNK_TOKENS))

    def learn(self, record: StepRecord) -> StepModel | None:
        """Remember a step; returns the model if it was fitted anew."""
        self.num_steps += 1
        self.times.add(record)
        if self.num_steps > MIN_JUDGED and record.at_s - self._refitted_s < REFIT_S:
            return None
        self._refitted_s = record.at_s
        return self.times.refit(record.at_s)
