"""An engine without work prepares what is left to prepare, and looks for messages in between."""

from pathlib import Path
from typing import cast

import pytest
from sluice_core.wire import Frame, Shutdown, encode_frame, split_frames
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine import startup
from sluice_worker.engine.loop import Engine
from sluice_worker.engine.process import Link, Loop
from sluice_worker.execution import runner
from sluice_worker.execution.runner import Runner
from unit.worker.engine.factories import create_engine, create_request, create_scheduler, run_all

MODEL = Path(__file__).parents[4] / "examples" / "model"


class Idle:
    """No work, and three things to prepare."""

    has_work = False
    num_steps = 0
    left = 3

    def use_idle_time(self) -> float:
        self.left -= 1
        return 0.0 if self.left >= 0 else float("inf")

    def idle_s(self, now: float) -> float:
        return float("inf")

    def snapshot(self) -> None:
        return None


class Quiet:
    """Nobody writes until it has been waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def send(self, message: Frame) -> None:
        pass

    def receive(self, timeout_s: float) -> list[bytes]:
        self.waits.append(timeout_s)
        return split_frames(bytearray(encode_frame(Shutdown()))) if timeout_s > 0 else []


def test_idle_time_is_used_before_it_is_waited_out() -> None:
    engine, link = Idle(), Quiet()
    Loop(cast(Link, link), cast(Engine, engine)).run([])
    assert link.waits[:3] == [0.0, 0.0, 0.0]
    assert 0 < link.waits[3] <= 1
    assert engine.left == -1


@pytest.mark.parametrize(("most_s", "num_asked"), [(startup.PREPARE_S, 4), (0.0, 0)])
def test_a_worker_that_will_never_be_idle_has_prepared_before_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, most_s: float, num_asked: int
) -> None:
    asked: list[Runner] = []

    def use_idle_time(self: Runner) -> bool:
        asked.append(self)
        return len(asked) < 4

    monkeypatch.setattr(Runner, "use_idle_time", use_idle_time)
    monkeypatch.setattr(startup, "PREPARE_S", most_s)
    engine, _ = startup.start(EngineConfig(str(MODEL), device="cpu"), lambda *_: None)
    assert asked == [engine.runner] * num_asked


HUGE_PAGE = 2 << 20


def resident_bytes() -> int:
    """Of no file, as pages of libraries may come and go."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def test_pages_that_come_next_have_their_memory_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = create_engine(MODEL, create_scheduler(num_blocks=16384))
    block_bytes = engine.runner.num_bytes // 16385
    monkeypatch.setattr(runner, "TOUCHED_AHEAD", 4096 * block_bytes)
    monkeypatch.setattr(runner, "TOUCHED_AT_ONCE", 1024 * block_bytes)
    before = resident_bytes()
    rests = [engine.use_idle_time() for _ in range(6)]
    assert all(0 < rest_s < float("inf") for rest_s in rests[:3])  # a CPU quota is for others too
    assert rests[3:] == [float("inf")] * 3
    edges = 2 * HUGE_PAGE * len(engine.runner.caches)  # touched whole at both ends of each
    assert abs(resident_bytes() - before - 4096 * block_bytes) <= edges

    prompt = list(range(100))
    requests = [create_request("a", prompt, max_tokens=40)]
    tokens = run_all(engine, requests)
    assert engine.scheduler.pool.first_unused == 9
    assert engine.use_idle_time() == float("inf")  # as many as were used, at once
    assert engine.runner._touched == 4096 + 9
    again = run_all(engine, [create_request("a", prompt, max_tokens=40)])
    assert again == tokens == run_all(create_engine(MODEL, create_scheduler()), requests)
    assert engine.scheduler.counters.prefix_hits > 0


def test_no_more_pages_are_touched_than_there_are() -> None:
    engine = create_engine(MODEL, create_scheduler(num_blocks=64))
    assert engine.use_idle_time() == float("inf")
    assert engine.runner._touched == 64
    assert engine.use_idle_time() == float("inf")
