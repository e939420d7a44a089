"""The engine process: `python -m sluice_worker.engine.process --fd N`.

It starts before torch is imported, because the thread settings of OpenMP are read only once. The
first frame that it receives is the `EngineConfig`; from then on it speaks `wire`.
"""

import argparse
import gc
import importlib
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from sluice_core.errors import StartupError, told
from sluice_core.model.files import Directory, checkpoint_dir
from sluice_core.model.stored import read_config
from sluice_core.model.tasks import task_of
from sluice_core.port import EngineLimits
from sluice_core.wire import (
    Abort,
    CheckIntegrity,
    Encode,
    Failed,
    FromEngine,
    Heartbeat,
    Integrity,
    Ready,
    Shutdown,
    Starting,
    Submit,
    ToEngine,
    encode_frame,
    split_frames,
    to_engine_decoder,
)

from ..base.config import EngineConfig
from ..base.resources import Resources
from ..execution.models.config import check_built

if TYPE_CHECKING:
    from .encoding import EncodingEngine
    from .loop import Engine

    AnyEngine = Engine | EncodingEngine

HEARTBEAT_S = 1.0
RECEIVE_BYTES = 1 << 18
LARGE_BYTES = 1 << 16
"""Bytes of a read from which on it counts as part of a burst."""
REFILL_S = 0.001
"""Seconds that the sender may take to refill the socket before it counts as empty."""
BURST_S = 0.02
"""Seconds that a step may wait for the rest of a burst."""


class Disconnected(Exception):
    """The API process is gone: nobody is left to work for."""


class Link:
    """The socket to the API process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def send(self, message: FromEngine) -> None:
        """Send one message; raises Disconnected."""
        try:
            self._socket.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Disconnected from error

    def receive(self, timeout_s: float) -> list[bytes]:
        """Frames that are there, waiting at most `timeout_s` for the first; raises Disconnected.

        The socket holds only a part of a burst. An `Abort` or `EngineLimits` behind it must not
        wait for as many steps as there are parts.
        """
        if self._read(timeout_s) >= LARGE_BYTES:
            end_s = time.monotonic() + BURST_S
            while self._read(REFILL_S) and time.monotonic() < end_s:
                pass
        return split_frames(self._buffer)

    def _read(self, timeout_s: float) -> int:
        """Number of bytes read, waiting at most `timeout_s` for the first."""
        readable, _, _ = select.select([self._socket], [], [], max(timeout_s, 0.0))
        if not readable:
            return 0
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except ConnectionResetError as error:
            raise Disconnected from error
        if not data:
            raise Disconnected
        self._buffer += data
        return len(data)

    def receive_config(self) -> tuple[EngineConfig, list[bytes]]:
        """The first frame, and those that came right behind it."""
        frames: list[bytes] = []
        while not frames:
            frames = self.receive(HEARTBEAT_S)
        return msgspec.msgpack.decode(frames[0], type=EngineConfig), frames[1:]


class Loop:
    """Steps while there is work, answers messages between steps, and beats once a second."""

    def __init__(self, link: Link, engine: "AnyEngine") -> None:
        self._link = link
        self._engine = engine
        self._is_draining = False
        self._next_beat = 0.0

    def run(self, frames: list[bytes]) -> None:
        """Returns after a Shutdown, once nothing runs or waits; raises Disconnected."""
        while True:
            for frame in frames:
                self._handle(to_engine_decoder.decode(frame))
            if self._is_draining and not self._engine.has_work:
                return
            self._beat(time.monotonic())
            if self._engine.has_work:
                self._step()
            frames = self._link.receive(self._idle_s())

    def _idle_s(self) -> float:
        """Seconds to wait for a message until there is something to do without one."""
        rest_s = float("inf") if self._engine.has_work else self._engine.use_idle_time()
        now = time.monotonic()
        return min(rest_s, self._engine.idle_s(now), self._next_beat - now)

    def _step(self) -> None:
        report, failures = self._engine.step()
        if report is not None:
            self._link.send(report)
        for failure in failures:  # after the tokens of a draft's right part
            self._link.send(failure)

    def _handle(self, message: ToEngine) -> None:
        answer: FromEngine | None = None
        match message:
            case Submit() | Encode():  # the API process sends what its model's task needs
                answer = self._engine.submit(message, time.monotonic())  # type: ignore[arg-type]
            case Abort():
                answer = self._engine.abort(message)
            case EngineLimits():
                self._engine.configure(message)
            case CheckIntegrity():
                answer = Integrity(self._engine.check_integrity())
            case Shutdown():
                self._is_draining = True
        if answer is not None:
            self._link.send(answer)

    def _beat(self, now: float) -> None:
        if now >= self._next_beat:
            self._next_beat = now + HEARTBEAT_S
            engine = self._engine
            self._link.send(Heartbeat(engine.num_steps, engine.has_work, engine.snapshot()))


def serve(link: Link) -> int:
    """Start, serve and stop; the process's exit status."""
    config, frames = link.receive_config()
    link.send(Starting("import", 0))
    set_threads(Resources().num_threads())
    try:
        engine, ready = _started(config, lambda phase, percent: link.send(Starting(phase, percent)))
        link.send(ready)
        # All living objects stay: collections need not look at them again.
        gc.collect()
        gc.freeze()
        Loop(link, engine).run(frames)
    except StartupError as error:
        link.send(Failed(error.message))
        return error.exit_status
    except Disconnected:
        raise
    except Exception as error:
        traceback.print_exc()  # before the message: a pod's status quotes the log's end
        link.send(Failed(told(error)))
        return 1
    return 0


def _started(config: EngineConfig, progress: Callable[[str, int], None]) -> tuple[Any, Ready]:
    """The engine of the model's task. Torch, which reads the settings of `serve`, is imported once
    the model is known to be built: that takes seconds."""
    source = Directory(checkpoint_dir(config.model))
    config_json = read_config(source)
    check_built(source, config_json)
    gc.disable()  # modules stay: looking for garbage takes a seventh of the import
    name = "startup" if task_of(source, config_json) == "generate" else "encoding_start"
    start = importlib.import_module(f".{name}", __package__).start
    gc.enable()
    engine, ready = start(config, progress)
    return engine, ready


def set_threads(count: int) -> None:
    """Use `count` threads, which spin only briefly while they wait.

    With default spinning, two threads on busy cores took 10-100 times as long (measured). Spinning
    for some ten microseconds bridges the gap between two operations of a step. It makes a worker
    alone 2-3 % faster and two on the same cores 5 % slower; a hundred: 6 % and 33 %.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(count))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; `--fd` is the inherited socket."""
    parser = argparse.ArgumentParser(prog="sluice_worker.engine.process")
    parser.add_argument("--fd", type=int, required=True)
    fd: int = parser.parse_args(arguments).fd
    with socket.socket(fileno=fd) as sock:
        sock.setblocking(True)
        try:
            return serve(Link(sock))
        except Disconnected:
            return 1


if __name__ == "__main__":
    sys.exit(main())
