"""The engine's side of the evidence: its state, its steps, and the learned step model. Pure.

A foreign engine sends no step reports: its load stays as it is, and there is no step model.
"""

from sluice_core.contract import StepModel
from sluice_core.port import NO_MEMORY, EngineFacts, EngineLoad, EngineStep, FirstParts

from .open_tick import Cause
from .prefill_time import PrefillTime
from .ticks import Ticks


class EngineSide:
    """The engine's state and step model; its steps are counted into `ticks`.

    `price_s`: seconds that the order assumes for a prefill token. `last_lack`: the cause of the
    last request's wait.
    """

    def __init__(self, ticks: Ticks) -> None:
        self.load = EngineLoad()
        self.step_model: StepModel | None = None
        self.price_s = 0.0
        self.memory = NO_MEMORY
        self.last_lack: Cause = "cap"
        self._ticks = ticks
        self._prefill_time = PrefillTime()

    def serves(self, facts: EngineFacts) -> None:
        """Take its measurements of its start."""
        self.memory, self.step_model = facts.memory, facts.step_model

    def step(self, step: EngineStep) -> None:
        """Count a step. What it did for background requests is not counted; a part that is larger
        than the whole counts as all of it."""
        tick, behind = self._ticks.open, step.background
        num_running = max(step.num_running - behind.running, 0)
        if num_running or not behind.running:
            tick.steps += 1
            tick.decodes += max(step.num_decodes - behind.decodes, 0)
            tick.prefill_tokens += max(step.num_prefill_tokens - behind.prefill_tokens, 0)
            tick.generated_tokens += max(step.num_tokens - behind.tokens, 0)
            tick.busy_s += step.step_s
            tick.max_running = max(tick.max_running, num_running)
            tick.slow_steps += step.is_slow
        if step.step_model is not None:
            self.step_model = step.step_model
        self.price_s = step.price_s
        if step.epoch == self._ticks.epoch:
            self._ticks.settle(num_running)

    def see(self, load: EngineLoad) -> None:
        """Take the engine's newer state."""
        self.load = load
        if load.waiting:
            self.last_lack = self.waiting_cause

    @property
    def waiting_cause(self) -> Cause:
        """The lack for which most of the waiting requests wait."""
        return "kv" if self.load.waiting_kv > self.load.waiting_cap else "cap"

    @property
    def num_free(self) -> int:
        """Places for newcomers at the next step; none while others wait."""
        free = self._ticks.cap - self.load.running
        return 0 if self.load.waiting else max(0, free)

    def learn(self, num_tokens: int, parts: FirstParts, ttft_s: float, now_s: float) -> None:
        """Learn that a prompt of `num_tokens` had its first token after `ttft_s`."""
        if self.step_model is None:
            return
        # With an order, the forecast adds the wait for other prompts.
        seconds = ttft_s - parts.wait_cap_s - parts.wait_kv_s - parts.passed_s
        self._prefill_time.learn(self.step_model, num_tokens, parts.cached_tokens, seconds, now_s)

    def prefill_ms(self, num_tokens: int, now_s: float) -> float:
        """From admission to the first token sent, with a margin; 0 without a step model."""
        model = self.step_model
        return 0.0 if model is None else self._prefill_time.upper_ms(model, num_tokens, now_s)

    def uncached(self, num_tokens: int) -> float:
        """Mean number of tokens to compute of a prompt of `num_tokens`."""
        return self._prefill_time.uncached(num_tokens)
