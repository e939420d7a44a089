"""Each client has its share of the places, whatever others send; alone it has the line's order."""

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.ordering import PATIENCE, Line, Pace, Terms
from sluice_core.shares import Shares

PACE = Pace(0.0)


@dataclass(eq=False)
class Job:
    """One that waits, and then holds `places` for `takes_s`."""

    client: str
    terms: Terms = Terms(0, math.inf, 0.0, 1.0)
    places: int = 1
    takes_s: float = 1.0


def create_shares() -> Shares[Job]:
    return Shares(lambda job: job.terms, lambda job: job.client, lambda job: job.places)


Crowd = Callable[[random.Random], Job]


class Places:
    """So many places in virtual time, taken as the gate's queue takes them."""

    def __init__(self, cap: int) -> None:
        self.shares, self.cap, self.now_s, self.num_held = create_shares(), cap, 0.0, 0
        self.served: Counter[str] = Counter()
        self.place_s: dict[str, float] = defaultdict(float)
        self._ends: list[tuple[float, int, Job]] = []
        self._ids = itertools.count()

    def come(self, job: Job) -> None:
        terms = job.terms._replace(arrived_s=self.now_s + next(self._ids) / 1e9)
        job.terms = terms
        self.shares.add(job)

    def fill(self) -> None:
        taken = []
        for job in self.shares.ordered(self.now_s, PACE):
            if self.num_held and self.num_held + job.places > self.cap:
                break
            self.num_held += job.places
            taken.append(job)
        for job in taken:
            self.shares.take(job, self.now_s)
            heapq.heappush(self._ends, (self.now_s + job.takes_s, next(self._ids), job))

    def next_end(self) -> Job:
        self.now_s, _, job = heapq.heappop(self._ends)
        self.num_held -= job.places
        self.shares.leave(job, self.now_s)
        self.served[job.client] += job.places
        self.place_s[job.client] += job.places * job.takes_s
        return job


def serve(cap: int, crowds: dict[str, tuple[int, Crowd]], num_ends: int = 4000) -> Places:
    """Clients that keep so many requests open each: whoever is answered asks again, a little later
    than the place is free."""
    places, draw = Places(cap), random.Random(7)
    for num, make in crowds.values():
        for _ in range(num):
            places.come(make(draw))
    asking: list[Job] = []
    for _ in range(num_ends):
        places.fill()
        for job in asking:
            places.come(job)
        places.fill()
        done = places.next_end()
        asking = [crowds[done.client][1](draw)]
    return places


def jobs_of(client: str, places: int = 1, takes_s: float = 1.0, priority: int = 0) -> Crowd:
    terms = Terms(priority, math.inf, 0.0, 1.0)
    return lambda draw: Job(client, terms, places, takes_s * draw.uniform(0.8, 1.2))


@pytest.mark.parametrize(
    "crowd",
    [
        pytest.param(jobs_of("a"), id="by arrival"),
        pytest.param(jobs_of("a", priority=-1000), id="with priority"),
        pytest.param(jobs_of("a", places=100), id="of many places"),
        pytest.param(jobs_of("a", takes_s=60.0), id="of long jobs"),
    ],
)
def test_a_client_has_half_of_the_places_beside_any_crowd(crowd: Crowd) -> None:
    places = serve(4, {"a": (40, crowd), "b": (8, jobs_of("b"))})
    share = places.place_s["b"] / sum(places.place_s.values())
    assert 0.42 < share < 0.58, dict(places.place_s)


def test_a_client_with_one_request_at_a_time_has_each_second_turn_of_a_place() -> None:
    for crowd in (jobs_of("a"), jobs_of("a", priority=-1000)):
        places = serve(1, {"a": (40, crowd), "b": (1, jobs_of("b"))})
        assert places.served["b"] / sum(places.served.values()) > 0.42


def test_three_clients_have_a_third_each_and_a_frugal_one_all_it_asks_for() -> None:
    crowds = {name: (20, jobs_of(name, places)) for name, places in (("a", 1), ("b", 2), ("c", 5))}
    places = serve(12, crowds | {"d": (1, jobs_of("d"))})
    whole = sum(places.place_s.values())
    shares = {name: seconds / whole for name, seconds in places.place_s.items()}
    # One place of twelve, less a job's turn to wait for one.
    assert 0.05 < shares["d"] < 1 / 12
    for name in "abc":
        assert shares[name] == pytest.approx((1 - shares["d"]) / 3, abs=0.03), shares


def test_a_newcomer_has_neither_a_debt_nor_credit() -> None:
    places = Places(1)
    for _ in range(60):
        places.come(Job("old"))
    for _ in range(30):
        places.fill()
        places.next_end()
    for _ in range(30):
        places.come(Job("new"))
    before = Counter(places.served)
    for _ in range(20):
        places.fill()
        places.next_end()
    gained = Counter(places.served) - before
    assert 9 <= gained["new"] <= 11, gained  # not the thirty that the other has had alone


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(1, 8))
def test_nobody_starves_beside_an_endless_row_of_newcomers(large: int, cap: int) -> None:
    places, names = Places(cap), itertools.count()
    places.come(Job("x", places=large))
    places.come(Job("x"))
    last = Job("x")
    places.come(last)
    for _ in range(cap):
        places.come(Job(f"n{next(names)}"))
    for _ in range((PATIENCE + 1) * (cap + 2) * (large + 3)):
        places.fill()
        places.come(Job(f"n{next(names)}"))
        if places.next_end() is last:
            return
    raise AssertionError("the old client's last job was never served")


def test_the_clients_that_are_remembered_are_no_more_than_twice_those_with_jobs() -> None:
    places, draw = Places(8), random.Random(1)
    for number in range(2000):
        places.come(Job(f"c{number}", places=draw.randint(1, 3), takes_s=draw.random()))
        places.fill()
        while places.num_held > 4:
            places.next_end()
        shares = places.shares
        assert len(shares._debts) <= len(shares._shares) <= len(shares) + 8
    while places.num_held or len(places.shares):
        places.fill()
        places.next_end()
    assert not places.shares._debts
    assert not places.shares._shares
    assert not places.shares._began


def test_who_leaves_and_comes_back_is_still_in_debt_while_others_wait() -> None:
    places = Places(1)
    for _ in range(9):
        places.come(Job("b"))
    places.come(Job("a", places=6))
    served = []
    for _ in range(9):
        places.fill()
        done = places.next_end()
        served.append(done.client)
        if done.client == "a":
            places.come(Job("a", places=6))
    assert served.count("a") == 2, served
    assert served.index("a", served.index("a") + 1) - served.index("a") >= 6, served


TERMS = st.builds(
    Terms,
    st.integers(-1, 1),
    st.one_of(st.just(math.inf), st.integers(0, 12).map(float)),
    st.integers(0, 12).map(float),
    st.integers(0, 5).map(float),
)


@given(st.lists(st.tuples(st.sampled_from("atlo"), TERMS), max_size=60))
def test_a_single_client_has_the_order_of_the_line(moves: list[tuple[str, Terms]]) -> None:
    """Whatever comes, begins, ends or goes: `Shares` says what a `Line` alone says."""
    line, shares = Line[Job](lambda job: job.terms), create_shares()
    there: list[Job] = []
    held: list[Job] = []
    for at, (move, terms) in enumerate(moves):
        now_s, pace = at / 4, Pace(0.5, 0.25, 2)
        if move == "a" or not there:
            there.append(Job("one", terms))
            leader = there[0] if terms.work == 5 else None
            line.add(there[-1], leader)
            shares.add(there[-1], leader)
        elif move in "tl":
            job = there.pop(int(terms.work) % len(there))
            line.remove(job)
            if move == "t":
                shares.take(job, now_s)
                held.append(job)
            else:
                shares.remove(job)
        elif held:
            shares.leave(held.pop(), now_s)
        assert list(shares.ordered(now_s, pace)) == list(line.ordered(now_s, pace))
        assert len(shares) == len(line) == len(there)
        for job in there:
            assert job in shares
            assert shares.rank(job) == line.rank(job)
            assert shares.is_late(job) == line.is_late(job)


def test_priority_and_deadlines_order_within_a_share() -> None:
    shares = create_shares()
    plain, urgent = Job("a"), Job("a", Terms(-1, math.inf, 1.0, 1.0))
    other, soon = Job("b"), Job("b", Terms(0, 9.0, 1.0, 1.0))
    for job in (plain, urgent, other, soon):
        shares.add(job)
    assert list(shares.ordered(0.0, PACE)) == [urgent, soon, plain, other]
