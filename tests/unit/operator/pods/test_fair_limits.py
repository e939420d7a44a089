"""Claims on what objects take of one operator: nobody takes what others need."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_operator.pods import fair_limits
from sluice_operator.pods.fair_limits import MAX_OPEN, Exchanges, Room, level


@asynccontextmanager
async def _asking(
    exchanges: Exchanges, owner: str, num: int, size: int
) -> AsyncIterator[list[int]]:
    """Asks for so many turns and keeps those that it gets; their numbers."""
    begun: list[int] = []

    async def ask(number: int) -> None:
        async with exchanges.turn(owner, size):
            begun.append(number)
            await asyncio.Event().wait()

    asked = [asyncio.create_task(ask(number)) for number in range(num)]
    try:
        await asyncio.sleep(0.01)
        yield begun
    finally:
        for one in asked:
            one.cancel()
        await asyncio.wait(asked)


async def test_of_objects_that_take_all_they_can_none_takes_what_the_next_one_needs() -> None:
    exchanges = Exchanges(192, 10_000)
    async with AsyncExitStack() as stack:

        async def takes(owner: str) -> int:
            return len(await stack.enter_async_context(_asking(exchanges, owner, 500, 1)))

        assert [await takes(str(n)) for n in range(8)] == [64, 64, 32, 16, 8, 4, 2, 1]
        async with asyncio.timeout(1), exchanges.turn("another", 1):
            pass
    async with _asking(exchanges, "alone", 500, 1) as again:
        assert again == list(range(MAX_OPEN)), "all was given back, and turns are in order"


async def test_turns_of_objects_that_take_all_they_can_become_even() -> None:
    """Each turn of a pod that never answers ends, too."""
    exchanges, taken = Exchanges(64, 10_000), Counter[str]()

    async def look(owner: str) -> None:
        async with exchanges.turn(owner, 1):
            taken[owner] += 1
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as looks:
        for owner in "abcdefgh":
            for _ in range(64):
                looks.create_task(look(owner))
        await asyncio.sleep(0.045)
        half_way = dict(taken)
    assert len(half_way) == 8
    assert set(taken.values()) == {64}


async def test_room_for_answers_is_shared_in_the_same_way() -> None:
    exchanges = Exchanges(256, 100)
    async with (
        _asking(exchanges, "one", 20, 10) as one,
        _asking(exchanges, "two", 20, 10) as two,
        _asking(exchanges, "three", 20, 1) as three,
    ):
        assert [len(one), len(two), len(three)] == [5, 3, 10]


async def test_a_turn_that_ends_is_the_next_one_s_and_a_cancelled_one_is_nobody_s() -> None:
    exchanges, order = Exchanges(2, 100), list[str]()

    async def take(owner: str) -> None:
        async with exchanges.turn(owner, 1):
            order.append(owner)

    async with exchanges.turn("a", 1):
        waiting = [asyncio.create_task(take(owner)) for owner in ("a", "a", "b")]
        await asyncio.sleep(0.01)
        assert order == ["b"], "the last is for another one"
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert order == ["b"]
    await asyncio.wait(waiting)
    assert order == ["b", "a"]
    assert exchanges._taken == exchanges._waiting == {}


async def test_whoever_has_had_a_turn_stands_behind_the_others() -> None:
    exchanges, order = Exchanges(1, 100), list[str]()

    async def take(owner: str) -> None:
        async with exchanges.turn(owner, 1):
            order.append(owner)
            await asyncio.sleep(0)

    names = ["a"] * 4 + ["b"] * 3 + ["c"]
    await asyncio.gather(*map(take, names))
    assert order == ["a", "a", "b", "c", "a", "b", "a", "b"]


async def test_nobody_waits_for_a_turn_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_limits, "MAX_WAIT_S", 0.05)
    exchanges = Exchanges(1, 100)
    async with exchanges.turn("a", 1):
        with pytest.raises(TimeoutError):
            async with exchanges.turn("b", 1):
                pass
    async with exchanges.turn("b", 100):
        pass
    assert exchanges._taken == exchanges._waiting == {}


@given(st.lists(st.integers(0, 100), max_size=8), st.integers(0, 300))
def test_a_level_gives_all_that_there_is_and_the_same_to_all_who_want_more(
    amounts: list[int], most: int
) -> None:
    bound = level(amounts, most)
    given_out = sum(min(amount, bound) for amount in amounts)
    assert given_out <= most
    if sum(amounts) <= most:
        assert bound == most
    else:
        assert sum(min(amount, bound + 1) for amount in amounts) > most


def test_who_holds_little_holds_all_of_it() -> None:
    room = Room(100)
    assert room.share("small", 10) == 10
    assert room.share("large", 1000) == 90
    assert room.share("other", 1000) == 45
    assert room.share("large", 90) == 45
    assert room.share("small", 10) == 10
    room.leave("other")
    assert room.share("large", 85) == 85
