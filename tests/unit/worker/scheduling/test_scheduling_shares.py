"""Each client has its share of the cap, whatever another sends; alone it has all."""

from collections import Counter
from random import Random

import pytest
from msgspec import structs
from sluice_core.contract import SchedulingPolicy
from sluice_core.port import EngineLimits
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from unit.worker.engine.factories import create_request, create_scheduler
from unit.worker.engine.virtual import unlimited

STEP_S = 0.01


class Served:
    """Clients of a scheduler, each of which keeps so many requests open."""

    def __init__(self, scheduler: Scheduler, crowds: dict[str, dict[str, int]]) -> None:
        self.scheduler, self.crowds = scheduler, crowds
        self.tokens: Counter[str] = Counter()
        self.chance, self.num = Random(5), 0
        for client, crowd in crowds.items():
            for _ in range(crowd["open"]):
                self.come(client, 0.0)

    def come(self, client: str, now: float) -> None:
        crowd, length = self.crowds[client], self.chance.randint(6, 10)
        request = create_request(
            str(self.num), crowd.get("prompt", 8), max_tokens=crowd.get("times", 1) * length
        )
        request = structs.replace(request, client=client, priority=crowd.get("priority", 0))
        self.num += 1
        self.scheduler.add(Sequence(request, seed=0), now)

    def run(self, num_steps: int) -> Counter[str]:
        """Tokens of answers by client."""
        for number in range(num_steps):
            now = number * STEP_S
            planned = self.scheduler.schedule(now, unlimited)
            sampled = [7 for work in planned.works if work.samples]
            for outcome in self.scheduler.commit(planned, sampled, now + STEP_S):
                client = outcome.sequence.request.client
                self.tokens[client] += 1
                if outcome.finish_reason is not None:
                    self.come(client, now + STEP_S)
        assert self.scheduler.check_integrity() is None
        return self.tokens


@pytest.mark.parametrize("policy", ["fcfs", "deadline", "priority"])
@pytest.mark.parametrize(
    "crowd",
    [{"open": 40}, {"open": 40, "priority": -1000}, {"open": 40, "times": 8}],
    ids=["by arrival", "with priority", "of long answers"],
)
def test_a_client_has_half_of_the_places_beside_any_crowd(
    policy: SchedulingPolicy, crowd: dict[str, int]
) -> None:
    scheduler = create_scheduler(cap=4, budget=64, num_blocks=200)
    scheduler.limits = EngineLimits(0, 4, 64, policy=policy)
    tokens = Served(scheduler, {"a": crowd, "b": {"open": 8}}).run(2000)
    assert 0.4 < tokens["b"] / tokens.total() < 0.6, tokens


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_a_prompt_waits_for_no_crowd_of_another_clients_prompts(policy: SchedulingPolicy) -> None:
    scheduler = create_scheduler(cap=32, budget=16, num_blocks=900)
    scheduler.limits = EngineLimits(0, 32, 16, policy=policy)
    served = Served(scheduler, {"a": {"open": 30, "prompt": 160}, "b": {"open": 0}})
    served.run(4)
    served.come("b", 4 * STEP_S)
    for number in range(4, 12):
        planned = scheduler.schedule(number * STEP_S, unlimited)
        sampled = [7 for work in planned.works if work.samples]
        outcomes = scheduler.commit(planned, sampled, (number + 1) * STEP_S)
        if any(outcome.sequence.request.client == "b" for outcome in outcomes):
            return
    raise AssertionError("it waits for prompts of the other")


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_a_lone_client_has_all_places(policy: SchedulingPolicy) -> None:
    scheduler = create_scheduler(cap=4, budget=64, num_blocks=200)
    scheduler.limits = EngineLimits(0, 4, 64, policy=policy)
    alone = Served(scheduler, {"a": {"open": 40}}).run(500).total()
    scheduler = create_scheduler(cap=4, budget=64, num_blocks=200)
    scheduler.limits = EngineLimits(0, 4, 64, policy=policy)
    both = Served(scheduler, {"a": {"open": 40}, "b": {"open": 40}}).run(500).total()
    assert alone == pytest.approx(both, rel=0.05)
