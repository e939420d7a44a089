"""An engine of others behind a gate: its prefill chunks are fixed, and the gate holds the cap.

The gate sees no step. So it starts at the ceiling, and fits its step model to gaps alone.
"""

from dataclasses import replace

from msgspec import structs
from sluice_core.contract import StepModel
from sluice_core.steptime import REFIT_S, StepRecord
from sluice_operator.tuner import PodView
from sluice_worker.scheduling.step import BookedToken, Step

from .pod import SimulatedPod


class ForeignPod(SimulatedPod):
    """A gate before an engine whose token budget is `params.max_num_batched_tokens`."""

    is_profiled = keeps_gaps = False
    _prompt_ended_s = -1.0

    def view(self, now_s: float) -> PodView:
        seen = super().view(now_s)
        if seen.config is None:
            return seen
        return replace(seen, config=structs.replace(seen.config, cap_is="gate", chunk_is="fixed"))

    def _book(self, outcome: BookedToken, step: Step, now_s: float) -> None:
        if step.num_prefill_tokens:
            self._prompt_ended_s = now_s
        timer = self.open[outcome.sequence.request_id]
        is_first, last_s = timer.first_s is None, timer.last_s
        super()._book(outcome, step, now_s)
        if not is_first and self._prompt_ended_s > last_s:
            gaps = self.recorder.ticks.open.itl
            gaps.n_in_prefill += 1
            gaps.over_in_prefill += timer.last_was_over

    def _learn(self, step: Step, step_ms: float, now_s: float) -> StepModel | None:
        if step.num_decodes:
            gap_ms = step_ms + self.params.between_ms
            kinds = step.num_decodes, 0, step.num_prefill_tokens
            self.times.add(StepRecord(now_s, *kinds, gap_ms))
        if now_s - self._refitted_s < REFIT_S:
            return None
        self._refitted_s = now_s
        return self.times.refit(now_s)
