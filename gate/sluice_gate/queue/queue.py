"""The queue before the engine, and the places in it. *Rim* only by its clock.

The cap counts sequences. A request of more sequences than the cap goes alone. Lowering the cap ends
nothing: it drains. Background flights wait and run beside all this, and leave when others come.
"""

import math
import time
from collections.abc import Callable

from sluice_core.ordering import Pace, Terms
from sluice_core.port import EngineLimits
from sluice_core.shares import Shares
from sluice_core.work import QUIET_S

from .background import BackgroundLine
from .flight import Flight


class Queue:
    """Flights that wait, in the order of `shares`, and the number of sequences that run; those of
    the background are in `background`.

    `ahead`: sequences beyond the cap for an engine that holds the cap itself: then a place that
    becomes free there is taken at once. `ceiling`: the largest cap. `pace`: how fast flights are
    served, by the cap and its free places.
    """

    def __init__(self, limits: EngineLimits, pace: Callable[[int, int], Pace]) -> None:
        self.limits = limits
        self.running = self.waiting = 0
        self.ahead = 0
        self.ceiling = limits.cap
        self.background = BackgroundLine()
        self._others_s = -math.inf
        self._pace = pace
        self._shares: Shares[Flight] = Shares(
            self._terms, lambda flight: flight.work.client, lambda flight: flight.num_sequences
        )

    def _terms(self, flight: Flight) -> Terms:
        limits, work = self.limits, flight.work
        due_s = limits.due_s(flight.arrival_s, work.deadlines.ttft_ms)
        priority = 0 if limits.policy == "fcfs" else work.priority
        return Terms(priority, due_s, flight.arrival_s, flight.prompt_tokens)

    def add(self, flight: Flight) -> None:
        """Add a flight."""
        if flight.work.is_background:
            self.background.add(flight)
            return
        self.waiting += flight.num_sequences
        self._shares.add(flight)

    def remove(self, flight: Flight) -> None:
        """Remove a waiting flight."""
        self.background.remove(flight)
        if flight in self._shares:
            self.waiting -= flight.num_sequences
            self._shares.remove(flight)

    def leave(self, flight: Flight) -> None:
        """Free the places of a flight that has ended."""
        if flight.work.is_background:
            self.background.remove(flight)
            return
        self.running -= flight.num_sequences
        self._shares.leave(flight, time.monotonic())

    def take(self) -> list[Flight]:
        """The flights that may begin now, in order: background ones only if no other waits, and
        they are recalled where others need their places."""
        now_s = time.monotonic()
        if self.running or self.waiting:
            self._others_s = now_s
        taken = self._take_others(now_s)
        is_quiet = now_s - self._others_s >= QUIET_S
        most = self.ceiling if is_quiet else self.limits.cap
        wanted = self.running + self.waiting
        self.background.recall(
            min(self.background.running, wanted + self.background.running - most)
        )
        if not self.waiting:
            taken += self.background.take(most - self.running)
        return taken

    def _take_others(self, now_s: float) -> list[Flight]:
        """The first that does not fit ends the choice, so that no large one starves."""
        most = self.limits.cap + self.ahead
        behind = self.background.running
        taken: list[Flight] = []
        if not self.waiting or self.running + behind >= max(most, 1):
            return taken
        pace = self._pace(self.limits.cap, max(0, most - self.running - behind))
        for flight in self._shares.ordered(now_s, pace):
            used = self.running + behind
            if used and used + flight.num_sequences > most:
                break
            self.running += flight.num_sequences
            taken.append(flight)
        for flight in taken:
            self.waiting -= flight.num_sequences
            self._shares.take(flight, now_s)
        return taken
