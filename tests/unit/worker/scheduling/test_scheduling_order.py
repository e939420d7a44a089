"""Who can still be in time goes first: at the cap, in the pool of blocks, and with chunks."""

import math
from random import Random

import pytest
from sluice_core.contract import SchedulingPolicy
from sluice_core.port import EngineLimits
from sluice_core.wire import Submit, packed
from sluice_frontend.evidence.recorder import largest_part
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import Step
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import FixedLaw

PER_TOKEN_S = 0.001


def add(scheduler: Scheduler, request: Submit, now: float = 0.0) -> Sequence:
    sequence = Sequence(request, seed=0)
    scheduler.add(sequence, now)
    return sequence


def step(scheduler: Scheduler, now: float = 0.0) -> dict[str, int]:
    """Tokens of each sequence in the next step."""
    planned = scheduler.schedule(now, FixedLaw(price=lambda *_: PER_TOKEN_S))
    scheduler.commit(planned, [7 for work in planned.works if work.samples], now)
    assert scheduler.check_integrity() is None
    return {work.sequence.request_id: work.num_tokens for work in planned.works}


def test_who_can_be_in_time_passes_a_prefill_that_cannot() -> None:
    scheduler = create_scheduler(budget=48)
    long = add(scheduler, create_request("long", 200, ttft_ms=100))
    assert step(scheduler) == {"long": 48}
    add(scheduler, create_request("short", 40, ttft_ms=100))
    assert step(scheduler, 0.05) == {"short": 40, "long": 8}
    assert long.num_computed_tokens == 56


def test_a_prefill_whose_place_is_taken_keeps_its_blocks_and_waits_for_the_cap() -> None:
    scheduler = create_scheduler(budget=48, cap=1)
    long = add(scheduler, create_request("long", 200, ttft_ms=100))
    step(scheduler)
    add(scheduler, create_request("short", 40, ttft_ms=100, max_tokens=2))
    blocks = list(long.block_ids)
    assert step(scheduler, 0.05) == {"short": 40}
    assert scheduler._running.num_computing == 1
    assert step(scheduler, 0.09) == {"short": 1}
    assert step(scheduler, 0.15) == {"long": 48}
    assert (long.block_ids, long.num_preemptions) == (blocks, 0)
    assert long.wait_cap_s == pytest.approx(0.10)


def test_whom_the_step_has_no_time_for_holds_no_blocks_and_waits_for_neither() -> None:
    scheduler = create_scheduler(budget=16)
    for name in "ab":
        add(scheduler, create_request(name, 16, ttft_ms=1000))
    assert step(scheduler) == {"a": 16}
    assert (scheduler.num_waiting_for("cap"), scheduler.num_waiting_for("kv")) == (0, 0)
    assert [each.request_id for each in scheduler.waiting] == ["b"]
    assert not scheduler.waiting[0].has_begun


def test_of_the_late_the_latest_gives_its_blocks_to_who_can_be_in_time() -> None:
    scheduler = create_scheduler(budget=16, num_blocks=23, prefix_caching=False)
    sequences = []
    for name, ttft_ms in (("oldest", 300), ("older", 200), ("latest", 100)):
        request = create_request(name, 96, ttft_ms=ttft_ms, max_tokens=4)
        sequences.append(add(scheduler, request))
        assert name in step(scheduler)
    oldest, older, latest = sequences
    assert all(sequence.block_ids for sequence in sequences)
    add(scheduler, create_request("urgent", 96, ttft_ms=1000, submitted_s=1), 1.0)
    assert "urgent" in step(scheduler, 1.0)
    assert (oldest.num_preemptions, older.num_preemptions, latest.num_preemptions) == (0, 0, 1)
    add(scheduler, create_request("late too", 96, ttft_ms=1, submitted_s=1), 1.2)
    step(scheduler, 1.2)
    assert older.num_preemptions == 0, "the late wait for each other"


def test_who_has_had_a_first_token_keeps_its_place_before_all_that_wait() -> None:
    scheduler = create_scheduler(budget=256, cap=2, num_blocks=8, prefix_caching=False)
    first, second = (
        add(scheduler, create_request(name, 48, max_tokens=40, ttft_ms=100)) for name in "ab"
    )
    while not second.num_preemptions:
        step(scheduler)
    assert second.num_output_tokens
    add(scheduler, create_request("urgent", 16, ttft_ms=1000))
    while first.block_ids:
        assert "urgent" not in step(scheduler)
    assert "b" in step(scheduler)


def test_answers_to_one_prompt_go_together_and_count_once() -> None:
    scheduler = create_scheduler(budget=64, cap=8)
    for i in range(3):
        request = create_request(f"n{i}", [5] * 64, ttft_ms=200, is_another=i > 0)
        add(scheduler, request)
    add(scheduler, create_request("due first", 100, ttft_ms=150))
    assert step(scheduler) == {"due first": 64}
    assert step(scheduler, 0.06) == {"due first": 36, "n0": 28}
    assert step(scheduler, 0.10) == {"due first": 1, "n0": 36}
    assert step(scheduler, 0.14) == {"due first": 1, "n0": 1, "n1": 16}
    assert step(scheduler, 0.15) == {"due first": 1, "n0": 1, "n1": 1, "n2": 16}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("deadline", ["c", "a", "b"]), ("priority", ["c", "b", "a"]), ("fcfs", ["b", "a", "c"])],
)
def test_the_policy_says_what_counts(policy: SchedulingPolicy, expected: list[str]) -> None:
    scheduler = create_scheduler(budget=16, cap=8, policy=policy, ttft_ms=500)
    requests = (
        create_request("b", 16, max_tokens=1),
        create_request("a", 16, max_tokens=1, ttft_ms=100),
        create_request("c", 16, max_tokens=1, priority=-1),
    )
    for request in requests:
        add(scheduler, request)
    assert [name for _ in range(3) for name in step(scheduler)] == expected


def test_targets_and_policy_change_live() -> None:
    scheduler = create_scheduler(budget=16, cap=8, policy="fcfs")
    for name in ("old", "new"):
        ttft_ms = {"old": None, "new": 100}[name]
        add(scheduler, create_request(name, 64, ttft_ms=ttft_ms))
    assert step(scheduler) == {"old": 16}
    scheduler.limits = EngineLimits(1, 8, 16, None, 1000, "deadline")
    assert step(scheduler, 0.01) == {"new": 16}, "in time, and due before the other"


# Over random traces

Model = tuple[float, float, float, float]
"""a, b, c, d of the step time."""


class Run:
    """Requests under one policy; a step takes what its model says, without noise."""

    def __init__(self, requests: list[Submit], limits: EngineLimits, num_blocks: int, model: Model):
        self.model, self.limits = model, limits
        self.scheduler = Scheduler(
            BlockPool(num_blocks, 16), limits, max_model_len=num_blocks * 16, vocab_size=1 << 20
        )
        self.first_s: dict[str, float] = {}
        self.ended: list[str] = []
        left, now = list(reversed(requests)), 0.0
        while left or self.scheduler.has_work:
            if not self.scheduler.has_work:
                now = max(now, left[-1].submitted_s)
            while left and left[-1].submitted_s <= now:
                add(self.scheduler, left.pop(), now)
            planned = self.scheduler.schedule(now, FixedLaw(self._chunk, self._price))
            assert planned.works
            now += self._seconds(planned)
            self._commit(planned, now)
        assert self.scheduler.check_integrity() is None

    def num_late(self, requests: list[Submit]) -> int:
        targets = {each.request_id: each.ttft_ms or self.limits.ttft_ms for each in requests}
        due_s = {r.request_id: r.arrived_s + (targets[r.request_id] or 0) / 1e3 for r in requests}
        return sum(self.first_s[name] > due for name, due in due_s.items())

    def _commit(self, planned: Step, now: float) -> None:
        sampled = [1] * sum(work.num_samples for work in planned.works)
        for outcome in self.scheduler.commit(planned, sampled, now):
            self.first_s.setdefault(outcome.sequence.request_id, now)
            if outcome.finish_reason:
                self.ended.append(outcome.sequence.request_id)

    def _seconds(self, planned: Step) -> float:
        a, b, c, d = self.model
        decodes, kv_tokens = planned.num_decodes, planned.num_kv_tokens
        return (a + b * decodes + c * kv_tokens + d * planned.num_prefill_tokens) / 1e3

    def _chunk(self, decodes: int, kv_tokens: int) -> int:
        a, b, c, d = self.model
        limit_ms = (self.limits.itl_ms if decodes else None) or 5000
        return int((limit_ms - a - b * decodes - c * kv_tokens) / (c + d))

    def _price(self, decodes: int, kv_tokens: int) -> float:
        a, b, c, d = self.model
        most = self.limits.max_num_batched_tokens - decodes
        chunk = max(min(self._chunk(decodes, kv_tokens), most), 16)
        return (a + b * decodes + c * kv_tokens + d * chunk) / chunk / 1e3


def random_requests(chance: Random, num_blocks: int) -> list[Submit]:
    """In clusters or one by one, of like or unlike lengths, some with deadlines of their own."""
    now, requests = 0.0, []
    mean, sigma = chance.choice((20, 100, 400)), chance.choice((0.1, 1.0))
    gap_s = chance.choice((0.0, chance.expovariate(5), chance.expovariate(50)))
    for number in range(chance.randint(5, 60)):
        now += chance.expovariate(1 / gap_s) if gap_s else 0.0
        now += chance.uniform(0, 3) if chance.random() < 0.05 else 0.0
        length = int(chance.lognormvariate(math.log(mean), sigma))
        length = min(max(1, length), num_blocks * 8)
        num_shared = length // 2 if chance.random() < 0.2 else 0
        prompt = packed([7] * num_shared + [100 + number] * (length - num_shared))
        ttft_ms = chance.uniform(50, 8000) if chance.random() < 0.3 else None
        length = chance.randint(1, 30)
        name = str(number)
        requests.append(
            Submit(name, prompt, length, 0.0, 0, True, [], 0, now, arrived_s=now, ttft_ms=ttft_ms)
        )
    return requests


@pytest.mark.parametrize("hundred", range(5))
def test_of_any_trace_all_end_once_and_hardly_more_are_late_than_first_come(hundred: int) -> None:
    num_fewer = 0
    for seed in range(100 * hundred, 100 * hundred + 100):
        chance = Random(seed)
        a, b, d = chance.uniform(1, 20), chance.uniform(0.01, 5), chance.uniform(0.02, 1)
        model = a, b, chance.choice((0, 1e-4, 1e-3)), d
        num_blocks, cap = chance.choice((64, 256, 4096)), chance.choice((1, 2, 4, 16, 64))
        itl_ms = a + b * cap * chance.uniform(1, 2) + d * chance.uniform(16, 200)
        requests, ttft_ms = random_requests(chance, num_blocks), chance.uniform(50, 5000)
        late: dict[SchedulingPolicy, int] = {}
        for policy in ("fcfs", "deadline"):
            limits = EngineLimits(0, cap, 2048, itl_ms, ttft_ms, policy)
            run = Run(requests, limits, num_blocks, model)
            assert sorted(run.ended) == sorted(each.request_id for each in requests)
            late[policy] = run.num_late(requests)
        assert late["deadline"] <= late["fcfs"] + 0.01 * len(requests), seed
        num_fewer += late["deadline"] < late["fcfs"]
    assert num_fewer > 10


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"cap": 1}, "cap"), ({"num_blocks": 8}, "kv"), ({"budget": 33, "num_blocks": 80}, "prefill")],
)
def test_who_is_passed_by_is_booked_to_what_it_waits_for(
    changes: dict[str, int], cause: str
) -> None:
    """Those that pass it change nothing of that: they wait for the same, for less long."""
    scheduler = create_scheduler(**{"budget": 200, "prefix_caching": False, **changes})  # type: ignore[arg-type]
    add(scheduler, create_request("runs", 32, max_tokens=64))
    step(scheduler)
    now = 0.0
    late = add(scheduler, create_request("late", 96, ttft_ms=50, submitted_s=now))
    while late.num_output_tokens < 1:
        now += 0.1
        if now < 3:
            add(
                scheduler,
                create_request(f"{now:.1f}", 32, max_tokens=1, ttft_ms=500, submitted_s=now),
            )
        step(scheduler, now)
    assert now > 1.5
    assert largest_part(late.time_spent(now), now) == cause


def test_a_prefill_knows_for_how_long_others_went_before_it() -> None:
    """Under first come, first served it waits for those that came before: that is its own time."""
    for policy, passed_s in (("deadline", 0.25), ("fcfs", 0.0)):
        scheduler = create_scheduler(budget=48, policy=policy)  # type: ignore[arg-type]
        first, second = (
            add(scheduler, create_request(name, 96, ttft_ms=limit_ms))
            for name, limit_ms in (("first", 300), ("second", 9000))
        )
        for now in (0.0, 0.1, 0.25, 0.3, 0.4):
            step(scheduler, now)
        spent = [each.time_spent(0.4) for each in (first, second)]
        assert [parts.passed_s for parts in spent] == [0.0, pytest.approx(passed_s)]
        assert spent[1].prefill_s == pytest.approx(0.4)


def test_who_waits_for_a_turn_alone_is_counted_as_waiting() -> None:
    """It has a place and blocks, and others fill the step."""
    scheduler = create_scheduler(budget=48)
    add(scheduler, create_request("first", 96, ttft_ms=300))
    add(scheduler, create_request("second", 96, ttft_ms=9000))
    step(scheduler, 0.0)
    assert (
        scheduler.num_waiting_for("cap"),
        scheduler.num_waiting_for("kv"),
        scheduler.num_waiting_for("time"),
    ) == (0, 0, 1)
