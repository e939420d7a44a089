"""Health means progress: an engine is live if it is idle or its step counter moved lately. Pure.

A busy engine is not dead: a long prefill moves the counter only at its end. So the timeout bounds
the longest step, beyond what the prompts under way explain (`allowance_s`).
"""

from dataclasses import dataclass, field

from sluice_core.contract import Hung
from sluice_core.errors import timestamp

LOADING_TIMEOUT_S = 1800.0
"""Seconds of silence after which a starting engine is not live; each of its phases reports."""
READY_SHARE = 0.5
"""Share of the liveness timeout after which a stalled engine is no longer sent new work."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a probe, and its reason for people."""

    ok: bool
    reason: str
    phase: str = "serving"
    percent: int = 100


@dataclass(slots=True)
class Liveness:
    """The last known state of the engine process; times are monotonic seconds.

    `created_s`: Unix time at `now_s`. `heard_s`: the last message. `moved_s`: the last time that
    the step counter moved or the engine was idle. `has_served`: it has, and has told of no new
    start since; then its silence is a hang, also for somebody who has just come (a gate).
    """

    now_s: float
    created_s: float = 0.0
    phase: str = "process"
    percent: int = 0
    is_serving: bool = False
    has_served: bool = False
    is_draining: bool = False
    death: str | None = None
    steps: int = 0
    has_work: bool = False
    allowance_s: float = 0.0
    heard_s: float = field(init=False)
    moved_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.heard_s = self.moved_s = self.now_s

    def starting(self, phase: str, percent: int, now_s: float) -> None:
        self.is_serving = self.has_served = False
        self.phase, self.percent, self.heard_s = phase, percent, now_s

    def serving(self, now_s: float) -> None:
        self.is_serving = self.has_served = True
        self.phase, self.percent = "serving", 100
        self.heard_s = self.moved_s = now_s

    def stepped(self, now_s: float) -> None:
        self.heard_s = self.moved_s = now_s

    def beat(
        self,
        steps: int,
        has_work: bool,
        now_s: float,
        *,
        allowance_s: float = 0.0,
        is_heard: bool = True,
    ) -> None:
        """Note a heartbeat: its steps, and whether the engine has work. `allowance_s`: silence
        that this work explains, beyond the timeout. `is_heard`: False if only the counter may tell
        that the engine lives."""
        is_moving = steps != self.steps
        if is_heard or is_moving:
            self.heard_s = now_s
        if is_moving or not has_work:
            self.moved_s = now_s
        self.steps, self.has_work, self.allowance_s = steps, has_work, allowance_s

    def work_arrived(self, now_s: float) -> None:
        """Work was sent; an idle engine must make a step, counted from now on."""
        if not self.has_work:
            self.has_work, self.moved_s = True, now_s

    def died(self, reason: str) -> None:
        self.death = reason

    def liveness(self, now_s: float, timeout_s: float) -> Verdict:
        """A probe that fails if a restart would help."""
        if self.death is not None:
            return Verdict(False, self.death, "dead", 0)
        if not self.has_served:
            silent_s = now_s - self.heard_s
            if silent_s > LOADING_TIMEOUT_S:
                reason = f"starting: {self.phase}, and nothing was heard for {silent_s:.0f} s"
                return Verdict(False, reason, self.phase, self.percent)
            return Verdict(True, f"starting: {self.phase}", self.phase, self.percent)
        stalled_s = now_s - self._stalled_since_s
        if stalled_s > timeout_s + self.allowance_s:
            return Verdict(False, f"{self._hung.reason} ({stalled_s:.0f} s)", "hung")
        return Verdict(True, "ok" if self.is_serving else f"starting: {self.phase}", self.phase)

    def hung(self, now_s: float, timeout_s: float) -> Hung | None:
        """Since when the engine is hung; None if it is not, or if it has ended."""
        return self._hung if self.progress(now_s, timeout_s).phase == "hung" else None

    def progress(self, now_s: float, timeout_s: float) -> Verdict:
        """A probe that fails if the engine is not likely to answer soon."""
        return self.liveness(now_s, timeout_s * READY_SHARE)

    def health(self, now_s: float, timeout_s: float) -> Verdict:
        """A probe that fails while the engine starts, as vLLM's clients expect."""
        live = self.progress(now_s, timeout_s)
        return Verdict(live.ok and self.is_serving, live.reason, live.phase, live.percent)

    def readiness(self, now_s: float, timeout_s: float) -> Verdict:
        """A probe that fails if no new work should be sent."""
        up = self.health(now_s, timeout_s)
        if not up.ok:
            return up
        if self.is_draining:
            return Verdict(False, "draining: the worker is shutting down", "draining")
        return Verdict(True, "ok")

    @property
    def _stalled_since_s(self) -> float:
        """The last progress: of steps while there is work, of heartbeats always."""
        return min(self.heard_s, self.moved_s) if self.has_work else self.heard_s

    @property
    def _hung(self) -> Hung:
        """Constant while there is no progress, so that conditions compare equal."""
        since_s = self.created_s + self._stalled_since_s - self.now_s
        missing = "step, though there is work," if self.has_work else "sign of life"
        reason = f"the engine process is hung: no {missing} since {timestamp(since_s)}"
        return Hung(since_s, reason)
