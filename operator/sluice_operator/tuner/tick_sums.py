"""Sums over spans of ticks, computed once for spans that an earlier pass already had.

A closed tick never changes, and half an hour of them is read every two seconds. So each sum over a
whole run of spans is cached with it, and later passes find runs by their ticks. The runs at both
ends grow and shrink, so they are not cached.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count, islice, pairwise
from time import monotonic
from typing import Any, TypeVar

from sluice_core import sketch
from sluice_core.contract import TICK_SECONDS, Tick

from . import constants as k
from .detect import NOTHING, Bets, Capital, Series, evidence_of

TickSlice = tuple[Tick, ...]
Reading = Callable[[Tick], tuple[int, int]]
Count = Callable[..., Series]
T = TypeVar("T")
Join = Callable[[Sequence[T]], T]
_UNUSED_S = 5 * TICK_SECONDS
"""Seconds after which a run that no pass used is dropped: passes are a tick apart."""
_MOST_KEPT = 64
"""Results that one run caches at most; those for old quantiles and stakes are dropped."""
_numbers = count()


class Run:
    """Successive spans of a tick. `number`: unique; `used_s`: when it was last found."""

    def __init__(self, parts: tuple[TickSlice, ...]) -> None:
        self.parts = parts
        self.number, self.used_s = next(_numbers), 0.0
        self._hash = hash((parts[0][0].boot_id, parts[0][0].seq))
        self._made: dict[Hashable, Any] = {}

    @property
    def is_whole(self) -> bool:
        """True if the run no longer grows; later passes find it again."""
        return len(self.parts) == k.RUN_TICKS

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.parts == other.parts

    def of(self, work: Callable[..., T], *rest: Hashable) -> T:
        """`work(parts, *rest)`, cached."""
        return self.kept((work, rest), lambda: work(self.parts, *rest))

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value cached under `key`, for as long as this run; else what `make` makes."""
        made = self._made
        if key not in made:
            if len(made) >= _MOST_KEPT:
                made.clear()
            made[key] = make()
        found: T = made[key]
        return found


class TickWindow:
    """The spans of a tick that count, oldest first; each has the ticks of all pods."""

    def __init__(self, parts: Sequence[TickSlice]) -> None:
        self.parts = parts
        runs = _runs(parts)
        self._whole = [run for run in runs if run.is_whole]
        begin = runs.index(self._whole[0]) if self._whole else len(runs)
        self._before, self._after = runs[:begin], runs[begin + len(self._whole) :]
        self._numbers = tuple(run.number for run in self._whole)
        self._joined: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def newest(self, num: int) -> Sequence[TickSlice]:
        """The last `num` spans, or as many as there are."""
        return self.parts[-num:]

    def newest_ticks(self, num: int) -> list[Tick]:
        """The ticks of the last `num` spans."""
        return [tick for part in self.newest(num) for tick in part]

    def newest_having(self, reading: Reading, num: int) -> list[Tick]:
        """The ticks of the last `num` spans in which `reading` counts anything."""
        having = (part for part in reversed(self.parts) if any(reading(t)[0] for t in part))
        return [tick for part in islice(having, num) for tick in part]

    def joined(self, join: Join[T], work: Callable[..., T], *rest: Hashable) -> T:
        """`join` of the results of `work(parts, *rest)` for each run of spans, in order. `join`
        must accept its own results."""
        key = (join, work, rest)
        if key not in self._joined:
            found = [run.of(work, *rest) for run in self._before]
            if self._whole:
                found.append(self._of_whole(join, work, *rest))
            self._joined[key] = join([*found, *(run.of(work, *rest) for run in self._after)])
        joined: T = self._joined[key]
        return joined

    def _of_whole(self, join: Join[T], work: Callable[..., T], *rest: Hashable) -> T:
        return self._whole[-1].kept(
            (join, work, rest, self._numbers),
            lambda: join([run.of(work, *rest) for run in self._whole]),
        )

    def total(self, reading: Reading) -> tuple[int, int]:
        """`reading` of all spans, added up."""
        return self.joined(add_up, _total_of, reading)

    def sketch(self, reading: Callable[[Tick], dict[int, int]]) -> dict[int, int]:
        """The sketches that `reading` finds, added up."""
        return self.joined(sketch.merge, _merged, reading)

    def breach_evidence(
        self, allowed: float, threshold: float, count: Count, *rest: Hashable
    ) -> float:
        """Evidence that more than `allowed` of what is counted are over: a breach from `threshold`.

        `count(parts, *rest)` counts. Bets on a whole run must hold until the next one is whole. So
        the mean size of a tick is that of whole runs, and bets on many runs begin with a whole one.
        """
        sizes = self._of_whole if self._whole else self.joined
        num_ticks, num = sizes(add_up, _sizes, count, *rest)
        bets = Bets(allowed, num / num_ticks if num_ticks else 1.0, k.EVIDENCE_KEPT * threshold)
        if len(self._whole) >= k.RUNS_FROM_WHOLE:
            capital = self._whole[-1].kept(
                (bets, count, rest, self._numbers),
                lambda: _capital_after(self._whole, NOTHING, bets, count, *rest),
            )
        else:
            capital = _capital_after([*self._before, *self._whole], NOTHING, bets, count, *rest)
        return evidence_of(_capital_after(self._after, capital, bets, count, *rest))


def series_of(parts: Sequence[TickSlice], reading: Reading) -> Series:
    """`reading` of each span, added up over the pods."""
    return [
        reading(part[0]) if len(part) == 1 else add_up([reading(tick) for tick in part])
        for part in parts
    ]


def add_up(series: Series) -> tuple[int, int]:
    """The sums of the first and of the second numbers."""
    return sum([first for first, _ in series]), sum([second for _, second in series])


def _sizes(parts: Sequence[TickSlice], count: Count, *rest: Any) -> tuple[int, int]:
    """How many spans have samples, and how many samples there are."""
    sizes = [n for n, _ in count(parts, *rest) if n]
    return len(sizes), sum(sizes)


def _capital_after(
    runs: Iterable[Run], capital: Capital, bets: Bets, count: Count, *rest: Hashable
) -> Capital:
    for run in runs:
        capital = run.of(_bet, bets, capital, count, *rest)
    return capital


def _bet(
    parts: Sequence[TickSlice], bets: Bets, capital: Capital, count: Count, *rest: Any
) -> Capital:
    after = capital
    for after in bets.path(count(parts, *rest), capital):  # noqa: B007 - the last
        pass
    return after


def _total_of(parts: Sequence[TickSlice], reading: Reading) -> tuple[int, int]:
    return add_up(series_of(parts, reading))


def _merged(
    parts: Sequence[TickSlice], reading: Callable[[Tick], dict[int, int]]
) -> dict[int, int]:
    return sketch.merge(reading(tick) for part in parts for tick in part)


class _Known:
    """The runs of the last passes, of all pods. The clock only evicts old ones; no sum depends on
    it."""

    def __init__(self) -> None:
        self.runs: dict[Run, Run] = {}
        self._swept_s = 0.0

    def known(self, run: Run) -> Run:
        """`run` as an earlier pass left it."""
        now_s = monotonic()
        found = self.runs.setdefault(run, run)
        found.used_s = now_s
        if now_s - self._swept_s > _UNUSED_S:
            self._swept_s = now_s
            self.runs = {r: r for r in self.runs if now_s - r.used_s <= _UNUSED_S}
        return found


_known = _Known()


def _runs(parts: Sequence[TickSlice]) -> list[Run]:
    """`parts` in runs that begin at the same ticks in every pass; all are whole but those at the
    ends."""
    if not parts:
        return []
    begins = range(-parts[0][0].seq % k.RUN_TICKS, len(parts), k.RUN_TICKS)
    bounds = sorted({0, *begins, len(parts)})
    found = [Run(tuple(parts[begin:end])) for begin, end in pairwise(bounds)]
    return [_known.known(run) if run.is_whole else run for run in found]
