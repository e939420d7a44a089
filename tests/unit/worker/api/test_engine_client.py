"""The API process's side of the socket: an answer that comes too late harms nobody."""

from typing import Any

import msgspec
import pytest
from sluice_worker import client as module
from sluice_worker.client import EngineClient
from sluice_worker.errors import Unavailable
from sluice_worker.health import Pulse
from sluice_worker.wire import Integrity


class Silence:
    """Takes all that is written or told, and says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


async def test_an_integrity_answer_after_its_deadline_does_not_break_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "INTEGRITY_TIMEOUT_S", 0.01)
    client = EngineClient(Pulse(0.0), Silence())
    client._transport = Silence()  # type: ignore[assignment]
    with pytest.raises(Unavailable, match="did not answer within"):
        await client.check_integrity()
    client.receive(msgspec.msgpack.encode(Integrity(None)))
    assert not client.closed.is_set()
