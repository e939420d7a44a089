"""*Rim*: the engine's own live cap: `sluice_vllm` inside vLLM, or SGLang's admin key.

`sluice_vllm` connects to a Unix socket here. It is told the limits, and sends a report each step.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
from sluice_core.bounded import Numbers
from sluice_core.errors import ConfigError
from sluice_core.port import EngineLimits, EngineStep
from sluice_core.wire import Ready, StepReport, encode_frame, from_engine_decoder, split_frames
from sluice_frontend.config import read_secrets

from .upstream import Upstream

log = logging.getLogger(__name__)
READ_BYTES = 1 << 16
MAX_FRAME_BYTES = 1 << 16
"""Most bytes of one message: a report without tokens has some 200."""
RETRY_S = 1.0


def bound(path: Path) -> socket.socket:
    """A Unix socket at `path`, which a gate before this one may have left behind. The engine may
    run as another user."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    path.chmod(0o666)
    return made


class VllmSocket:
    """The listening end. `on_change`: told how many engines are connected, and the most sequences
    that the newest runs; `on_step`: told each report. `numbers` counts the messages that are left
    out; a connection that brings something else than messages is closed."""

    def __init__(
        self,
        limits: Callable[[], EngineLimits],
        on_change: Callable[[int, int], None],
        on_step: Callable[[EngineStep, bool], None],
        numbers: Numbers,
    ) -> None:
        self._limits, self._on_change, self._on_step = limits, on_change, on_step
        self._numbers = numbers
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, path: Path) -> asyncio.Server:
        """Accept engines at `path`."""
        return await asyncio.start_unix_server(self._serve, sock=bound(path))

    def tell(self, limits: EngineLimits) -> None:
        """Send new limits; an engine reads them before its next step."""
        for writer in self._writers:
            writer.write(encode_frame(limits))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        writer.write(encode_frame(self._limits()))
        try:
            await self._read(reader)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            self._numbers.leave_out()
            log.warning("an engine sent what is no message", extra={"reason": str(error)})
        finally:
            self._writers.discard(writer)
            writer.close()
            self._on_change(len(self._writers), 0)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        received = bytearray()
        with suppress(ConnectionError):
            while part := await reader.read(READ_BYTES):
                received += part
                for body in split_frames(received, MAX_FRAME_BYTES):
                    self._take(body)

    def _take(self, body: bytes) -> None:
        """Take one message. One with an impossible number is left out; the next may be sound."""
        try:
            message = from_engine_decoder.decode(body)
        except msgspec.ValidationError:
            self._numbers.leave_out()
            return
        if isinstance(message, Ready):
            log.info("sluice_vllm connected", extra={"ceiling": message.ceiling})
            self._on_change(len(self._writers), message.ceiling)
        elif isinstance(message, StepReport):
            self._on_step(message.as_step(num_tokens=0), message.is_long)


class SglangKey:
    """SGLang's `pp_max_micro_batch_size`, which bounds admission there. One change at a time, the
    newest wins. `is_set`: True once it was accepted."""

    def __init__(self, upstream: Upstream, key_file: Path) -> None:
        self._upstream, self._key_file = upstream, key_file
        self._wanted: int | None = None
        self._news = asyncio.Event()
        self.is_set = False

    def tell(self, limits: EngineLimits) -> None:
        """Set the cap."""
        self._wanted = limits.cap
        self._news.set()

    async def run(self) -> None:
        """Set it at each change, and again each second while it is refused, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                self.is_set = await self._put()
            except (aiohttp.ClientError, TimeoutError, ConfigError) as error:
                self.is_set = False
                log.warning("SGLang's cap cannot be set", extra={"reason": str(error)})
            if not self.is_set:
                self._news.set()
                await asyncio.sleep(RETRY_S)

    async def _put(self) -> bool:
        body = {"server_args": {"pp_max_micro_batch_size": self._wanted}}
        headers = {"authorization": f"Bearer {read_secrets(self._key_file)[0]}"}
        url = self._upstream.url + "/set_internal_state"
        async with self._upstream.session.post(url, json=body, headers=headers) as reply:
            if reply.status != 200:
                log.warning("SGLang keeps its cap", extra={"status": reply.status})
            return reply.status == 200
