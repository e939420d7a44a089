"""The worker's evidence, booked for many sequences at once: they share a step, and so its gap."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice_worker.contract import StepModel, Tick
from sluice_worker.evidence import Recorder
from sluice_worker.sketch import bucket_of
from sluice_worker.wire import Snapshot

from .job import Step


@dataclass(slots=True)
class Totals:
    """Of all ticks that were closed, those too that are kept no more: gaps, those over the target,
    and their sketch. `most_running`: in any step."""

    most_running: int = 0
    num_gaps: int = 0
    num_gaps_over: int = 0
    sketch: dict[int, int] = field(default_factory=dict)

    def add(self, running: int, num: int, num_over: int, sketch: dict[int, int]) -> None:
        """Add those of a tick, or of a pod."""
        self.most_running = max(self.most_running, running)
        self.num_gaps += num
        self.num_gaps_over += num_over
        for bucket_index, count in sketch.items():
            self.sketch[bucket_index] = self.sketch.get(bucket_index, 0) + count


class Recording(Recorder):
    """The worker's recorder, told of a whole step where the worker tells it of each token."""

    def __init__(self, boot_id: str, now_s: float, wall_s: float) -> None:
        super().__init__(boot_id, now_s, wall_s)
        self.totals = Totals()

    @property
    def next_seq(self) -> int:
        """Of the tick that is open."""
        return self._next_seq

    def take(
        self, ticks: Iterable[Tick], lengths: Iterable[int], state: Snapshot, model: StepModel
    ) -> None:
        """What was booked elsewhere since the last time."""
        for tick in ticks:
            self._ticks.append(tick)
            self._next_seq += 1
        for length in lengths:
            self._lengths.add(length)
        self.snapshot, self.step_model = state, model

    def _close(self, wall_s: float, throttled_s: float) -> None:
        super()._close(wall_s, throttled_s)
        tick = self._ticks[-1]
        self.totals.add(tick.max_running, tick.itl.n, tick.itl.over, tick.itl.sketch)

    def gaps(self, count: int, gap_s: float, *, at_cap: bool, after_over: int) -> bool:
        """`count` sequences each handed over a token after `gap_s`; whether that was over.

        `after_over`: how many of them had a gap over target just before.
        """
        share, gap_ms = self._tick.itl, gap_s * 1e3
        index = bucket_of(gap_ms)
        share.n += count
        share.sketch[index] = share.sketch.get(index, 0) + count
        if at_cap:
            share.n_at_cap += count
        is_over = self.slo.itl_ms is not None and gap_ms > self.slo.itl_ms
        if is_over:
            share.over += count
            share.over_at_cap += count * at_cap
            share.over_after_over += after_over
        return is_over

    def stepped(
        self, step: Step, num_tokens: int, after: tuple[int, int, int], *, is_slow: bool
    ) -> None:
        """A step, as `Recorder.step`; `after`: what runs then, and waits for the cap or for KV."""
        tick, step_s = self._tick, step.step_ms / 1e3
        tick.steps += 1
        tick.decodes += step.num_decodes
        tick.prefill_tokens += step.num_prefill_tokens
        tick.generated_tokens += num_tokens
        tick.busy_s += step_s
        tick.max_running = max(tick.max_running, step.num_running)
        tick.slow_steps += is_slow
        state = self.snapshot
        if (state.running, state.waiting_cap, state.waiting_kv) != after:
            self.see(Snapshot(*after, 0, 0, 0, 0, 0, 0, 0))
        if self._waiting:
            self._admit(step.started_s, step.num_running)
        if step.epoch == self.epoch:
            self._settle(step.num_running)
