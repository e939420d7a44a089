"""Under an order a newcomer waits for those alone who are served before it."""

import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sluice_core.contract import SchedulingPolicy, Slo, StepModel
from sluice_core.errors import DeadlineUnreachable, SluiceError
from sluice_core.ordering import Pace, Terms, arrange
from sluice_core.work import Deadlines, Work
from sluice_frontend.api.generate import Completion, parse_completion
from sluice_frontend.config import ServerConfig
from sluice_frontend.serving.forecast import Forecast, forecast_for
from sluice_worker.api.service import Service
from unit.worker.api.test_waiting_memory import create_service

PRICE_S = 0.5
"""Of a unit of work."""
TIMES = st.integers(-8, 16).map(float)
JOBS = st.builds(
    Terms,
    st.just(0),
    TIMES | st.just(math.inf),
    st.integers(-100, -1).map(float),
    st.integers(0, 6).map(float),
)
FULL = Forecast(
    num_open=4,
    num_running=4,
    num_waiting=0,
    cap=4,
    service_s=2.0,
    step_model=None,
    kv_per_seq=0.0,
)
"""Four places, all taken; one is free every half second."""
PLACE_S = 0.5


def served_before(
    newcomer: Terms, jobs: list[Terms], pace: Pace, gap_s: float
) -> tuple[int, float]:
    """How many of `jobs` are served before the newcomer, and when its turn comes, where whoever
    comes first by the order is served whenever it is time for one. `gap_s`: to the next time; 0:
    when the one before is done."""
    left, now_s, num_served = [*jobs, newcomer], 0.0, 0
    free = pace.num_free
    while True:
        if gap_s and free <= 0:
            now_s += gap_s
            free = 1
        in_time, late = arrange(left, now_s, pace._replace(num_free=free))
        chosen = left[[*in_time, *late][0]]
        if chosen is newcomer:
            return num_served, now_s
        left.remove(chosen)
        num_served, free = num_served + 1, free - 1
        now_s += 0.0 if gap_s else chosen.work * pace.price_s


@given(st.lists(JOBS, max_size=8), JOBS)
def test_a_newcomer_waits_for_the_prompts_that_the_order_has_before_it(
    jobs: list[Terms], newcomer: Terms
) -> None:
    newcomer = newcomer._replace(arrived_s=0.0)
    load = replace(FULL, num_open=len(jobs), num_running=0, cap=64, service_s=None)
    found = load.behind(newcomer, jobs, 0.0, PRICE_S)
    number, at_s = served_before(newcomer, jobs, Pace(PRICE_S), 0.0)
    assert found.num_behind == len(jobs) - number
    assert found.wait_s(1) == pytest.approx(at_s)


@given(st.lists(JOBS, max_size=8), JOBS)
def test_a_newcomer_waits_for_the_places_of_those_alone_whom_the_order_has_before_it(
    jobs: list[Terms], newcomer: Terms
) -> None:
    newcomer = newcomer._replace(arrived_s=0.0)
    load = replace(FULL, num_open=4 + len(jobs), num_waiting=len(jobs))
    found = load.behind(newcomer, jobs, 0.0, 0.0)
    number, at_s = served_before(newcomer, jobs, Pace(0.0, PLACE_S), PLACE_S)
    assert found.num_behind == len(jobs) - number
    assert found.wait_s(1) == pytest.approx(at_s)


def test_a_lower_priority_is_behind_whatever_its_deadline() -> None:
    jobs = [Terms(1, 1.0, -1.0, 4.0), Terms(-1, math.inf, -1.0, 2.0)]
    assert FULL.behind(Terms(0, 9.0, 0.0, 1.0), jobs, 0.0, PRICE_S).ahead_s == 2.0 * PRICE_S


def test_without_deadlines_it_waits_for_all_that_came_before() -> None:
    jobs = [Terms(0, math.inf, -age, 1.0) for age in range(1, 7)]
    load = replace(FULL, num_open=10, num_waiting=6)
    found = load.behind(Terms(0, math.inf, 0.0, 1.0), jobs, 0.0, 0.0)
    assert found.wait_s(1) == load.wait_s(1)


def test_prefills_whose_places_others_have_leave_nobody_room_sooner() -> None:
    """They run beyond the cap, and free nothing."""
    late = [Terms(0, -1.0, -2.0, 9.0)] * 4
    load = replace(FULL, num_open=8, num_running=8)
    assert load.behind(Terms(0, 60.0, 0.0, 1.0), late, 0.0, 0.0).wait_s(1) == PLACE_S


def serving(directory: Path, policy: SchedulingPolicy) -> Service:
    """One whose cap of four is full, behind which six wait that are late."""
    service = create_service(directory, ServerConfig())
    service.runtime.live = structs.replace(
        service.runtime.live, slo=Slo(ttft_ms=2000), scheduling_policy=policy, cap=4
    )
    recorder, now_s = service.runtime.recorder, time.monotonic()
    recorder.engine.step_model = StepModel(a=5.0, b=0.0, c=0.0, d=0.01, n=50, resid_q=1.0)
    recorder.recent.add_service(2.0)
    for _ in range(4):
        asyncio.run(service.open(asked(), now_s))
    for timer in list(recorder.requests.pending.values()):
        recorder.requests.leave(timer)  # they have their first tokens
    for _ in range(6):
        asyncio.run(service.open(asked(), now_s - 60.0))
    return service


def asked(ttft_ms: float | None = None) -> Completion:
    fields = {} if ttft_ms is None else {"slo_ttft_ms": ttft_ms}
    return parse_completion(json.dumps({"prompt": [1, 2], "max_tokens": 1, **fields}).encode())


def test_a_deadline_is_refused_where_all_that_came_before_go_first(tmp_path: Path) -> None:
    service = serving(tmp_path, "fcfs")
    with pytest.raises(DeadlineUnreachable) as refused:
        asyncio.run(service.open(asked(1400), time.monotonic()))
    assert refused.value.retry_after_s == 4


def test_a_deadline_is_let_in_before_the_late_and_refused_behind_those_in_time(
    tmp_path: Path,
) -> None:
    service = serving(tmp_path, "deadline")
    for ttft_ms in (900, 1400):
        assert asyncio.run(service.open(asked(ttft_ms), time.monotonic())).choices
    with pytest.raises(DeadlineUnreachable):
        asyncio.run(service.open(asked(1400), time.monotonic()))


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_who_is_dropped_hears_when_all_that_are_open_would_be_served(
    tmp_path: Path, policy: SchedulingPolicy
) -> None:
    """Shed keeps nobody late, so that in either order all go before a newcomer."""
    service = serving(tmp_path, policy)
    told: list[SluiceError] = []
    service.runtime.live = structs.replace(service.runtime.live, overload="Shed")

    def drop(request_id: str, error: SluiceError) -> None:
        told.append(error)

    service.client.drop = drop  # type: ignore[method-assign]
    now_s = time.monotonic()
    service.runtime.engine_liveness.serving(now_s)
    service.runtime.shed(now_s)
    assert [error.retry_after_s for error in told] == [4] * 6


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_a_client_with_nothing_here_waits_for_one_of_each_other_and_not_for_a_crowd(
    tmp_path: Path, policy: SchedulingPolicy
) -> None:
    service = serving(tmp_path, policy)
    runtime, now_s = service.runtime, time.monotonic()

    def wait_s(client: str) -> float:
        work = Work((2,), deadlines=Deadlines(60_000), client=client)
        return forecast_for(
            runtime.recorder, runtime.live, runtime.backend.num_open, work,
            arrival_s=now_s, now_s=now_s,
        ).place_s(1)  # fmt: skip

    place_s = 2.0 / 4
    own = {"fcfs": 7, "deadline": 1}[policy]  # its own six are late
    assert wait_s("") == pytest.approx(own * place_s)
    assert wait_s("another") == pytest.approx(2 * place_s)
