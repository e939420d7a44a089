"""Requests that `--max-num-queued-tokens` refuses are booked to what those before them are at."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from sluice_worker.config import ServerConfig
from sluice_worker.contract import TICK_SECONDS, Causes
from sluice_worker.errors import QueueFull
from sluice_worker.evidence import NOTHING
from sluice_worker.protocol import parse_completion

from .test_waiting_memory import create_service

BODY = b'{"prompt": [1, 2, 3], "max_tokens": 1}'


@pytest.mark.parametrize(("waiting_kv", "expected"), [(0, Causes(prefill=1)), (1, Causes(kv=1))])
def test_the_bound_of_queued_tokens_is_prefill_unless_somebody_waits(
    tmp_path: Path, waiting_kv: int, expected: Causes
) -> None:
    service = create_service(tmp_path, ServerConfig(max_num_queued_tokens=3))
    recorder = service.recorder
    asyncio.run(service.open(parse_completion(BODY), 0.0))
    recorder.snapshot = msgspec.structs.replace(NOTHING, running=1, waiting_kv=waiting_kv)
    with pytest.raises(QueueFull, match="max_num_queued_tokens is 3"):
        asyncio.run(service.open(parse_completion(BODY), 0.0))
    recorder.advance(recorder._tick_start_s + TICK_SECONDS, 0.0, 0.0)
    (tick,) = recorder.evidence(0).ticks
    assert (tick.refused, tick.ttft.by) == (1, expected)
