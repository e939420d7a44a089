"""An engine without work prepares what is left to prepare, and looks for messages in between."""

from typing import cast

from sluice_worker.engine import Engine
from sluice_worker.engine_process import Link, Loop
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
