"""Background sequences: others run as if there were none, and all of them end."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.contract import SchedulingPolicy
from sluice_core.port import EngineLimits
from sluice_core.wire import Submit
from sluice_core.work import QUIET_S
from sluice_worker.scheduling.prefill import LEAST_STEPS
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.static_batch import StaticBatching
from sluice_worker.scheduling.step import Step
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import FixedLaw, add, step


def behind(name: str, prompt: int, max_tokens: int = 8) -> Submit:
    return create_request(name, prompt, max_tokens=max_tokens, is_background=True)


def names(planned: Step) -> list[str]:
    return [work.sequence.request_id for work in planned.works]


def counts(scheduler: Scheduler) -> tuple[int, int]:
    return scheduler.background.counts


def test_they_have_the_places_that_others_leave_and_give_them_back_in_the_next_step() -> None:
    scheduler = create_scheduler(cap=3)
    for number in range(4):
        add(scheduler, behind(f"b{number}", 4, 50))
    step(scheduler)
    assert counts(scheduler) == (3, 1)
    add(scheduler, create_request("online", 4, max_tokens=50))
    step(scheduler)
    assert counts(scheduler) == (2, 2)
    add(scheduler, create_request("second", 4))
    planned, _ = step(scheduler)
    assert {"online", "second", "b0"} == set(names(planned))
    assert counts(scheduler) == (1, 3)
    assert scheduler.counters.num_preemptions == 0, "memory is not short"


def test_one_that_gave_way_goes_on_where_it_was() -> None:
    scheduler = create_scheduler(cap=2)
    first = add(scheduler, behind("b0", 32, 40))
    for _ in range(20):
        step(scheduler)
    made = list(first.token_ids)
    for number in range(2):
        add(scheduler, create_request(f"o{number}", 5, max_tokens=3))
    step(scheduler)
    assert not first.block_ids
    while not first.block_ids:
        step(scheduler)
    assert first.token_ids[: len(made)] == made
    assert first.num_computed_tokens > 32, "its blocks were still in the cache"
    while scheduler.has_work:
        step(scheduler)
    assert first.num_output_tokens == 40


def test_the_cap_binds_until_nobody_else_has_come_for_a_while() -> None:
    scheduler = create_scheduler(cap=2, ceiling=4, num_blocks=256)
    add(scheduler, create_request("online", 4, max_tokens=2))
    for number in range(6):
        add(scheduler, behind(f"b{number}", 4, 200))
    for now in (0.0, 1.0, 2.0, QUIET_S):
        step(scheduler, now)
        assert sum(counts(scheduler)[:1]) <= 2
    step(scheduler, 1.0 + QUIET_S)
    assert counts(scheduler) == (4, 2)
    add(scheduler, create_request("next", 4), 2.0 + QUIET_S)
    step(scheduler, 2.0 + QUIET_S)
    assert counts(scheduler) == (1, 5)


@dataclass(frozen=True)
class Timed(FixedLaw):
    """A prompt token takes a millisecond, and a decode `decode_ms`."""

    decode_ms: float = 0.0

    def step_ms(self, decodes: int, kv_tokens: int, prompt_tokens: int) -> float | None:
        return self.decode_ms * decodes + prompt_tokens

    def chunk_limit(self, limits: EngineLimits, decodes: int, kv_tokens: int) -> int:
        return int((limits.itl_ms or 1e6) - self.decode_ms * decodes)


def run(scheduler: Scheduler, law: Timed, num: int) -> Step:
    """So many steps of a second; the last one."""
    for number in range(num):
        planned = scheduler.schedule(number, law)
        scheduler.commit(planned, [7 for work in planned.works if work.samples], number)
    return planned


@pytest.mark.parametrize(("prompt", "chunk"), [(30, 30), (200, 50)])
def test_their_prompts_make_no_step_longer_than_others_do_and_than_the_target(
    prompt: int, chunk: int
) -> None:
    scheduler = create_scheduler(cap=4, budget=400, itl_ms=50.0, num_blocks=256, max_model_len=1000)
    add(scheduler, create_request("online", 10, max_tokens=200))
    law = Timed()
    run(scheduler, law, 1)
    add(scheduler, create_request("second", prompt, max_tokens=2))
    add(scheduler, behind("b", 300))
    planned = run(scheduler, law, LEAST_STEPS)
    assert planned.background.prefill_tokens == 0, "too few steps are known"
    assert run(scheduler, law, 1).background.prefill_tokens == chunk


def test_their_decodes_make_no_step_longer_than_others_do_but_the_oldest_goes_on() -> None:
    scheduler = create_scheduler(cap=20, budget=400, num_blocks=512, max_model_len=1000)
    for number in range(10):
        add(scheduler, behind(f"b{number}", 8, 400))
    law = Timed(decode_ms=2.0)
    run(scheduler, law, 2)
    add(scheduler, create_request("online", 10, max_tokens=300))
    run(scheduler, law, 10)
    add(scheduler, create_request("second", 6, max_tokens=2))
    run(scheduler, law, LEAST_STEPS)
    # The longest step without them had a decode and a prompt of 6: 8 ms, which are 4 decodes.
    assert sorted(names(run(scheduler, law, 1))) == ["b0", "b1", "b2", "online"]
    run(scheduler, law, 120)
    assert sorted(names(run(scheduler, law, 1))) == ["b0", "online"]


def test_their_blocks_go_to_others_first() -> None:
    scheduler = create_scheduler(cap=4, num_blocks=8)
    lost = add(scheduler, behind("b", 60, 20))
    step(scheduler)
    kept = add(scheduler, create_request("first", 30, max_tokens=30))
    step(scheduler)
    assert lost.block_ids
    assert kept.block_ids
    new = add(scheduler, create_request("second", 50, max_tokens=10))
    step(scheduler)
    assert new.block_ids
    assert kept.block_ids
    assert not lost.block_ids
    assert scheduler.check_integrity() is None


def test_one_that_waits_or_runs_can_be_aborted() -> None:
    scheduler = create_scheduler(cap=1)
    for number in range(2):
        add(scheduler, behind(f"b{number}", 4))
    step(scheduler)
    assert counts(scheduler) == (1, 1)
    assert scheduler.abort("b1")
    assert scheduler.abort("b0")
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


def test_static_batches_have_no_places_to_leave() -> None:
    scheduler = create_scheduler(static=StaticBatching(2, 0.0))
    add(scheduler, behind("b", 4))
    assert counts(scheduler) == (0, 0)
    assert len(scheduler.waiting) == 1


Arrival = tuple[int, int, int]
"""A step, and the tokens in and out of a request that comes before it."""
arrivals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 90), st.integers(1, 30)), max_size=12
)


def times_of(
    online: Iterable[Arrival], offline: Iterable[Arrival], policy: SchedulingPolicy
) -> dict[str, list[float]]:
    """The step of each token of each request."""
    scheduler = create_scheduler(
        cap=3, budget=4096, num_blocks=16, policy=policy, ttft_ms=1e6, ceiling=5
    )
    coming = defaultdict[int, list[Submit]](list)
    for is_background, each in ((False, online), (True, offline)):
        for number, (at, prompt, output) in enumerate(each):
            name = f"{'b' if is_background else 'o'}{number}"
            request = create_request(
                name, prompt, max_tokens=output, submitted_s=at, is_background=is_background
            )
            coming[at].append(request)
    times, now = defaultdict[str, list[float]](list), 0
    while scheduler.has_work or any(at >= now for at in coming):
        for request in coming.get(now, ()):
            scheduler.add(Sequence(request, seed=0), float(now))
        for booked in step(scheduler, float(now))[1]:
            times[booked.sequence.request_id].append(now)
        assert scheduler.check_integrity() is None
        now += 1
        assert now < 4000, "not all of them end"
    assert scheduler.pool.num_used == 0
    return times


@pytest.mark.parametrize("policy", ["deadline", "fcfs"])
@given(online=arrivals, offline=arrivals)
@settings(max_examples=60, deadline=None)
def test_others_have_their_tokens_at_the_same_steps_as_without_them(
    online: list[Arrival], offline: list[Arrival], policy: SchedulingPolicy
) -> None:
    alone, both = (times_of(online, each, policy) for each in ([], offline))
    assert {name: at for name, at in both.items() if name[0] == "o"} == alone
    for number, (_, _, output) in enumerate(offline):
        assert len(both[f"b{number}"]) == output
