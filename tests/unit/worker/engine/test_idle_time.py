"""An engine without work prepares what is left to prepare, and looks for messages in between."""

from pathlib import Path
from typing import cast

import pytest
from sluice_worker import startup
from sluice_worker.config import EngineConfig
from sluice_worker.engine import Engine
from sluice_worker.engine_process import Link, Loop
from sluice_worker.runner import Runner
from sluice_worker.wire import Message, Shutdown, encode_frame, split_frames


class Idle:
    """No work, and three things to prepare."""

    has_work = False
    num_steps = 0
    left = 3

    def use_idle_time(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def idle_s(self, now: float) -> float:
        return float("inf")

    def snapshot(self) -> None:
        return None


class Quiet:
    """Nobody writes until it has been waited for."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def send(self, message: Message) -> None:
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


MODEL = Path(__file__).parents[4] / "examples" / "model"


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
