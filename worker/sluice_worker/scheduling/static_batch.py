"""Static batching: fill a batch, run it to the end of its longest, then the next. Pure.

It serves comparisons and uniform offline work. An ended sequence keeps its row and blocks until the
batch ends. The row is computed and discarded, as in a padded engine. Prompts are not padded to the
longest, so this baseline is faster than most.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class StaticBatching:
    """A batch starts with `size` sequences, or with fewer once the first has waited `timeout_s`."""

    size: int
    timeout_s: float

    def places(self, waiting: Seq[Sequence], running: Seq[Sequence], now: float) -> int:
        """Sequences that the next batch may start with; 0 before it does."""
        may_start = not running and waiting and now >= self.starts_at(waiting)
        return self.size if may_start else 0

    def starts_at(self, waiting: Seq[Sequence]) -> float:
        """The time at which a batch of `waiting` starts if no other request comes."""
        return waiting[0].queued_s + (self.timeout_s if len(waiting) < self.size else 0.0)
