"""Claims on a model that is on its way when the worker is told to leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from sluice_worker.api.arrival import Arrival
from sluice_worker.base.config import parse


async def test_a_worker_that_was_told_to_leave_does_not_start_with_what_was_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(["--model", "acme/tiny"], {"HF_HUB_CACHE": str(tmp_path)})
    assert config.hub is not None
    arrival = Arrival(config, config.hub)
    monkeypatch.setattr(arrival, "_download", lambda: tmp_path)
    assert await arrival.fetch() == tmp_path
    arrival.stop()
    assert await arrival.fetch() is None
