"""The cheapest goes, never the oldest, and everyone gets to the end."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_frontend.evidence.recorder import largest_part
from sluice_worker.scheduling import running as running_module
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.preemption import choose_victim, recompute_tokens
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from unit.worker.engine.factories import Sliced, create_request, create_scheduler
from unit.worker.engine.virtual import FixedLaw, add, step, written


class Watched:
    """`choose_victim`, remembering whom it chose among whom."""

    def __init__(self) -> None:
        self.num_chosen: Counter[str] = Counter()

    def __call__(self, running: list[Sequence], pool: BlockPool) -> Sequence:
        victim = choose_victim(running, pool)
        oldest = min(running, key=lambda sequence: sequence.order)
        assert victim is not oldest
        assert running[0] is oldest
        cost = recompute_tokens(victim, pool)
        for other in running:
            useful = any(pool.num_owners(block) == 1 for block in other.block_ids)
            assert other is oldest or not useful or recompute_tokens(other, pool) >= cost
        self.num_chosen[victim.request_id] += 1
        return victim


def test_what_others_share_is_known_without_looking_at_the_text() -> None:
    scheduler = create_scheduler(num_blocks=64, block_size=4, prefix_caching=True)
    sequence = add(scheduler, create_request("a", list(range(100)), max_tokens=4))
    while sequence.num_computed_tokens <= 100:
        step(scheduler)
    sequence.token_ids = text = Sliced(sequence.token_ids)
    assert recompute_tokens(sequence, scheduler.pool) == sequence.num_computed_tokens
    assert text.num_slices == 0
    assert len(scheduler.pool.match(text, "")) == 25


LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=2, max_size=14)


@given(LENGTHS, st.integers(16, 24), st.booleans(), st.integers(4, 64))
@settings(max_examples=120)
def test_the_cheapest_but_never_the_oldest_is_preempted_and_all_reach_their_end(
    lengths: list[tuple[int, int]], num_blocks: int, caching: bool, budget: int
) -> None:
    scheduler = create_scheduler(
        num_blocks=num_blocks,
        block_size=4,
        cap=8,
        budget=budget,
        max_model_len=60,
        prefix_caching=caching,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_module, "choose_victim", Watched())
        sequences = [
            add(scheduler, create_request(str(i), [j % 3 for j in range(n)], max_tokens=m))
            for i, (n, m) in enumerate(lengths)
        ]
        bound = 40 * sum(n + m for n, m in lengths)
        for _ in range(bound):
            if not scheduler.has_work:
                break
            first = min(scheduler.running, key=lambda sequence: sequence.order, default=None)
            step(scheduler)
            assert scheduler.check_integrity() is None
            running = [sequence.order for sequence in scheduler.running]
            waiting = [sequence.order for sequence in scheduler.waiting]
            assert running == sorted(running)
            assert waiting == sorted(waiting)
            assert first is None or first.order not in waiting
    assert not scheduler.has_work
    for sequence in sequences:
        assert sequence.token_ids[len(sequence.request.prompt_token_ids) :] == written(
            sequence.request
        )


def create_full(*prompts: list[int]) -> tuple[Scheduler, list[Sequence]]:
    """Sequences that have all their prompts computed, in a pool without a free block."""
    scheduler = create_scheduler(num_blocks=64, block_size=4, cap=8, budget=512, max_model_len=200)
    sequences = [
        add(scheduler, create_request(str(i), prompt, max_tokens=50))
        for i, prompt in enumerate(prompts)
    ]
    step(scheduler)
    return scheduler, sequences


def test_the_shortest_is_cheapest_and_of_equals_the_newest() -> None:
    scheduler, (_, second, third, fourth) = create_full([1] * 9, [2] * 21, [3] * 13, [4] * 13)
    assert choose_victim(scheduler.running, scheduler.pool) is fourth
    scheduler.abort(fourth.request_id)
    assert choose_victim(scheduler.running, scheduler.pool) is third
    scheduler.abort(third.request_id)
    assert choose_victim(scheduler.running, scheduler.pool) is second


def test_a_prefix_that_another_one_holds_is_not_lost() -> None:
    shared = list(range(40))
    scheduler, _ = create_full(shared, [7] * 20)
    late = add(scheduler, create_request("late", [*shared, 90, 91, 92], max_tokens=50))
    step(scheduler)
    assert late.num_computed_tokens == 43
    assert recompute_tokens(late, scheduler.pool) == 3
    assert choose_victim(scheduler.running, scheduler.pool) is late
    scheduler.abort("0")  # now the blocks are its own
    assert recompute_tokens(late, scheduler.pool) == 43


def test_thrown_away_tokens_are_those_that_are_computed_again() -> None:
    chance = random.Random(3)
    scheduler = create_scheduler(num_blocks=20, block_size=4, cap=6, max_model_len=60)
    requests = [
        create_request(str(i), chance.randint(5, 30), max_tokens=chance.randint(10, 30))
        for i in range(30)
    ]
    sequences = [add(scheduler, request) for request in requests]
    num_computed = 0
    while scheduler.has_work:
        planned, _ = step(scheduler)
        num_computed += planned.num_prefill_tokens + planned.num_decodes
    needed = sum(len(r.prompt_token_ids) + r.max_tokens - 1 for r in requests)
    assert scheduler.counters.num_preemptions > 5
    assert scheduler.counters.num_preemptions == sum(s.num_preemptions for s in sequences)
    # First admissions hit nothing: no two prompts are alike.
    assert scheduler.counters.preempted_tokens == num_computed - needed > 0


def test_what_is_waited_for_after_a_preemption_is_no_prefill() -> None:
    scheduler = create_scheduler(
        num_blocks=48, budget=2048, itl_ms=50.0, max_model_len=768, prefix_caching=False
    )
    add(scheduler, create_request("grows", 95, max_tokens=200))
    parts, now_s = None, 0.0
    while parts is None:
        if now_s == 0.1:
            waits = add(scheduler, create_request("waits", 656))
        work = scheduler.schedule(now_s, FixedLaw(lambda decodes, kv_tokens: 2))
        now_s += 0.1
        outcomes = scheduler.commit(
            work, [5 for w in work.works for _ in range(w.num_samples)], now_s
        )
        found = [o for o in outcomes if o.sequence.request_id == "waits"]
        parts = found[0].sequence.time_spent(now_s) if found else None
    ttft_s = now_s - 0.1
    assert waits.num_preemptions == 1
    assert parts.wait_kv_s + parts.prefill_s == pytest.approx(ttft_s, abs=0.2)
    assert largest_part(parts, ttft_s) == "kv"
