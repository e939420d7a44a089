"""*Rim*: the Unix socket to the gate. Nothing here waits: a step costs two system calls.

The gate listens, so that several engines of one server find it. The frames are those of
`sluice_core.wire`: the engine sends `Ready` and `StepReport`s, the gate sends
`EngineLimits`. A gate that is away is tried once a second; meanwhile the last limits hold.
"""

import logging
import socket
from collections.abc import Callable

import msgspec
from sluice_core.port import EngineLimits
from sluice_core.wire import FromEngine, Ready, encode_frame, split_frames, to_engine_decoder

log = logging.getLogger("vllm.sluice")  # below vLLM's logger, whose handlers print it

RETRY_S = 1.0
READ_BYTES = 1 << 16
MAX_BACKLOG_BYTES = 1 << 20
"""Most bytes that wait for a gate that does not read; it misses the reports beyond."""


class GateLink:
    """The connection to the gate at `path`, remade when it breaks. `ready`: its first message."""

    def __init__(self, path: str, ready: Callable[[], Ready]) -> None:
        self._path, self._ready = path, ready
        self._socket: socket.socket | None = None
        self._tried_s = -RETRY_S
        self._received, self._backlog = bytearray(), bytearray()

    def receive(self, now_s: float) -> list[EngineLimits]:
        """The limits that have come, oldest first."""
        if self._socket is None and now_s - self._tried_s >= RETRY_S:
            self._tried_s = now_s
            self._connect()
        try:
            while self._socket is not None:
                part = self._socket.recv(READ_BYTES)
                if not part:
                    self.close()
                self._received += part
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        return self._messages()

    def send(self, message: FromEngine) -> None:
        """Send it as soon as the gate reads; drop it if that takes too long."""
        if self._socket is None:
            return
        if len(self._backlog) < MAX_BACKLOG_BYTES:
            self._backlog += encode_frame(message)
        try:
            del self._backlog[: self._socket.send(self._backlog)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def close(self) -> None:
        """Hang up; what was not sent is lost."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._received.clear()
        self._backlog.clear()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        try:
            self._socket.connect(self._path)
        except OSError:
            self.close()
        self.send(self._ready())

    def _messages(self) -> list[EngineLimits]:
        try:
            bodies = split_frames(self._received)
            messages = [to_engine_decoder.decode(body) for body in bodies]
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("Sluice's gate sent what is no message: %s", error)
            self.close()
            return []
        return [message for message in messages if isinstance(message, EngineLimits)]
