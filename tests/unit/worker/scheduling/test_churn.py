"""Ten thousand requests that come, leave and push each other out; and what pages waste."""

import random
from typing import Any

import pytest
from msgspec import structs
from sluice_core.wire import Submit
from sluice_worker.base.config import NgramSpeculation
from sluice_worker.scheduling import drafts as drafts_module
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.speculation import Drafter
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import add, set_limits, step, written

NUM_REQUESTS = 10_000


def random_request(chance: random.Random, number: int) -> Submit:
    """Short, some with a prefix in common, some greedy and some not."""
    shared = [chance.randrange(3)] * chance.choice((0, 0, 8, 12))
    prompt = [*shared, *(chance.randrange(6) for _ in range(chance.randint(1, 12)))]
    return create_request(
        str(number),
        prompt,
        max_tokens=chance.choice((1, 2, 8, 24, 40)),
        temperature=chance.choice((0.0, 0.0, 1.0)),
        salt=chance.choice(("", "", "salt")),
    )


class Reckless(Drafter):
    """Drafts however wrong it was."""

    @property
    def is_on(self) -> bool:
        return True


def free_rows(decodes: int, kv_tokens: int, drafted: int) -> float:
    return 1.0


class Churn:
    """Arrivals, departures and live limits, all from one seed."""

    def __init__(self, scheduler: Scheduler, seed: int, num_clients: int = 1) -> None:
        self.scheduler = scheduler
        self.chance = random.Random(seed)
        self.num_clients = num_clients
        self.live: dict[str, Sequence] = {}
        self.num_arrived = self.num_finished = self.num_aborted = 0

    def turn(self) -> None:
        """Some arrivals, perhaps an abort or other limits, and one step."""
        chance, scheduler = self.chance, self.scheduler
        for _ in range(min(chance.choice((0, 1, 2, 4)), NUM_REQUESTS - self.num_arrived)):
            if len(self.live) < 24:
                request = random_request(chance, self.num_arrived)
                client = f"client {self.num_arrived % self.num_clients}"
                request = structs.replace(request, client=client)
                self.live[request.request_id] = add(scheduler, request)
                self.num_arrived += 1
        if self.live and chance.random() < 0.1:
            name = chance.choice(list(self.live))
            assert scheduler.abort(name)
            del self.live[name]
            self.num_aborted += 1
        if chance.random() < 0.05:
            set_limits(scheduler, chance.randint(1, 12), chance.choice((4, 16, 64, 256)))
        for outcome in step(scheduler, growth=free_rows)[1]:
            if outcome.finish_reason is not None:
                ended = self.live.pop(outcome.sequence.request_id)
                prompt = ended.request.prompt_token_ids
                assert ended.token_ids[len(prompt) :] == written(ended.request)
                self.num_finished += 1


def test_10_000_requests_with_aborts_preemptions_and_cap_changes_leak_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafts_module, "Drafter", Reckless)
    speculation = NgramSpeculation("ngram", 5, prompt_lookup_max=3, prompt_lookup_min=2)
    scheduler = create_scheduler(
        num_blocks=20, block_size=4, cap=12, max_model_len=64, speculation=speculation
    )
    churn = Churn(scheduler, seed=11, num_clients=3)
    num_turns = 0
    while churn.num_arrived < NUM_REQUESTS or churn.live:
        churn.turn()
        num_turns += 1
        if num_turns % 16 == 0:
            assert scheduler.check_integrity() is None
    assert churn.num_finished + churn.num_aborted == NUM_REQUESTS
    assert scheduler.check_integrity() is None
    assert (scheduler.pool.num_used, scheduler.has_work) == (0, False)
    assert not scheduler._queue.line._shares
    assert scheduler.pool.num_available == scheduler.pool.num_total
    counters = scheduler.counters
    assert min(counters.num_preemptions, churn.num_aborted, counters.num_drafts) > 500
    assert 500 < sum(counters.accepted_by_position) < counters.draft_tokens - 500
    assert counters.prefix_hits > 1000


def test_the_head_of_the_queue_starts_in_the_first_step_that_has_room_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever still waits below the cap is asked about again, as if for the first time."""
    choose, num_waiting = Scheduler._prefills, 0

    def checked(scheduler: Scheduler, *args: Any, may_admit: bool) -> list[Sequence]:
        nonlocal num_waiting
        prefills = choose(scheduler, *args, may_admit=may_admit)
        is_room = len(scheduler.running) < scheduler.limits.cap
        if may_admit and scheduler.waiting and is_room:
            head, pool = scheduler.waiting[0], scheduler.pool
            matched = pool.match(head.token_ids, head.request.cache_salt)
            needed = -(-head.num_tokens // pool.block_size) - len(matched) + 1
            assert scheduler.running
            assert pool.num_lacking(matched, needed) > 0
            num_waiting += 1
        return prefills

    monkeypatch.setattr(Scheduler, "_prefills", checked)
    for seed in range(8):
        scheduler = create_scheduler(num_blocks=20, block_size=4, cap=12, max_model_len=64)
        churn = Churn(scheduler, seed)
        for _ in range(400):
            churn.turn()
    assert num_waiting > 500


def test_pages_of_16_waste_at_most_4_percent_at_a_mean_length_of_188() -> None:
    chance = random.Random(5)
    scheduler = create_scheduler(
        num_blocks=2000, block_size=16, cap=48, budget=4096, max_model_len=600, prefix_caching=False
    )
    used = wasted = 0.0
    lengths: list[int] = []
    for number in range(600):
        prompt = 20 + int(chance.expovariate(1 / 125))
        request = create_request(str(number), min(prompt, 400), max_tokens=chance.randint(2, 150))
        add(scheduler, request)
        if number < 48:
            continue
        for _ in range(2):
            step(scheduler)
            lengths += [sequence.num_tokens for sequence in scheduler.running]
            slots = scheduler.pool.num_used * 16
            used, wasted = (
                used + slots,
                wasted + slots * scheduler.cache.rounding_waste(scheduler.running),
            )
    mean = sum(lengths) / len(lengths)
    assert 180 < mean < 196, mean
    assert wasted / used <= 0.04 * 188 / mean
