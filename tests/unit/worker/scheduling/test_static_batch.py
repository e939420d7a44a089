"""Static mode: wait for a batch or the time, run it padded to its end, then the next."""

from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.static_batch import StaticBatching
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import add, set_limits, step, written

BATCHES = StaticBatching(size=3, timeout_s=1.0)


def create_static(num_blocks: int = 64, max_model_len: int = 512) -> Scheduler:
    return create_scheduler(
        num_blocks=num_blocks, cap=8, budget=512, max_model_len=max_model_len, static=BATCHES
    )


def test_a_batch_waits_for_its_size_or_for_the_time_of_its_first() -> None:
    scheduler = create_static()
    add(scheduler, create_request("a", 5), now=10.0)
    assert not step(scheduler, 10.5)[0].works
    assert scheduler.starts_at(10.5) == 11.0
    assert scheduler.num_waiting_for("cap") == 1
    add(scheduler, create_request("b", 5), now=10.6)
    assert not step(scheduler, 10.9)[0].works
    assert step(scheduler, 11.0)[0].num_running == 2
    add(scheduler, create_request("c", 5), now=11.1)
    assert scheduler.starts_at(11.2) == 11.2, "those that run wait for nobody"

    full = create_static()
    for name in "abcd":
        add(full, create_request(name, 5), now=10.0)
    assert full.starts_at(10.0) == 10.0
    assert step(full, 10.0)[0].num_running == 3


def test_the_next_batch_starts_when_the_longest_has_ended_and_rows_are_padded_until_then() -> None:
    scheduler = create_static()
    requests = [
        create_request("short", 5, max_tokens=2),
        create_request("long", 9, max_tokens=6),
        create_request("middle", 7, max_tokens=4),
        create_request("next", 5, max_tokens=1),
    ]
    sequences = [add(scheduler, request) for request in requests]
    seen: list[tuple[int, int]] = []
    while scheduler.running or not seen:
        planned, _ = step(scheduler, 2.0)
        seen.append((planned.num_decodes, planned.num_padding))
        assert scheduler.check_integrity() is None
        assert sequences[3] not in scheduler.running
    assert seen == [(0, 0), (3, 0), (2, 1), (2, 1), (1, 2), (1, 2)]
    assert scheduler.pool.num_used == 0
    assert step(scheduler, 2.0)[0].num_running == 1
    for sequence in sequences:
        assert sequence.token_ids[len(sequence.request.prompt_token_ids) :] == written(
            sequence.request
        )


def test_the_live_cap_bounds_the_next_batch() -> None:
    scheduler = create_static()
    set_limits(scheduler, 2, 512)
    for name in "abcde":
        add(scheduler, create_request(name, 5, max_tokens=3))
    assert step(scheduler, 5.0)[0].num_running == 2


def test_padding_gives_way_before_anyone_is_preempted() -> None:
    scheduler = create_static(num_blocks=6, max_model_len=96)
    add(scheduler, create_request("short", 30, max_tokens=2))
    add(scheduler, create_request("long", 30, max_tokens=60))
    add(scheduler, create_request("never", 90, max_tokens=2))
    step(scheduler, 2.0)
    while scheduler.running:
        step(scheduler, 2.0)
        assert scheduler.check_integrity() is None
    assert scheduler.counters.num_preemptions == 0
    while scheduler.has_work:
        step(scheduler, 9.0)
    assert scheduler.pool.num_used == 0


def test_aborting_the_last_that_runs_ends_the_batch() -> None:
    scheduler = create_static()
    for name, length in (("a", 1), ("b", 50), ("c", 50)):
        add(scheduler, create_request(name, 5, max_tokens=length))
    step(scheduler, 2.0)
    assert scheduler.abort("b")
    assert scheduler.pool.num_used > 0
    assert scheduler.abort("c")
    assert scheduler.pool.num_used == 0
    assert scheduler.check_integrity() is None
