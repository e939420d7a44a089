"""Requests that come together begin in several turns of the loop, in their order."""

import asyncio

from sluice_frontend.http.turns import MOST, Turns


async def test_no_more_than_the_most_begin_in_one_turn_and_all_begin_in_order() -> None:
    turns, begun = Turns(), list[int]()
    each_turn = list[int]()

    async def request(number: int) -> None:
        await turns.take()
        begun.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(5 * MOST)]
    while len(begun) < 5 * MOST:
        before = len(begun)
        await asyncio.sleep(0)
        each_turn.append(len(begun) - before)
    await asyncio.gather(*tasks)
    assert begun == sorted(begun)
    assert max(each_turn) <= 2 * MOST, "those of one turn, and those who came in it"
    assert sum(num > 0 for num in each_turn) > 2


async def test_one_that_left_takes_no_turn_and_a_lone_one_waits_for_none() -> None:
    turns = Turns()
    tasks = [asyncio.create_task(turns.take()) for _ in range(3 * MOST)]
    await asyncio.sleep(0)
    for task in tasks[MOST : 2 * MOST]:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=10)
    assert len(done) == 3 * MOST
    await asyncio.sleep(0.01)
    await asyncio.wait_for(turns.take(), 10)
