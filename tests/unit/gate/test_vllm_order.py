"""vLLM's queue in the order of the core's ordering."""

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_core.port import EngineLimits
from sluice_vllm.order import DeadlineOrder, own_deadline_ms

PRICE_S = 0.001
DEADLINE = EngineLimits(
    epoch=1, cap=4, max_num_batched_tokens=512, ttft_ms=1000.0, policy="deadline"
)


@dataclass
class Request:
    name: str
    arrival_time: float
    num_tokens: int = 100
    extra_args: Any = None
    priority: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    sampling_params: Any = field(init=False)

    def __post_init__(self) -> None:
        self.sampling_params = SimpleNamespace(extra_args=self.extra_args)


def names(waiting: deque[Any]) -> list[str]:
    return [request.name for request in waiting]


def test_the_sooner_deadline_comes_first() -> None:
    waiting = deque([Request("a", 0.0), Request("urgent", 0.1, extra_args={"sluice_ttft_ms": 300})])
    DeadlineOrder(DEADLINE).arrange(waiting, 0.1, PRICE_S, 4)
    assert names(waiting) == ["urgent", "a"]


def test_the_most_work_gives_way_where_not_all_can_be_in_time() -> None:
    long = Request("long", 0.0, num_tokens=900)
    waiting = deque([long, *(Request(f"short{i}", 0.01) for i in range(3))])
    DeadlineOrder(DEADLINE).arrange(waiting, 0.05, PRICE_S, 4)
    assert names(waiting) == ["short0", "short1", "short2", "long"]


def test_who_was_preempted_comes_before_all() -> None:
    late = Request("preempted", 5.0, num_preemptions=1)
    waiting = deque([Request("a", 0.0), late])
    DeadlineOrder(DEADLINE).arrange(waiting, 5.0, PRICE_S, 4)
    assert names(waiting) == ["preempted", "a"]


def test_who_left_is_forgotten_and_who_came_is_placed() -> None:
    order, first = DeadlineOrder(DEADLINE), Request("first", 0.0)
    waiting = deque([first, Request("second", 0.2)])
    order.arrange(waiting, 0.2, PRICE_S, 4)
    waiting.popleft()
    waiting.append(Request("third", 0.3, extra_args={"sluice_ttft_ms": 200}))
    order.arrange(waiting, 0.3, PRICE_S, 4)
    assert names(waiting) == ["third", "second"]


def test_who_would_wait_too_long_for_a_place_stands_behind() -> None:
    order = DeadlineOrder(DEADLINE)
    waiting = deque(Request("old", 0.0) for _ in range(40))
    for second in range(40):  # a place comes once in a second
        order.arrange(waiting, float(second), PRICE_S, 1)
        waiting.popleft()
    waiting.extend(Request(str(i), 40.0 + i / 100, num_tokens=60 - i) for i in range(4))
    order.arrange(waiting, 40.1, PRICE_S, 2)
    assert set(names(waiting)[2:]) == {"0", "1"}, "the longest two give way"


@pytest.mark.parametrize("extra", [None, {}, {"sluice_ttft_ms": "soon"}, {"sluice_ttft_ms": -1}])
def test_what_is_no_deadline_is_none(extra: object) -> None:
    assert own_deadline_ms(Request("a", 0.0, extra_args=extra)) is None
