"""The engine's side of the evidence: its state, its steps, and the learned step model. Pure.

A foreign engine sends no step reports: its snapshot stays as it is, and there is no step model.
"""

from sluice_core.contract import MemoryReport, StepModel
from sluice_core.wire import FirstToken, Ready, Snapshot, StepReport

from .open_tick import Cause
from .prefill_time import PrefillTime
from .ticks import Ticks

NOTHING = Snapshot(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


class EngineSide:
    """The engine's state and step model; its steps are counted into `ticks`.

    `price_s`: seconds that the order assumes for a prefill token. `last_lack`: the cause of the
    last request's wait.
    """

    def __init__(self, ticks: Ticks) -> None:
        self.snapshot = NOTHING
        self.step_model: StepModel | None = None
        self.price_s = 0.0
        self.memory = MemoryReport(planned={}, measured={}, kv_tokens=0)
        self.last_lack: Cause = "cap"
        self._ticks = ticks
        self._prefill_time = PrefillTime()

    def ready(self, ready: Ready) -> None:
        """Take its measurements of its start."""
        self.memory, self.step_model = ready.memory, ready.step_model

    def step(self, report: StepReport) -> None:
        tick = self._ticks.open
        tick.steps += 1
        tick.decodes += report.num_decodes
        tick.prefill_tokens += report.num_prefill_tokens
        tick.generated_tokens += len(report.tokens)
        tick.busy_s += report.step_s
        tick.max_running = max(tick.max_running, report.num_running)
        tick.slow_steps += report.is_slow
        if report.step_model is not None:
            self.step_model = report.step_model
        self.price_s = report.price_s
        self.see(report.snapshot)
        if report.epoch == self._ticks.epoch:
            self._ticks.settle(report.num_running)

    def see(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        if snapshot.waiting:
            self.last_lack = self.waiting_cause

    @property
    def waiting_cause(self) -> Cause:
        """The lack for which most of the waiting requests wait."""
        return "kv" if self.snapshot.waiting_kv > self.snapshot.waiting_cap else "cap"

    @property
    def num_free(self) -> int:
        """Places for newcomers at the next step; none while others wait."""
        free = self._ticks.cap - self.snapshot.running
        return 0 if self.snapshot.waiting else max(0, free)

    def learn(self, num_tokens: int, parts: FirstToken, ttft_s: float, now_s: float) -> None:
        """A prompt of `num_tokens` has its first token after `ttft_s`."""
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
