"""The worker's evidence with its totals over all ticks."""

from dataclasses import dataclass, field

from sluice_frontend.evidence.recorder import Recorder


@dataclass(slots=True)
class Totals:
    """Sums over all closed ticks: gaps, those over the target, and their sketch. `most_running`: in
    any step."""

    most_running: int = 0
    num_gaps: int = 0
    num_gaps_over: int = 0
    sketch: dict[int, int] = field(default_factory=dict)

    def add(self, running: int, num: int, num_over: int, sketch: dict[int, int]) -> None:
        self.most_running = max(self.most_running, running)
        self.num_gaps += num
        self.num_gaps_over += num_over
        for bucket_index, count in sketch.items():
            self.sketch[bucket_index] = self.sketch.get(bucket_index, 0) + count


class Recording(Recorder):
    """The worker's recorder, which adds up all ticks."""

    def __init__(self, boot_id: str, now_s: float, wall_s: float) -> None:
        super().__init__(boot_id, now_s, wall_s)
        self.totals = Totals()

    def advance(self, now_s: float, wall_s: float, throttled_s: float) -> None:
        last_seq = self.ticks.next_seq - 1
        super().advance(now_s, wall_s, throttled_s)
        for tick in self.ticks.after(last_seq):
            self.totals.add(tick.max_running, tick.itl.n, tick.itl.over, tick.itl.sketch)
