"""Places before an engine, in the order of deadlines."""

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st
from sluice_core.ordering import Pace
from sluice_core.port import EngineLimits
from sluice_core.work import Deadlines, Work
from sluice_frontend.evidence.requests import RequestTimer
from sluice_gate.queue.flight import Flight
from sluice_gate.queue.queue import Queue
from sluice_gate.request.asked import Asked

NOW_S = time.monotonic()


def limits(cap: int, **more: object) -> EngineLimits:
    return EngineLimits(0, cap, 2048, **more)  # type: ignore[arg-type]


def flight(
    num: int,
    at: int = 0,
    priority: int = 0,
    ttft_ms: float | None = None,
    *,
    is_background: bool = False,
) -> Flight:
    asked = Asked((400,) * num)
    work = Work((100,) * num, 1, True, Deadlines(ttft_ms), priority, is_background=is_background)
    timers = [RequestTimer(str(i), NOW_S + at, NOW_S + at, 100) for i in range(num)]
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        made = Flight(asked, work, NOW_S + at, timers, loop.create_future(), loop.create_future())
    return made


def queue(cap: int, **more: object) -> Queue:
    return Queue(limits(cap, **more), lambda _, num_free: Pace(0.0, 0.0, num_free))


def test_places_are_sequences_and_the_first_that_does_not_fit_ends_the_choice() -> None:
    line, waiting = queue(4), [flight(2, 0), flight(3, 1), flight(1, 2)]
    for each in waiting:
        line.add(each)
    assert line.take() == waiting[:1]  # the small one does not pass the large one
    assert (line.running, line.waiting) == (2, 4)
    line.leave(waiting[0])
    assert line.take() == waiting[1:]


def test_more_than_the_cap_goes_alone() -> None:
    line, large, small = queue(2), flight(5, 0), flight(1, 1)
    line.add(large)
    line.add(small)
    assert line.take() == [large]
    assert line.take() == []
    line.leave(large)
    assert line.take() == [small]


def test_lowering_drains_and_a_raise_is_in_force_at_once() -> None:
    line, flights = queue(4), [flight(1, at) for at in range(8)]
    for each in flights:
        line.add(each)
    assert len(line.take()) == 4
    line.limits = limits(1)
    line.leave(flights[0])
    assert line.take() == []
    line.limits = limits(6)
    assert line.take() == flights[4:7]


def test_by_deadline_and_by_priority() -> None:
    late, soon = flight(1, 0, ttft_ms=7_200_000.0), flight(1, 1, ttft_ms=3_600_000.0)
    for policy, first in (("fcfs", late), ("deadline", soon)):
        line = queue(1, policy=policy)
        line.add(late)
        line.add(soon)
        assert line.take() == [first], policy
    plain, urgent = flight(1, 0), flight(1, 1, priority=-1)
    line = queue(1, policy="priority")
    line.add(plain)
    line.add(urgent)
    assert line.take() == [urgent]


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=40), st.integers(1, 8))
def test_the_cap_holds_and_nobody_is_lost(moves: list[tuple[int, bool]], cap: int) -> None:
    line = queue(cap)
    running: list[Flight] = []
    begun: list[Flight] = []
    added: list[Flight] = []
    for at, (num, is_arrival) in enumerate(moves):
        if is_arrival or not running:
            added.append(flight(num, at))
            line.add(added[-1])
        else:
            line.leave(running.pop(0))
        taken = line.take()
        running += taken
        begun += taken
        assert line.running == sum(each.num_sequences for each in running)
        assert line.running <= cap or len(running) == 1
    while running:
        line.leave(running.pop(0))
        taken = line.take()
        running += taken
        begun += taken
    assert begun == added  # first come, first served
    assert (line.running, line.waiting) == (0, 0)


def test_background_flights_have_what_others_leave_and_the_newest_are_recalled() -> None:
    line, online = queue(3), flight(1, 0)
    behind = [flight(1, at, is_background=True) for at in range(1, 5)]
    for each in (*behind, online):
        line.add(each)
    assert line.take() == [online, *behind[:2]]
    line.add(late := flight(2, 9))
    assert line.take() == []
    assert [each.recall.is_set() for each in behind[:2]] == [True, True]
    line.leave(behind[1])
    assert line.take() == []
    line.leave(behind[0])
    line.add(behind[0])  # it waits again, before those that came later
    assert line.take() == [late]
    line.leave(online)
    assert line.take() == behind[:1]


def test_an_answer_that_has_begun_is_not_recalled() -> None:
    line = queue(2)
    behind = [flight(1, at, is_background=True) for at in range(2)]
    for each in behind:
        line.add(each)
    assert line.take() == behind
    behind[1].has_head = True
    line.add(flight(1, 5))
    assert line.take() == []
    assert [each.recall.is_set() for each in behind] == [True, False]


def test_the_ceiling_is_for_the_background_while_nobody_else_comes() -> None:
    line = queue(1)
    line.ceiling = 3
    behind = [flight(1, at, is_background=True) for at in range(4)]
    for each in behind:
        line.add(each)
    assert line.take() == behind[:3]
    line.add(flight(1, 9))
    assert line.take() == []
    assert [each.recall.is_set() for each in behind[:3]] == [True] * 3


behind_or_not = st.tuples(st.integers(1, 4), st.booleans(), st.booleans())


@given(st.lists(behind_or_not, max_size=40), st.integers(1, 6))
def test_others_begin_as_soon_as_recalled_flights_have_left(
    moves: list[tuple[int, bool, bool]], cap: int
) -> None:
    line, alone = queue(cap), queue(cap)
    running: list[Flight] = []
    for at, (num, is_arrival, is_background) in enumerate(moves):
        if is_arrival:
            new = flight(num, at, is_background=is_background)
            line.add(new)
            if not is_background:
                alone.add(new)
        elif online := [each for each in running if not each.work.is_background]:
            running.remove(online[0])
            line.leave(online[0])
            alone.leave(online[0])
        while True:
            running += line.take()
            gone = [each for each in running if each.recall.is_set()]
            if not gone:
                break
            for each in gone:
                running.remove(each)
                line.leave(each)
                each.recall.clear()
                line.add(each)
        alone.take()
        assert (line.running, line.waiting) == (alone.running, alone.waiting)
