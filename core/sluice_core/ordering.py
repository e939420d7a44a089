"""Order of waiting jobs: those that can be in time go first. Pure; for any queue before an engine.

Under first come, first served a queue that grew once makes all jobs behind it equally late.
So jobs that can still be in time go first, by deadline. If not all of them can, the one with the
most work gives way: Moore and Hodgson's rule makes the fewest late (doi:10.1287/mnsc.15.1.102).
Late jobs follow by arrival. No job starves: while n jobs wait, the oldest late one goes first once
`PATIENCE` * n jobs were served since it became late.
"""

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain, takewhile
from typing import Generic, NamedTuple, TypeVar

Job = TypeVar("Job")

PATIENCE = 8
"""Late jobs wait at most about this many times as long as under first come, first served."""
ARRANGED_A_STEP = 128
"""Waiting jobs for each step between two full arrangements. In between, newcomers are inserted at
their places, and jobs that became late are moved out of the way."""


class Terms(NamedTuple):
    """A job's properties that decide its place. They sort as jobs in time are served.

    `priority`: lower goes first, as in vLLM. `due_s`: infinite without a deadline. `work`: the work
    that remains until its first token, in the caller's units.
    """

    priority: int
    due_s: float
    arrived_s: float
    work: float


class Pace(NamedTuple):
    """How fast jobs are served. `price_s`: seconds that a unit of work takes. A job beyond the
    `num_free` places waits `place_s` for each one before it, as that many become free."""

    price_s: float
    place_s: float = 0.0
    num_free: int = 0


def arrange(jobs: Sequence[Terms], now_s: float, pace: Pace) -> tuple[list[int], list[int]]:
    """Indices of `jobs` in time, by deadline, and of the late, by arrival; each by priority first.

    Among jobs of one priority the fewest possible are late, as far as work is what they wait for.
    Takes O(n log n).
    """
    late = [i for i, job in enumerate(jobs) if job.due_s == math.inf]
    by_deadline = sorted(set(range(len(jobs))).difference(late), key=jobs.__getitem__)
    in_time: list[int] = []
    kept: list[tuple[float, int]] = []  # of the priority at hand, the most work first
    ends_s, priority = now_s, None
    place_s = now_s - pace.place_s * pace.num_free
    for i in by_deadline:
        job = jobs[i]
        if job.priority != priority:
            in_time += (other for _, other in kept)
            kept, priority = [], job.priority
        heappush(kept, (-job.work, -i))
        ends_s += job.work * pace.price_s
        place_s += pace.place_s
        if max(ends_s, place_s) > job.due_s:
            work, other = heappop(kept)
            ends_s += work * pace.price_s
            place_s -= pace.place_s
            late.append(-other)
    chosen = set(range(len(jobs))).difference(late)
    return [i for i in by_deadline if i in chosen], sorted(late, key=lambda i: _age(jobs[i]))


def before(newcomer: Terms, jobs: Sequence[Terms], now_s: float, pace: Pace) -> list[Terms]:
    """Those of `jobs` that are served before one that comes now, turns of the late left out."""
    all_jobs = [*jobs, newcomer]
    merged = heapq.merge(*arrange(all_jobs, now_s, pace), key=lambda i: all_jobs[i].priority)
    return [jobs[i] for i in takewhile(lambda i: i < len(jobs), merged)]


def _age(terms: Terms) -> tuple[int, float]:
    return terms.priority, terms.arrived_s


class Line(Generic[Job]):
    """Waiting jobs in the order of service. `terms_of`: a job's current terms.

    A new job takes its place at once; late jobs are chosen at the next full arrangement.
    """

    def __init__(self, terms_of: Callable[[Job], Terms]) -> None:
        self._terms_of = terms_of
        self._jobs: dict[int, Job] = {}
        # Both may hold jobs that have left since they were arranged.
        self._in_time: list[Job] = []
        self._late: list[Job] = []
        self._late_ids: set[int] = set()
        self._leaders: dict[int, Job] = {}
        self._followers: dict[int, list[Job]] = {}
        self._num_steps_left = 0
        self._num_left = 0
        self._late_since: dict[int, int] = {}  # how many had left by then

    def __len__(self) -> int:
        return len(self._jobs) + len(self._leaders)

    def __contains__(self, job: Job) -> bool:
        return id(job) in self._jobs or id(job) in self._leaders

    def add(self, job: Job, leader: Job | None = None) -> None:
        """Add a job. `leader`: another job that does most of its work; the new job stands
        directly behind it until it has left."""
        if leader is not None and leader in self:
            self._leaders[id(job)] = leader
            self._followers.setdefault(id(leader), []).append(job)
            return
        self._jobs[id(job)] = job
        if self._terms_of(job).due_s < math.inf:
            insort(self._in_time, job, key=self._terms_of)
        else:
            self._add_late(job)

    def remove(self, job: Job) -> None:
        """Remove a job that has its first token or whose client left. An unknown one is ignored."""
        if leader := self._leaders.pop(id(job), None):
            self._followers[id(leader)].remove(job)
        elif self._jobs.pop(id(job), None) is not None:
            self._late_ids.discard(id(job))
            self._late_since.pop(id(job), None)
            self._num_left += 1
            for follower in self._followers.pop(id(job), ()):
                del self._leaders[id(follower)]
                self.add(follower)

    def is_late(self, job: Job) -> bool:
        """True if the job is among the late ones."""
        return id(self._leaders.get(id(job), job)) in self._late_ids

    def rank(self, job: Job) -> tuple[int, bool, float, float]:
        """A key that sorts jobs as `ordered` does, but without turns of the late."""
        terms, late = self._terms_of(self._leaders.get(id(job), job)), self.is_late(job)
        return terms.priority, late, 0 if late else terms.due_s, terms.arrived_s

    def ordered(self, now_s: float, pace: Pace) -> Iterator[Job]:
        """The jobs as one step serves them; called once a step."""
        self._arrange(now_s, pace)
        owed = self._whose_turn()
        both = self._there(self._in_time), self._there(self._late)
        merged = heapq.merge(*both, key=lambda job: self._terms_of(job).priority)
        others = (job for job in merged if job is not owed)
        for job in others if owed is None else chain((owed,), others):
            yield job
            yield from self._followers.get(id(job), ())

    def _there(self, jobs: list[Job]) -> Iterator[Job]:
        return (job for job in jobs if id(job) in self._jobs)

    def _add_late(self, job: Job) -> None:
        insort(self._late, job, key=lambda other: _age(self._terms_of(other)))
        self._late_ids.add(id(job))
        self._late_since.setdefault(id(job), self._num_left)

    def _arrange(self, now_s: float, pace: Pace) -> None:
        if self._num_steps_left:
            self._num_steps_left -= 1
            self._pass_by_the_late(now_s, pace.price_s)
            return
        jobs = list(self._jobs.values())
        in_time, late = arrange([self._terms_of(job) for job in jobs], now_s, pace)
        self._in_time = [jobs[i] for i in in_time]
        self._late = [jobs[i] for i in late]
        self._late_ids = {id(job) for job in self._late}
        for key in self._late_ids:
            self._late_since.setdefault(key, self._num_left)
        self._num_steps_left = len(jobs) // ARRANGED_A_STEP

    def _pass_by_the_late(self, now_s: float, price_s: float) -> None:
        """Remove jobs at the front that left; move those that became late."""
        while self._in_time:
            job = self._in_time[0]
            if id(job) in self._jobs:
                terms = self._terms_of(job)
                if now_s + terms.work * price_s <= terms.due_s:
                    return
                self._add_late(job)
            del self._in_time[0]

    def _whose_turn(self) -> Job | None:
        """The oldest of the late, if it has waited for long enough."""
        oldest = next(self._there(self._late), None)
        if oldest is None:
            return None
        num_since = self._num_left - self._late_since[id(oldest)]
        return oldest if num_since >= PATIENCE * len(self) else None
