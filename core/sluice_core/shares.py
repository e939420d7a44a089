"""Waiting jobs of several clients: none gets more of the places because it sends more. Pure.

Within a client's share a `Line` has the order. Between shares the client goes first that has had
least: places times seconds, as a Linux scheduler counts run time. A newcomer begins where the last
one stood that was served (start-time fair queueing, doi:10.1145/248157.248171): it has neither a
debt nor credit. With one client the order is the line's.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from .ordering import Job, Line, Pace, Terms

LEARN = 16
"""Divisor: so much of each longer job goes into the expected time. A shorter one sets it: too high
a price would let others overtake for as long as it is thought to be true."""
FIRST_PRICE_S = 1e-3
LATER = 4
"""Divisor: newcomers begin later by so much of what a share gets meanwhile."""


@dataclass(slots=True, eq=False)
class _Share(Generic[Job]):
    """A client that waits or holds places. `had`: place-seconds, without those it holds now;
    `began`: the sum of its places' times of beginning."""

    number: int
    line: Line[Job]
    had: float
    num_held: int = 0
    began: float = 0.0

    def had_by(self, now_s: float, price_s: float = 0.0) -> float:
        """Place-seconds so far; each place that it holds counts `price_s` at least."""
        held = self.num_held * now_s - self.began
        return self.had + max(held, self.num_held * price_s)


class Shares(Generic[Job]):
    """Jobs from their arrival until they give their places back.

    `terms_of`: as in `Line`. `client_of`: whose share a job takes. `places_of`: how many places it
    takes, at least one. Remembered are clients that wait or hold places, and as many others.
    """

    def __init__(
        self,
        terms_of: Callable[[Job], Terms],
        client_of: Callable[[Job], str],
        places_of: Callable[[Job], int] = lambda job: 1,
    ) -> None:
        self._terms_of, self._client_of, self._places_of = terms_of, client_of, places_of
        self._shares: dict[str, _Share[Job]] = {}
        self._debts: dict[str, float] = {}  # of clients without jobs, that have had more
        self._began: dict[int, float] = {}  # of jobs that hold places
        self._num_clients = 0
        self._num_held = 0
        self._price_s = FIRST_PRICE_S
        self._from = 0.0  # place-seconds at which a newcomer begins
        self._from_s = 0.0  # when that was so

    def __len__(self) -> int:
        return sum(len(share.line) for share in self._shares.values())

    def __contains__(self, job: Job) -> bool:
        share = self._shares.get(self._client_of(job))
        return share is not None and job in share.line

    def add(self, job: Job, leader: Job | None = None) -> None:
        """Add a job that waits. `leader`: as in `Line`; of the same client."""
        self._share(job).line.add(job, leader)

    def remove(self, job: Job) -> None:
        """Remove a waiting job. An unknown one is ignored."""
        share = self._shares.get(self._client_of(job))
        if share is not None:
            share.line.remove(job)
            self._forget(self._client_of(job), share)

    @property
    def num_waiting_clients(self) -> int:
        """The number of clients that have a job here."""
        return sum(1 for share in self._shares.values() if len(share.line))

    def take(self, job: Job, now_s: float) -> None:
        """Give a waiting job its places; it waits no longer."""
        self._share(job).line.remove(job)
        self.hold(job, now_s)

    def hold(self, job: Job, now_s: float) -> None:
        """Give a job its places, whether it waits on for something else or has not waited."""
        share, places = self._share(job), self._places_of(job)
        self._pass(now_s)
        self._from = max(self._from, share.had_by(now_s))  # where one stands that is served now
        self._began[id(job)] = now_s
        share.num_held += places
        share.began += places * now_s
        self._num_held += places

    def leave(self, job: Job, now_s: float) -> None:
        """Take a job's places back. One that holds none is ignored."""
        began_s = self._began.pop(id(job), None)
        if began_s is None:
            return
        self._pass(now_s)
        client, places = self._client_of(job), self._places_of(job)
        share, held_s = self._shares[client], now_s - began_s
        share.had += places * held_s
        share.num_held -= places
        share.began = share.began - places * began_s if share.num_held else 0.0
        self._num_held -= places
        self._price_s = min(held_s, self._price_s + (held_s - self._price_s) / LEARN)
        self._forget(client, share)

    def is_late(self, job: Job) -> bool:
        """As in `Line`."""
        share = self._shares.get(self._client_of(job))
        return share is not None and share.line.is_late(job)

    def rank(self, job: Job) -> tuple[int, bool, float, float]:
        """As in `Line`, whoever the client is."""
        return self._shares[self._client_of(job)].line.rank(job)

    def ordered(self, now_s: float, pace: Pace) -> Iterator[Job]:
        """The jobs as one step serves them, if it takes each; called once a step."""
        waiting = [share for share in self._shares.values() if len(share.line)]
        part = len(waiting)
        own = Pace(pace.price_s * part, pace.place_s * part, -(-pace.num_free // max(part, 1)))
        heap = [
            (share.had_by(now_s, self._price_s), share.number, share.line.ordered(now_s, own))
            for share in waiting
        ]
        heapq.heapify(heap)
        while heap:
            had, number, jobs = heap[0]
            job = next(jobs, None)
            if job is None:
                heapq.heappop(heap)
                continue
            yield job
            price = self._price_s * self._places_of(job)
            heapq.heapreplace(heap, (had + price, number, jobs))

    def _share(self, job: Job) -> _Share[Job]:
        client = self._client_of(job)
        share = self._shares.get(client)
        if share is None:
            had = max(self._from, self._debts.pop(client, 0.0))
            share = self._shares[client] = _Share(self._num_clients, Line(self._terms_of), had)
            self._num_clients += 1
        return share

    def _pass(self, now_s: float) -> None:
        """Newcomers also begin later by a part of what a share gets: an endless row of them, all
        beginning at one point, would go in front of one that has had more for ever."""
        gone_s = max(0.0, now_s - self._from_s)
        self._from += gone_s * self._num_held / (LATER * max(len(self._shares), 1))
        self._from_s = now_s

    def _forget(self, client: str, share: _Share[Job]) -> None:
        """Forget a client without jobs; not yet what it has had more than others."""
        if len(share.line) or share.num_held:
            return
        del self._shares[client]
        debts = self._debts
        if share.had > self._from:
            debts[client] = share.had
        if len(debts) > len(self._shares):
            debts = {name: had for name, had in debts.items() if had > self._from}
            most = sorted(debts, key=debts.__getitem__, reverse=True)[: len(self._shares)]
            self._debts = {name: debts[name] for name in most}
