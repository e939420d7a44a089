"""A real engine process over a real socket pair, and what it says."""

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from sluice_core.wire import (
    FromEngine,
    StepReport,
    ToEngine,
    encode_frame,
    from_engine_decoder,
    split_frames,
)
from sluice_worker.base.config import EngineConfig

M = TypeVar("M")
DEADLINE_S = 60.0


class EngineUnderTest:
    """The API process's end of the wire, written plainly."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._socket = sock
        self._buffer = bytearray()
        self._pending: list[FromEngine] = []

    def send(self, message: ToEngine) -> None:
        self._socket.sendall(encode_frame(message))

    def send_raw(self, body: bytes) -> None:
        self._socket.sendall(struct.pack("<I", len(body)) + body)

    def receive(self) -> FromEngine:
        """The next message; ConnectionError at the end, TimeoutError after the deadline."""
        while not self._pending:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the engine closed its end")
            self._buffer += data
            self._pending += [from_engine_decoder.decode(b) for b in split_frames(self._buffer)]
        return self._pending.pop(0)

    def wait_for(self, kind: type[M], where: Callable[[M], bool] = lambda _: True) -> M:
        """The next message of `kind` for which `where` holds; others are passed over."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            message = self.receive()
            if isinstance(message, kind) and where(message):
                return message
        raise TimeoutError(f"no {kind.__name__} came")

    def outputs(self, request_ids: set[str]) -> tuple[dict[str, list[int]], list[StepReport]]:
        """Tokens of the requests until each has ended, and the reports that brought them."""
        tokens: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        reports, open_ids = [], set(request_ids)
        while open_ids:
            report = self.wait_for(StepReport)
            reports.append(report)
            for token in report.tokens:
                tokens[token.request_id].append(token.token_id)
                if token.finish_reason is not None:
                    open_ids.discard(token.request_id)
        return tokens, reports

    def hang_up(self) -> None:
        self._socket.close()

    def exit_status(self) -> int:
        return self.process.wait(DEADLINE_S)


@contextmanager
def engine_process(config: EngineConfig) -> Iterator[EngineUnderTest]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(DEADLINE_S)
    command = [sys.executable, "-m", "sluice_worker.engine.process", "--fd", str(theirs.fileno())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
    theirs.close()
    body = msgspec.msgpack.encode(config)
    ours.sendall(struct.pack("<I", len(body)) + body)
    try:
        yield EngineUnderTest(ours, process)
    finally:
        ours.close()
        process.kill()
        process.wait()
