"""*Rim*: the gate's end of `sluice_vllm`'s socket: sends limits, keeps step reports."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.peers.variants import Launch
from sluice_core.port import EngineLimits
from sluice_core.wire import Ready, StepReport, encode_frame, from_engine_decoder, split_frames

ROOT = Path(__file__).parents[2]


def steered(stock: Launch, path: Path) -> Launch:
    """A vLLM server with `sluice_vllm.Scheduler`, whose gate listens at `path`."""
    environ = {**dict(stock.environ), **inner_environ(path)}
    arguments = (*stock.arguments, "--scheduler-cls", "sluice_vllm.Scheduler")
    return replace(stock, arguments=arguments, environ=tuple(sorted(environ.items())))


def inner_environ(path: Path) -> dict[str, str]:
    """With it vLLM finds `sluice_vllm`, and that the gate at `path`."""
    packages = os.pathsep.join(str(ROOT / folder) for folder in ("gate", "core"))
    return {"PYTHONPATH": packages, "SLUICE_GATE_SOCKET": str(path)}


class Gate:
    """Listens at `path` for one engine at a time. `limits` go to each that comes, and when set."""

    def __init__(self, path: Path, limits: EngineLimits) -> None:
        self.path = path
        self.ready: Ready | None = None
        self.reports: list[StepReport] = []
        self._limits = limits
        self._engine: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def configure(self, limits: EngineLimits) -> None:
        """Send new limits; the engine reads them before its next step."""
        self._limits = limits
        if self._engine is not None:
            self._engine.sendall(encode_frame(limits))

    def until(self, holds: Callable[[], bool], limit_s: float = 30.0) -> None:
        """Return once it holds. Raises TimeoutError."""
        end_s = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {limit_s} s")
            time.sleep(0.01)

    def close(self) -> None:
        """Hang up."""
        self._listener.close()
        if self._engine is not None:
            self._engine.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self._engine, _ = self._listener.accept()
                self._engine.sendall(encode_frame(self._limits))
                self._read(self._engine)

    def _read(self, engine: socket.socket) -> None:
        received = bytearray()
        while part := engine.recv(1 << 16):
            received += part
            for body in split_frames(received):
                message = from_engine_decoder.decode(body)
                if isinstance(message, StepReport):
                    self.reports.append(message)
                elif isinstance(message, Ready):
                    self.ready = message
