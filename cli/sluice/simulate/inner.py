"""Another engine with our scheduler inside (`sluice_vllm`): it sees steps, but has no profile."""

from sluice_core.contract import StepModel
from sluice_core.steptime import MIN_JUDGED
from sluice_worker.scheduling.step import Step

from .pod import SimulatedPod


class InnerPod(SimulatedPod):
    """The worker's scheduler without a start-up profile. It fits its model after each of the first
    steps, as `sluice_vllm.steering` does."""

    is_profiled = False
    _num_steps = 0

    def _learn(self, step: Step, step_ms: float, now_s: float) -> StepModel | None:
        self._num_steps += 1
        if self._num_steps <= MIN_JUDGED:
            self._refitted_s = float("-inf")
        return super()._learn(step, step_ms, now_s)
