"""What spans of ticks add up to, worked out once for those that were there at the last look.

A closed tick never changes, and half an hour of them is read every two seconds. So what is made of
a whole run of spans is kept with it, and runs are found again by what they hold.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

from sluice_worker.contract import Tick

from . import constants as k

Part = tuple[Tick, ...]
T = TypeVar("T")


class Run:
    """Successive spans of a tick."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self._known: dict[Any, tuple[Any, Any]] = {}

    def __hash__(self) -> int:
        return hash((self.parts[0][0].boot_id, self.parts[0][0].seq))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.parts == other.parts

    def of(self, work: Callable[..., T], reading: Hashable, *rest: Any) -> T:
        """`work(parts, reading, *rest)`; kept until it is asked for with another `rest`."""
        known = self._known.get((work, reading))
        if known is None or known[0] != rest:
            known = self._known[work, reading] = (rest, work(self.parts, reading, *rest))
        made: T = known[1]
        return made


@lru_cache(maxsize=k.RUNS_KEPT)
def _kept(run: Run) -> Run:
    return run


def runs(parts: Sequence[Part]) -> list[Run]:
    """`parts` in runs that begin at the same ticks at every look; only whole ones are kept."""
    found = []
    for _, group in groupby(parts, key=_place):
        run = Run(tuple(group))
        found.append(_kept(run) if len(run.parts) == k.RUN_TICKS else run)
    return found


def _place(part: Part) -> int:
    return part[0].seq // k.RUN_TICKS


def each(
    work: Callable[..., Sequence[T]], of: Sequence[Run], reading: Hashable, *rest: Any
) -> list[T]:
    """What `work` makes of each span, in order."""
    return [value for run in of for value in run.of(work, reading, *rest)]
