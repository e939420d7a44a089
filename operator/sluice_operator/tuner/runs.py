"""What spans of ticks add up to, worked out once for those that were there at the last look.

A closed tick never changes, and half an hour of them is read every two seconds. So what is made of
a whole run of spans is kept with it, and runs are found again by what they hold.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import chain, count
from time import monotonic
from typing import Any, TypeVar

from sluice_worker.contract import TICK_SECONDS, Tick

from . import constants as k
from . import sketch
from .detect import NOTHING, Bets, Capital, Series, evidence_of

Part = tuple[Tick, ...]
Reading = Callable[[Tick], tuple[int, int]]
Count = Callable[..., Series]
T = TypeVar("T")
_UNUSED_S = 5 * TICK_SECONDS
"""A run that no look has used for so long is let go: looks are a tick apart."""
_numbers = count()


class Run:
    """Successive spans of a tick. `number`: no other run's; `used_s`: when it was last found."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self.number, self.used_s = next(_numbers), 0.0
        self._hash = hash((parts[0][0].boot_id, parts[0][0].seq))
        self._known: dict[Any, tuple[Any, Any]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether it will not grow, nor lose its first ticks before all of them."""
        return len(self.parts) == k.RUN_TICKS

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.parts == other.parts

    def with_others(self, work: Callable[..., T], reading: Hashable, runs: Sequence["Run"]) -> T:
        """`work(runs, reading)`; kept here, so that it goes with this run, which is the newest."""
        key = work, reading, tuple(run.number for run in runs)
        if key not in self._known:
            self._known[key] = ((), work(runs, reading))
        made: T = self._known[key][1]
        return made

    def of(self, work: Callable[..., T], reading: Hashable, *rest: Any) -> T:
        """`work(parts, reading, *rest)`; kept until it is asked for with another `rest`."""
        known = self._known.get((work, reading))
        if known is None or known[0] != rest:
            known = self._known[work, reading] = (rest, work(self.parts, reading, *rest))
        made: T = known[1]
        return made


class Spans:
    """The spans of a tick that count, oldest first: of each, the ticks of all pods."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._runs = _runs(parts)
        # The whole runs that look after look are the same, and those at the ends.
        self._kept = [run for run in self._runs if run.is_whole]
        self._others = [run for run in self._runs if not run.is_whole]

    def __len__(self) -> int:
        return len(self.parts)

    def newest(self, num: int) -> Sequence[Part]:
        """The last `num` of them, or as many as there are."""
        return self.parts[-num:]

    def newest_ticks(self, num: int) -> list[Tick]:
        """The ticks of the last `num` of them."""
        return [tick for part in self.newest(num) for tick in part]

    def each(self, work: Callable[..., Sequence[T]], reading: Hashable, *rest: Hashable) -> list[T]:
        """What `work` makes of each span, in order."""
        return list(chain.from_iterable(self.each_run(work, reading, *rest)))

    def each_run(self, work: Callable[..., T], reading: Hashable, *rest: Hashable) -> list[T]:
        """What `work` makes of each run of spans, in order: to be added up."""
        return [run.of(work, reading, *rest) for run in self._runs]

    def series(self, reading: Reading) -> Series:
        """`reading` of each span, added up over the pods."""
        return self.each(series_of, reading)

    def breach_evidence(
        self, allowed: float, threshold: float, count: Count, reading: Reading, *rest: Hashable
    ) -> float:
        """Evidence that more than `allowed` of what is counted are over: a breach from `threshold`.

        `count(parts, reading, *rest)` counts. So that the bets on a whole run hold until the next
        one is whole, the mean size of a tick is that of whole runs, and bets on many runs begin
        with a whole one.
        """
        sizes = [run.of(_sizes, (count, reading), *rest) for run in self._kept or self._others]
        num_ticks, num = add_up(sizes)
        bets = Bets(allowed, num / num_ticks if num_ticks else 1.0, k.EVIDENCE_KEPT * threshold)
        runs, capital = self._runs, NOTHING
        if len(self._kept) >= k.RUNS_FROM_WHOLE and not runs[0].is_whole:
            runs = runs[1:]
        for run in runs:
            capital = run.of(_capital_after, (count, reading), bets, capital, *rest)
        return evidence_of(capital)

    def total(self, reading: Reading) -> tuple[int, int]:
        """`reading` of them all, added up."""
        others = [run.of(_total_of, reading) for run in self._others]
        return add_up([*self._of_kept(_total_of_runs, reading), *others])

    def sketch(self, reading: Callable[[Tick], dict[int, int]]) -> dict[int, int]:
        """The sketches that `reading` finds, added up."""
        others = [run.of(_merged, reading) for run in self._others]
        return sketch.merge([*self._of_kept(_merged_of_runs, reading), *others])

    def _of_kept(self, work: Callable[..., T], reading: Hashable) -> list[T]:
        kept = self._kept
        return [kept[-1].with_others(work, reading, kept)] if kept else []


def series_of(parts: Sequence[Part], reading: Reading) -> Series:
    """`reading` of each span, added up over the pods."""
    return [
        reading(part[0]) if len(part) == 1 else add_up([reading(tick) for tick in part])
        for part in parts
    ]


def _sizes(parts: Sequence[Part], how: tuple[Count, Reading], *rest: Any) -> tuple[int, int]:
    """Spans with samples, and samples."""
    count, reading = how
    sizes = [n for n, _ in count(parts, reading, *rest) if n]
    return len(sizes), sum(sizes)


def _capital_after(
    parts: Sequence[Part], how: tuple[Count, Reading], bets: Bets, capital: Capital, *rest: Any
) -> Capital:
    count, reading = how
    after = capital
    for after in bets.path(count(parts, reading, *rest), capital):  # noqa: B007 - the last
        pass
    return after


def add_up(series: Series) -> tuple[int, int]:
    """The sums of both numbers of each."""
    return sum([first for first, _ in series]), sum([second for _, second in series])


def _total_of(parts: Sequence[Part], reading: Reading) -> tuple[int, int]:
    return add_up(series_of(parts, reading))


def _merged(parts: Sequence[Part], reading: Callable[[Tick], dict[int, int]]) -> dict[int, int]:
    return sketch.merge(reading(tick) for part in parts for tick in part)


def _total_of_runs(runs: Sequence[Run], reading: Reading) -> tuple[int, int]:
    return add_up([run.of(_total_of, reading) for run in runs])


def _merged_of_runs(
    runs: Sequence[Run], reading: Callable[[Tick], dict[int, int]]
) -> dict[int, int]:
    return sketch.merge(run.of(_merged, reading) for run in runs)


class _Whole:
    """Whole runs of the last looks, of all pods: what they add up to is found again there. The
    clock says only what is let go; no sum depends on it."""

    def __init__(self) -> None:
        self.runs: dict[Run, Run] = {}
        self._swept_s = 0.0

    def known(self, run: Run) -> Run:
        """`run` as it was at an earlier look."""
        now_s = monotonic()
        found = self.runs.setdefault(run, run)
        found.used_s = now_s
        if now_s - self._swept_s > _UNUSED_S:
            self._swept_s = now_s
            self.runs = {r: r for r in self.runs if now_s - r.used_s <= _UNUSED_S}
        return found


_whole = _Whole()


def _runs(parts: Sequence[Part]) -> list[Run]:
    """`parts` in runs that begin at the same ticks at every look; only whole ones are kept."""
    if not parts:
        return []
    cut = -parts[0][0].seq % k.RUN_TICKS
    starts = range(cut, len(parts), k.RUN_TICKS)
    found = [Run(tuple(parts[start : start + k.RUN_TICKS])) for start in starts]
    first = [Run(tuple(parts[:cut]))] if cut else []
    return first + [_whole.known(run) if run.is_whole else run for run in found]
