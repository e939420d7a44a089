"""The API process's side of the engine: its process, its socket, and the sinks of its tokens."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec
from sluice_core.errors import (
    EngineDied,
    NotReady,
    RequestFailed,
    SluiceError,
    StartupError,
    signal_name,
    timestamp,
    told,
)
from sluice_core.port import EngineFacts, EngineLimits, Manner, Scores
from sluice_core.wire import (
    Abort,
    CheckIntegrity,
    Encode,
    EncodeReport,
    Failed,
    Finished,
    FromEngine,
    Heartbeat,
    Integrity,
    Ready,
    Shutdown,
    Starting,
    StepReport,
    Submit,
    ToEngine,
    TokenOut,
    encode_frame,
    from_engine_decoder,
    split_frames,
)
from sluice_core.words import clean
from sluice_frontend.evidence.health import Liveness
from sluice_frontend.serving.backend import Listener

from ..base.config import EngineConfig
from ..base.resources import Resources, engine_environment

log = logging.getLogger(__name__)
INTEGRITY_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 5.0


class VectorSink(Protocol):
    """Takes one text's vector."""

    def vector(self, values: bytes, now_s: float) -> None:
        """Take it, as packed float32; nothing follows."""

    def ended(self, error: SluiceError) -> None:
        """End the text without a vector; nothing follows."""


class Sink(Protocol):
    """Takes one sequence's tokens."""

    def token(self, token: TokenOut, *, at_cap: bool, is_long: bool, now_s: float) -> None:
        """Take a token; the last one has a finish reason, and nothing follows it. `at_cap`,
        `is_long`: of its step, as in `StepReport`."""

    def prompt(self, scores: Scores) -> None:
        """Log-probabilities of the prompt's next tokens; all come before the first token."""

    def ended(self, error: SluiceError) -> None:
        """End the sequence without a token; nothing follows."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """The engine's process, which has its config, and this side of its socket.

    `oom_kills`: those of the cgroup before it was started.
    """

    process: asyncio.subprocess.Process
    socket: socket.socket
    oom_kills: int = 0

    @property
    def was_killed_for_memory(self) -> bool:
        """True if SIGKILL ended it, as the kernel does out of memory, and its cgroup has counted
        such a kill since."""
        is_killed = self.process.returncode == -signal.SIGKILL
        return is_killed and Resources().oom_kills() > self.oom_kills

    async def has_ended(self, timeout_s: float) -> bool:
        """True if it has ended, or does so within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), timeout_s)
        return self.process.returncode is not None

    async def end(self) -> None:
        """End it at once; nothing is done if it has ended."""
        self.socket.close()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def spawn(config: EngineConfig) -> EngineProcess:
    """Start the engine process and send it `config`; returns before it is ready."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    oom_kills = Resources().oom_kills()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "sluice_worker.engine.process", "--fd", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            env=engine_environment(os.environ),
            start_new_session=True,  # a Ctrl-C is for the API process, which drains
        )
    with contextlib.suppress(ConnectionError):  # it has ended: whoever reads will see
        ours.sendall(encode_frame(config))
    ours.setblocking(False)
    return EngineProcess(process, ours, oom_kills)


def manner(returncode: int | None) -> str:
    """How a process ended, by the status that `subprocess` has for it."""
    if returncode is None or returncode >= 0:
        return f"with exit code {returncode}"
    return f"by {signal_name(-returncode)}"


class EngineClient:
    """One engine process: a `Backend` of the frontend, which is attached, and stopped."""

    manner = Manner()

    def __init__(self, engine_liveness: Liveness) -> None:
        self.engine_liveness = engine_liveness
        self.facts: EngineFacts | None = None
        self.failure: Failed | None = None
        self.closed = asyncio.Event()
        self._listener: Listener | None = None
        self._sinks: dict[str, Sink | VectorSink] = {}
        self._dropped: dict[str, SluiceError] = {}  # why, if they have not begun
        self._transport: asyncio.WriteTransport | None = None
        self._engine: EngineProcess | None = None
        self._ending: asyncio.Task[None] | None = None
        self._integrity: list[asyncio.Future[str | None]] = []
        self._is_leaving = False

    @property
    def num_open(self) -> int:
        """Sequences that were submitted and have not ended."""
        return len(self._sinks)

    async def attach(self, engine: EngineProcess, listener: Listener) -> None:
        """Speak with `engine` from now on, and tell `listener` what it says and has said."""
        self._engine, self._listener = engine, listener
        loop = asyncio.get_running_loop()
        connected = loop.create_unix_connection(lambda: _Wire(self), sock=engine.socket)
        self._transport, _ = await connected

    def submit(self, request: Submit | Encode, sink: Sink | VectorSink) -> None:
        """Send a request; its tokens, or its vector, go to `sink`. Raises EngineDied if the engine
        is gone."""
        self._send(request)
        self._sinks[request.request_id] = sink
        self.engine_liveness.work_arrived(time.monotonic())

    def abort(self, request_id: str) -> None:
        """Abort as its client left: the sink gets nothing more. Unknown ids are ignored."""
        if self._forget(request_id) is not None and not self.closed.is_set():
            self._send(Abort(request_id))

    def fail(self, request_id: str, error: SluiceError) -> None:
        """End a sequence from this side (shed, or the worker is leaving); its sink is told."""
        sink = self._forget(request_id)
        if sink is not None:
            self._send(Abort(request_id))
            sink.ended(error)

    def drop(self, request_id: str, error: SluiceError) -> None:
        """End a sequence that has not begun; one that has goes on. The engine knows which it is."""
        if request_id in self._sinks and request_id not in self._dropped:
            self._dropped[request_id] = error
            self._send(Abort(request_id, if_waiting=True))

    def fail_all(self, error: SluiceError) -> None:
        """End every open sequence."""
        for request_id in list(self._sinks):
            self.fail(request_id, error)

    def _forget(self, request_id: str) -> Sink | VectorSink | None:
        self._dropped.pop(request_id, None)
        return self._sinks.pop(request_id, None)

    def configure(self, limits: EngineLimits) -> None:
        """Change the live limits from the next step on."""
        self._send(limits)

    async def check_integrity(self) -> str | None:
        """None, or the sentence that says which invariant of the block pool fails.

        Raises Unavailable if the engine is gone, or too busy to answer in time.
        """
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._send(CheckIntegrity())
        self._integrity.append(answer)
        try:
            return await asyncio.wait_for(answer, INTEGRITY_TIMEOUT_S)
        except TimeoutError as error:
            sentence = f"the engine did not answer within {INTEGRITY_TIMEOUT_S:g} s"
            raise NotReady(sentence, retry_after_s=1) from error

    def raise_if_never_served(self) -> None:
        """If the engine ended before it was ready: StartupError with its own sentence."""
        if self.engine_liveness.is_serving:
            return
        assert self._engine is not None  # it has ended
        assert self.engine_liveness.death is not None
        is_refusal = self._engine.process.returncode == StartupError.exit_status
        said = self.failure.message if self.failure and is_refusal else self.engine_liveness.death
        raise StartupError(said)

    async def stop(self) -> None:
        """Ask the engine to leave, wait a little, and end it if it does not."""
        self._is_leaving = True
        if self._engine is None:
            return
        if not self.closed.is_set():
            self._send(Shutdown())
        if not await self._engine.has_ended(EXIT_TIMEOUT_S):
            self._engine.process.kill()
            await self._engine.process.wait()
        if self._transport is not None:
            self._transport.close()
            await self.closed.wait()

    def _send(self, message: ToEngine) -> None:
        if self._transport is None or self.closed.is_set():
            reason = self.engine_liveness.death or "the engine process is not running"
            raise EngineDied(reason, retry_after_s=1)
        if self._ending is None:  # else everybody is told as soon as it is known how
            self._transport.write(encode_frame(message))

    # -- called by the socket

    def receive(self, body: bytes) -> None:
        """Read one frame of the engine. A malformed one raises, and the connection is lost."""
        message: FromEngine = from_engine_decoder.decode(body)
        now_s, listener = time.monotonic(), self._listener
        assert listener is not None  # there is a socket
        match message:
            case StepReport() | EncodeReport():
                self._step(message, listener, now_s)
            case Heartbeat():
                self.engine_liveness.beat(message.steps, message.busy or self.num_open > 0, now_s)
                listener.state(message.snapshot)
            case Finished():
                listener.state(message.snapshot)
                self._finished(message)
            case Starting():
                self.engine_liveness.starting(message.phase, message.percent, now_s)
            case Ready():
                self.engine_liveness.serving(now_s)
                self.facts = message
                listener.serves(message)
            case Integrity():
                answer = self._integrity.pop(0)
                if not answer.done():  # whoever asked may have given up
                    answer.set_result(message.problem)
            case Failed():
                self.failure = message

    def _step(self, report: StepReport | EncodeReport, listener: Listener, now_s: float) -> None:
        """Count the step, and hand its results over. A request that was aborted while its step ran
        has no sink any more."""
        self.engine_liveness.stepped(now_s)
        listener.step(report.as_step(), report.snapshot, now_s)
        if isinstance(report, EncodeReport):
            for found in report.vectors:
                if (taker := self._forget(found.request_id)) is not None:
                    cast(VectorSink, taker).vector(found.values, now_s)
            return
        sinks = cast(dict[str, Sink], self._sinks)
        for part in report.prompts:
            if (scored := sinks.get(part.request_id)) is not None:
                scored.prompt(part.scores)
        for token in report.tokens:
            sink = sinks.get(token.request_id)
            if sink is None:
                continue
            if token.finish_reason is not None:
                self._forget(token.request_id)
            sink.token(token, at_cap=report.at_cap, is_long=report.is_long, now_s=now_s)

    def _finished(self, message: Finished) -> None:
        dropped = self._dropped.get(message.request_id)
        sink = self._forget(message.request_id)
        error = dropped if message.error is None else RequestFailed(message.error)
        if sink is not None and error is not None:
            sink.ended(error)

    def lost(self, error: Exception | None) -> None:
        """Fail all: the socket closed, or its data was no message (`error`). The engine is gone."""
        if self._ending is None:
            if not self._is_leaving:
                self.engine_liveness.died("the engine process is ending")  # until it is known how
            self._ending = asyncio.create_task(self._end(error, time.time()))

    async def _end(self, error: Exception | None, now_s: float) -> None:
        """Tell all sinks how the engine ended."""
        reason = await self._reason(error, timestamp(now_s))
        self.closed.set()
        died = EngineDied(reason, retry_after_s=1)
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.ended(died)
        for answer in self._integrity:
            if not answer.done():
                answer.set_exception(died)
        if not self._is_leaving:
            self.engine_liveness.died(reason)
            log.error("engine died", extra={"reason": reason, "open_requests": len(sinks)})

    async def _reason(self, error: Exception | None, moment: str) -> str:
        if error is not None:
            return f"what the engine process sent at {moment} cannot be handled: {told(error)}"
        if self._engine is None or not await self._engine.has_ended(EXIT_TIMEOUT_S):
            return f"the engine process closed its connection at {moment}, and has not ended"
        how = f"the engine process ended at {moment} {manner(self._engine.process.returncode)}"
        if not self.engine_liveness.is_serving:
            how += " before it could serve"
        cause = clean(self.failure.message) if self.failure else None
        if self._engine.was_killed_for_memory:
            cause = "killed for memory"
        return f"{how}: {cause}" if cause else how


class _Wire(asyncio.Protocol):
    """Cuts the stream into frames."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._buffer = bytearray()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            for body in split_frames(self._buffer):
                self._client.receive(body)
        except (ValueError, msgspec.MsgspecError) as error:
            if self._transport is not None:
                self._transport.close()
            self._client.lost(error)

    def connection_lost(self, exc: Exception | None) -> None:
        # A reset says only that the process is gone; its exit status says more.
        self._client.lost(None if isinstance(exc, OSError) else exc)
