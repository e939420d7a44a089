"""Who comes first: the fewest are late, nobody starves, and it costs next to nothing."""

import itertools
import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from sluice_core.ordering import PATIENCE, Line, Pace, Terms, arrange
from unit.cost import least_cpu_s

PACE = Pace(1.0)
TIMES = st.integers(0, 12).map(float)
JOBS = st.builds(Terms, st.just(0), TIMES, TIMES, st.integers(0, 5).map(float))


@dataclass(eq=False)
class Job:
    """One that waits."""

    terms: Terms


def create_line(*terms: Terms) -> tuple[Line[Job], list[Job]]:
    line, jobs = Line[Job](lambda job: job.terms), [Job(each) for each in terms]
    for job in jobs:
        line.add(job)
    return line, jobs


def job(due_s: float, work: float = 1.0, arrived_s: float = 0.0, priority: int = 0) -> Terms:
    return Terms(priority, due_s, arrived_s, work)


def num_late(jobs: list[Terms], order: tuple[int, ...], now_s: float) -> int:
    ends = itertools.accumulate((jobs[i].work for i in order), initial=now_s)
    return sum(end > jobs[i].due_s for i, end in zip(order, list(ends)[1:], strict=True))


@given(st.lists(JOBS, max_size=7), TIMES)
def test_no_other_order_has_fewer_late(jobs: list[Terms], now_s: float) -> None:
    in_time, late = arrange(jobs, now_s, PACE)
    assert sorted(in_time + late) == list(range(len(jobs)))
    assert num_late(jobs, tuple(in_time), now_s) == 0
    every = itertools.permutations(range(len(jobs)))
    assert len(late) == min(num_late(jobs, order, now_s) for order in every)
    assert [jobs[i].due_s for i in in_time] == sorted(jobs[i].due_s for i in in_time)
    assert [jobs[i].arrived_s for i in late] == sorted(jobs[i].arrived_s for i in late)


def test_whoever_has_the_most_work_gives_way() -> None:
    assert arrange([job(10, 8), job(10, 2), job(11, 3)], 0.0, PACE) == ([1, 2], [0])


def test_who_must_wait_for_a_place_is_late_if_that_takes_too_long() -> None:
    jobs, pace = [job(9, 1), job(10, 2), job(11, 1), job(12, 1)], Pace(1.0, place_s=5.0, num_free=1)
    assert arrange(jobs, 0.0, pace) == ([0, 2, 3], [1])
    assert arrange(jobs, 0.0, pace._replace(num_free=9)) == ([0, 1, 2, 3], [])


def test_without_deadlines_it_is_first_come_first_served_by_priority() -> None:
    late = [job(math.inf, 1, 2.0), job(math.inf, 9, 1.0), job(math.inf, 1, 3.0, priority=-1)]
    assert arrange(late, 0.0, PACE) == ([], [2, 1, 0])


def test_priority_ranks_before_deadlines() -> None:
    line, (low, late, high) = create_line(job(5), job(0, priority=-1), job(9, priority=-1))
    assert list(line.ordered(1.0, PACE)) == [high, late, low]


def test_who_comes_takes_its_place_at_once_and_who_has_become_late_loses_it() -> None:
    line, (first, second) = create_line(job(10), job(20))
    assert list(line.ordered(0.0, PACE)) == [first, second]
    urgent = Job(job(5))
    line.add(urgent)
    assert list(line.ordered(0.0, PACE)) == [urgent, first, second]
    assert list(line.ordered(4.5, PACE)) == [first, second, urgent]
    assert [line.is_late(each) for each in (first, second, urgent)] == [False, False, True]


def test_the_oldest_late_one_comes_first_after_four_times_as_many_as_stand_there() -> None:
    line, _ = create_line(job(1e9))
    late = [Job(job(0, 3, arrived_s)) for arrived_s in (1.0, 2.0)]
    for each in late:
        line.add(each)
    for number in range(PATIENCE * 3):
        first = next(line.ordered(1.0, PACE))
        assert first not in late, number
        line.remove(first)
        line.add(Job(job(1e9 + number)))
    assert [next(line.ordered(1.0, PACE)) for _ in range(2)] == [late[0]] * 2
    line.remove(late[0])
    assert next(line.ordered(1.0, PACE)) is late[1]


def test_who_stands_behind_another_goes_with_it_and_alone_when_that_has_left() -> None:
    line, (leader, other) = create_line(job(10, 5), job(20, 1))
    followers = [Job(job(10, 5)), Job(job(10, 5))]
    for follower in followers:
        line.add(follower, leader)
    assert list(line.ordered(0.0, PACE)) == [leader, *followers, other], "its work counts once"
    line.remove(followers[0])
    line.remove(leader)
    assert list(line.ordered(0.0, PACE)) == [followers[1], other]
    assert len(line) == 2
    assert leader not in line


@given(st.lists(st.tuples(st.booleans(), JOBS), max_size=60))
def test_each_that_is_there_is_told_once(moves: list[tuple[bool, Terms]]) -> None:
    line, there = Line[Job](lambda job: job.terms), list[Job]()
    for now_s, (leaves, terms) in enumerate(moves):
        if leaves and there:
            line.remove(there.pop(int(terms.work) % len(there)))
        else:
            there.append(Job(terms))
            line.add(there[-1], there[0] if terms.work == 5 else None)
        told = list(line.ordered(now_s / 4, PACE))
        assert len(told) == len(there) == len(line)
        assert set(map(id, told)) == set(map(id, there))


def test_ten_thousand_that_wait_cost_a_millisecond_a_step_at_most() -> None:
    terms = [job(7919 * i % 100_003 / 1e3, 1 + 31 * i % 4001, i / 1e3) for i in range(10_000)]
    line, _ = create_line(*terms)
    numbers = itertools.count()

    def hundred_steps() -> None:
        for number in itertools.islice(numbers, 100):
            first = next(line.ordered(number / 100, Pace(1e-5)))
            line.remove(first)
            line.add(Job(job(number / 100 + 50, 100, 10.0 + number)))

    assert 1e3 * least_cpu_s(hundred_steps, num=4) / 100 < 1
