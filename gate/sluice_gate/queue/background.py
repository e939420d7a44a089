"""Background flights: they have the places that others leave, and give them back at once. Pure.

A flight that is recalled loses what the engine has made for it, and waits again. So the newest go
first, and none whose answer has begun.
"""

from bisect import insort
from collections.abc import Iterator

from .flight import Flight


class BackgroundLine:
    """Those that wait, by arrival, and those that have places, in the order in which they began."""

    def __init__(self) -> None:
        self._waiting: list[Flight] = []
        self._begun: list[Flight] = []

    @property
    def running(self) -> int:
        """Places in use."""
        return sum(flight.num_sequences for flight in self._begun)

    @property
    def waiting(self) -> int:
        """Sequences that wait."""
        return sum(flight.num_sequences for flight in self._waiting)

    def add(self, flight: Flight) -> None:
        """Let a flight wait; one that was recalled takes its old place."""
        insort(self._waiting, flight, key=lambda other: other.arrival_s)

    def remove(self, flight: Flight) -> None:
        """Forget a flight, whether it waits or runs."""
        for flights in (self._waiting, self._begun):
            if flight in flights:
                flights.remove(flight)

    def take(self, places: int) -> Iterator[Flight]:
        """Begin those that fit into so many places beside those that have begun; a flight that is
        larger than all of them goes alone."""
        while self._waiting:
            flight, running = self._waiting[0], self.running
            if places <= running or (running and running + flight.num_sequences > places):
                return
            self._begun.append(self._waiting.pop(0))
            yield flight

    def recall(self, num: int) -> None:
        """Have flights leave until `num` places are free, as far as that can be."""
        for flight in reversed(self._begun):
            if num <= 0:
                return
            if not flight.has_head:
                num -= flight.num_sequences
                flight.recall.set()
