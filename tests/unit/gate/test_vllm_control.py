"""The control of a scheduler that behaves like vLLM's, as far as it is used."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from engines.gate import Gate
from sluice_core.port import EngineLimits
from sluice_vllm.control import Control, attach
from sluice_vllm.settings import InnerSettings
from unit.gate.made_vllm import CEILING, TOKENS, Request, Scheduler

Make = Callable[..., tuple["Control", "Scheduler"]]


def step(control: Control, scheduler: Scheduler) -> Any:
    started_s = control.before_step()
    output = scheduler.schedule()
    control.scheduled(output, started_s)
    scheduler.end(output)
    control.ended(output)
    return output


@pytest.fixture
def gate() -> Iterator[Gate]:
    with TemporaryDirectory() as directory:  # a socket's path is short
        gate = Gate(Path(directory) / "s", EngineLimits(1, 4, 256, itl_ms=50.0))
        yield gate
        gate.close()


@pytest.fixture
def controlled() -> Iterator[Make]:
    """Makes a control that has the limits of the gate at a path."""
    made: list[Control] = []

    def make(path: Path, *, epoch: int = 1, may_cut: bool = True) -> tuple[Control, Scheduler]:
        scheduler = Scheduler(num_blocks=100)
        given = InnerSettings(str(path))
        made.append(Control(scheduler, given, "0", may_cut=may_cut, may_hold=may_cut))
        until_in_force(made[-1], epoch)
        return made[-1], scheduler

    yield make
    for control in made:
        assert control.link is not None
        control.link.close()


def until_in_force(control: Control, epoch: int) -> None:
    while control.limits.epoch != epoch:
        control.before_step()


def test_the_gate_is_told_what_the_engine_holds(gate: Gate, controlled: Make) -> None:
    controlled(gate.path)
    gate.until(lambda: gate.ready is not None)
    assert gate.ready is not None
    assert (gate.ready.ceiling, gate.ready.cap) == (CEILING, CEILING)
    assert (gate.ready.num_blocks, gate.ready.kv_tokens) == (100, 1600)
    assert gate.ready.kernels == "vLLM 0"


def test_a_cap_from_the_gate_holds_from_the_next_step_on(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    scheduler.come(*(Request(str(i), prompt=8) for i in range(20)))
    step(control, scheduler)
    assert len(scheduler.running) == 4
    gate.configure(EngineLimits(2, 9, 256))
    until_in_force(control, 2)
    step(control, scheduler)
    assert len(scheduler.running) == 9


def test_no_limit_is_over_what_the_engine_was_started_for(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    gate.configure(EngineLimits(2, 1000, 1 << 20))
    until_in_force(control, 2)
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (CEILING, TOKENS)


def test_each_step_is_reported_with_what_it_did(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    scheduler.come(*(Request(str(i), prompt=40) for i in range(6)))
    step(control, scheduler)
    step(control, scheduler)
    gate.until(lambda: len(gate.reports) >= 2)
    first, second = gate.reports[:2]
    assert (first.epoch, first.num_decodes, first.num_prefill_tokens) == (1, 0, 160)
    assert (second.num_decodes, second.num_prefill_tokens, second.num_kv_tokens) == (4, 0, 4 * 41)
    assert second.at_cap
    assert (second.snapshot.running, second.snapshot.waiting_cap) == (4, 2)
    assert second.snapshot.used_blocks == 4 * 3
    assert second.step_s > 0
    assert second.step_model is not None


def test_what_waits_below_the_cap_waits_for_memory_or_its_turn(
    gate: Gate, controlled: Make
) -> None:
    control, scheduler = controlled(gate.path)
    scheduler.come(Request("a"), Request("b"))
    for usage in (0.99, 0.5):
        scheduler.kv_cache_manager = SimpleNamespace(usage=usage)
        output = SimpleNamespace(
            num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1, preempted_req_ids={"c"}
        )
        control.scheduled(output, control.before_step())
        control.ended(output)
    gate.until(lambda: len(gate.reports) >= 2)
    full, half = (report.snapshot for report in gate.reports[:2])
    assert (full.waiting_kv, full.waiting_turn) == (2, 0)
    assert (half.waiting_kv, half.waiting_turn) == (0, 2)
    assert half.num_preemptions == 2


def test_a_chunk_before_a_decode_does_not_take_its_token(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    decode, chunk = Request("d", 10, 10), Request("c", 600, 100, is_prefill_chunk=True)
    scheduler.running = [chunk, decode]
    control.before_step()
    assert scheduler.running == [decode, chunk]


def test_a_step_of_decodes_alone_has_the_whole_budget(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    scheduler.running = [Request("d", 10, 10)]
    control.before_step()
    assert scheduler.max_num_scheduled_tokens == TOKENS


def test_the_limits_outlive_their_gate(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    gate.close()
    scheduler.come(Request("a"))
    for _ in range(3):
        step(control, scheduler)
    assert control.limits.cap == 4


def test_a_gate_that_comes_late_is_found(gate: Gate, controlled: Make) -> None:
    path = gate.path.with_name("late")
    control, _ = controlled(path, epoch=0)
    late = Gate(path, EngineLimits(7, 3, 64))
    until_in_force(control, 7)
    assert control.limits.cap == 3
    late.close()


def test_the_queue_is_in_order_of_deadlines_where_a_place_is_free(
    gate: Gate, controlled: Make
) -> None:
    control, scheduler = controlled(gate.path)
    gate.configure(EngineLimits(2, 1, 256, ttft_ms=1e9, policy="deadline"))
    until_in_force(control, 2)
    urgent = SimpleNamespace(extra_args={"sluice_ttft_ms": 1e8})
    scheduler.come(
        Request("a", arrival_time=1e9), Request("b", arrival_time=1e9, sampling_params=urgent)
    )
    step(control, scheduler)
    assert [request.request_id for request in scheduler.running] == ["b"]


def test_a_scheduler_that_is_not_known_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Scheduler):
        def schedule(self) -> Any:
            return None

    with caplog.at_level(logging.WARNING):
        assert attach(Other(), Other, "9.9") is None
    (line,) = caplog.messages
    assert line.startswith("Sluice leaves vLLM 9.9 as it is, and the gate holds the cap: ")


def test_without_chunked_prefill_only_the_cap_is_live(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path, may_cut=False)
    scheduler.come(Request("a", prompt=600))
    control.before_step()
    assert (scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens) == (4, TOKENS)


def test_the_share_of_the_deadline_that_a_hold_may_use_is_the_gates(
    gate: Gate, controlled: Make
) -> None:
    control, _ = controlled(gate.path)
    gate.configure(EngineLimits(2, 20, TOKENS, 50.0, 5000.0, "deadline", hold_share=0.25))
    until_in_force(control, 2)
    assert control.limits.hold_share == 0.25


def test_a_step_that_is_long_on_purpose_is_reported_as_such(gate: Gate, controlled: Make) -> None:
    control, scheduler = controlled(gate.path)
    scheduler.come(Request("a"), Request("b"))
    for is_long in (True, False):
        started_s = control.before_step()
        control.steering.division = control.steering.division._replace(is_long=is_long)
        output = scheduler.schedule()
        control.scheduled(output, started_s)
        scheduler.end(output)
        control.ended(output)
    gate.until(lambda: len(gate.reports) >= 2)
    assert [report.is_long for report in gate.reports[:2]] == [True, False]
