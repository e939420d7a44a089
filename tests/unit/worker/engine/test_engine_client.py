"""The API process's side of the socket: an answer that comes too late harms nobody."""

import asyncio
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sluice_core.errors import EngineDied, SluiceError, StartupError, Unavailable
from sluice_core.port import EngineLoad
from sluice_core.wire import (
    Failed,
    Finished,
    Frame,
    Integrity,
    StepReport,
    Submit,
    TokenOut,
    packed,
)
from sluice_frontend.evidence.health import Liveness
from sluice_worker.base.resources import Resources
from sluice_worker.engine import client as module
from sluice_worker.engine.client import EngineClient, EngineProcess, _Wire


class Silence:
    """Takes all that is written or told, and says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


def client_of(engine_liveness: Liveness) -> EngineClient:
    """A client whose news nobody needs."""
    client = EngineClient(engine_liveness)
    client._listener = Silence()
    return client


MOMENT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
ENDED = f"the engine process ended at {MOMENT}"


async def ended_by(*command: str) -> EngineProcess:
    """A process in the engine's place, which ends by itself."""
    with socket.socket() as unused:
        return EngineProcess(await asyncio.create_subprocess_exec(*command), unused)


def _step(*tokens: TokenOut) -> Frame:
    """A step that gave `tokens`."""
    return StepReport(list(tokens), 1, 0.0, 0.01, 1, 1, 0, 1, at_cap=False, snapshot=EngineLoad())


class Sink(Silence):
    """Keeps what it was told last."""

    error: SluiceError | None = None

    def ended(self, error: SluiceError) -> None:
        self.error = error


async def test_a_panic_is_told_to_everybody_with_its_reason_and_ends_readiness_at_once() -> None:
    engine_liveness = Liveness(0.0)
    client = client_of(engine_liveness)
    client._transport = Silence()  # type: ignore[assignment]
    engine_liveness.serving(0.0)
    sinks = [Sink(), Sink()]
    for i, sink in enumerate(sinks):
        client.submit(Submit(str(i), packed([1]), 1, 0.0, 0, False, [], 0, 0.0), sink)
    assert engine_liveness.readiness(time.monotonic(), 1e9).ok
    client.receive(msgspec.msgpack.encode(Failed("IndexError: oops")))
    client._engine = await ended_by(sys.executable, "-c", "raise SystemExit(1)")
    client.lost(None)
    assert not engine_liveness.readiness(time.monotonic(), 1e9).ok
    await client.closed.wait()
    for sink in sinks:
        assert re.fullmatch(f"{ENDED} with exit code 1: IndexError: oops", str(sink.error))
    assert [sink.error.retry_after_s for sink in sinks if sink.error] == [1, 1]
    verdict = engine_liveness.readiness(time.monotonic(), 1e9)
    assert (verdict.ok, verdict.reason) == (False, str(sinks[0].error))
    with pytest.raises(EngineDied) as refused:
        client.submit(Submit("2", packed([1]), 1, 0.0, 0, False, [], 0, 0.0), Sink())
    assert refused.value.retry_after_s == 1


@pytest.mark.parametrize(
    ("number", "name"), [(9, " (SIGKILL)"), (11, " (SIGSEGV)"), (signal.SIGRTMIN + 3, "")]
)
async def test_an_engine_ended_by_a_signal_is_told_with_signal_and_time(
    number: int, name: str
) -> None:
    engine_liveness = Liveness(0.0)
    engine_liveness.serving(0.0)
    client = client_of(engine_liveness)
    client._engine = await ended_by("sh", "-c", f"kill -{number} $$")
    client.lost(None)
    await client.closed.wait()
    assert re.fullmatch(f"{ENDED} by signal {number}{re.escape(name)}", engine_liveness.death or "")


async def test_an_engine_killed_for_memory_is_told_so_where_the_cgroup_counted_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_before, cause in ((2, ": killed for memory"), (3, "")):
        monkeypatch.setattr(Resources, "oom_kills", lambda self: 3)
        engine_liveness = Liveness(0.0)
        client = client_of(engine_liveness)
        engine = await ended_by("sh", "-c", "kill -9 $$")
        client._engine = replace(engine, oom_kills=num_before)
        client.lost(None)
        await client.closed.wait()
        told = rf"{ENDED} by signal 9 \(SIGKILL\) before it could serve{cause}"
        assert re.fullmatch(told, engine_liveness.death or "")
        with pytest.raises(StartupError, match=f"{cause}$"):
            client.raise_if_never_served()


async def test_what_breaks_in_handling_a_message_is_not_called_the_end_of_the_process() -> None:
    engine_liveness = Liveness(0.0)
    client = client_of(engine_liveness)
    _Wire(client).connection_lost(KeyError("slot"))
    await client.closed.wait()
    assert re.fullmatch(
        f"what the engine process sent at {MOMENT} cannot be handled: KeyError: 'slot'",
        engine_liveness.death or "",
    )


async def test_an_integrity_answer_after_its_deadline_does_not_break_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "INTEGRITY_TIMEOUT_S", 0.01)
    client = client_of(Liveness(0.0))
    client._transport = Silence()  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="did not answer within"):
        await client.check_integrity()
    client.receive(msgspec.msgpack.encode(Integrity(None)))
    assert not client.closed.is_set()


async def test_a_request_that_has_begun_outlives_being_dropped() -> None:
    client, sent, transport = client_of(Liveness(0.0)), list[bytes](), Silence()
    transport.__dict__["write"] = sent.append
    client._transport = transport  # type: ignore[assignment]
    waiting, begun = Sink(), Sink()
    for request_id, sink in (("waiting", waiting), ("begun", begun)):
        client.submit(Submit(request_id, packed([1]), 1, 0.0, 0, False, [], 0, 0.0), sink)
    for _ in range(3):  # every tenth of a second, until the engine has spoken
        client.drop("waiting", SluiceError("too late"))
        client.drop("begun", SluiceError("too late"))
    assert len(sent) == 4
    assert client.num_open == 2
    dropped = Finished("waiting", None, EngineLoad())
    for message in (dropped, _step(TokenOut("begun", 7, "length", None))):
        client.receive(msgspec.msgpack.encode(message))
    assert str(waiting.error) == "too late"
    assert begun.error is None
    assert client.num_open == 0


async def test_an_integrity_check_before_the_engine_is_there_leaves_nothing_behind() -> None:
    client = client_of(Liveness(0.0))
    with pytest.raises(EngineDied):
        await client.check_integrity()
    client._transport = Silence()  # type: ignore[assignment]
    asked = asyncio.create_task(client.check_integrity())
    await asyncio.sleep(0)
    client.receive(msgspec.msgpack.encode(Integrity("a block is lost")))
    assert await asked == "a block is lost"
