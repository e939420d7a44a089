"""Who can no longer be in time is dropped by the engine, or without it where it hangs."""

import asyncio
import time
from pathlib import Path

from msgspec import structs
from sluice_core.contract import Slo
from sluice_core.errors import Shed
from sluice_core.wire import Abort, ToEngine
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.config import ServerConfig
from sluice_worker.api.generation import Generation
from unit.worker.api.test_waiting_memory import create_service

HOUR_S = 3600.0
TIMEOUT_S = 30.0


def shed(directory: Path, stalled_s: float) -> tuple[Generation, list[ToEngine]]:
    """A request that waits an hour too long while the engine makes no step for so long, and what
    the engine was told behind it."""
    service = create_service(directory, ServerConfig(liveness_timeout=TIMEOUT_S))
    service.runtime.live = structs.replace(
        service.runtime.live, slo=Slo(ttft_ms=1e3 * HOUR_S), overload="Shed"
    )
    now_s = time.monotonic()
    service.runtime.engine_liveness.serving(now_s)
    asked = parse_completion(b'{"prompt": [1, 2, 3], "max_tokens": 1}')
    generation = asyncio.run(service.open(asked, now_s))
    told: list[ToEngine] = []
    service.client._send = lambda message: told.append(message)  # type: ignore[method-assign]
    service.runtime.shed(now_s)
    assert told == []
    later_s = now_s + 2 * HOUR_S
    service.runtime.engine_liveness.stepped(later_s - stalled_s)
    service.runtime.shed(later_s)
    return generation, told


def test_an_engine_that_makes_steps_says_itself_whether_the_request_has_begun(
    tmp_path: Path,
) -> None:
    generation, told = shed(tmp_path, stalled_s=TIMEOUT_S / 2 - 1)
    assert told == [Abort("1", if_waiting=True)]
    assert (generation.error, generation.num_open) == (None, 1)


def test_an_engine_that_hangs_keeps_nobody_from_the_answer(tmp_path: Path) -> None:
    generation, told = shed(tmp_path, stalled_s=TIMEOUT_S / 2 + 1)
    assert told[:1] == [Abort("1")]
    assert isinstance(generation.error, Shed)
    assert generation.num_open == 0
