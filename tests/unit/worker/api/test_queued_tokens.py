"""Requests that `--max-num-queued-tokens` refuses are booked to what those before them are at."""

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from sluice_core.contract import TICK_SECONDS, Causes
from sluice_core.errors import Draining, QueueFull, RequestError, TooManyOpen
from sluice_core.port import EngineLoad, FirstParts
from sluice_core.wire import TokenOut
from sluice_core.work import BACKGROUND, CLASS_HEADER
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.config import ServerConfig
from sluice_worker.api.generation import Arrived
from sluice_worker.base.resources import Resources
from unit.worker.api.test_waiting_memory import create_service

BODY = b'{"prompt": [1, 2, 3], "max_tokens": 1}'


@pytest.mark.parametrize(("waiting_kv", "expected"), [(0, Causes(prefill=1)), (1, Causes(kv=1))])
def test_the_bound_of_queued_tokens_is_prefill_unless_somebody_waits(
    tmp_path: Path, waiting_kv: int, expected: Causes
) -> None:
    service = create_service(tmp_path, ServerConfig(max_num_queued_tokens=3))
    recorder = service.runtime.recorder
    asyncio.run(service.open(parse_completion(BODY), 0.0))
    recorder.engine.load = EngineLoad(running=1, waiting_kv=waiting_kv)
    with pytest.raises(QueueFull, match="max_num_queued_tokens is 3"):
        asyncio.run(service.open(parse_completion(BODY), 0.0))
    recorder.advance(recorder.ticks.start_s + TICK_SECONDS, 0.0, 0.0)
    (tick,) = recorder.evidence(0).ticks
    assert (tick.refused, tick.ttft.by) == (1, expected)


def test_prompts_that_wait_are_bounded_by_the_memory_too(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig())
    assert service.admission.max_queued_tokens == Resources().memory_bytes() // 32 // 8
    service.admission.max_queued_tokens = 8
    for _ in range(2):
        asyncio.run(service.open(parse_completion(BODY), 0.0))
    with pytest.raises(QueueFull, match="6 prompt tokens wait .* is for 8, these 3 included"):
        asyncio.run(service.open(parse_completion(BODY), 0.0))
    assert service.runtime.stats.rejected == {"max_num_queued_tokens": 1}
    many = parse_completion(b'{"prompt": [[1, 2, 3], [4]], "max_tokens": 1, "n": 3}')
    with pytest.raises(RequestError, match="12 prompt tokens, all choices together") as refused:
        asyncio.run(service.open(many, 0.0))
    assert refused.value.param == "n"


def test_a_request_whose_body_finds_no_room_is_booked_as_an_arrival(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig())
    refused = service.admission.refusal_of({})("too much is being read already")
    assert isinstance(refused, TooManyOpen)
    assert refused.retry_after_s == 1
    recorder = service.runtime.recorder
    recorder.advance(recorder.ticks.start_s + TICK_SECONDS, 0.0, 0.0)
    (tick,) = recorder.evidence(0).ticks
    assert (tick.arrivals, tick.refused, tick.ttft.by) == (1, 1, Causes(outside=1))
    assert service.runtime.stats.rejected == {"large_bodies": 1}
    service.admission.refusal_of({CLASS_HEADER: BACKGROUND})("too much is being read already")
    assert recorder.ticks.open.arrivals == 0


def test_who_comes_alone_is_let_in_where_the_ceiling_has_room_for_all_of_it(
    tmp_path: Path,
) -> None:
    """Else it would be told to come again for ever, while the tuner keeps the cap low."""
    service = create_service(tmp_path, ServerConfig(max_num_queued_reqs=2))
    service.runtime.live = msgspec.structs.replace(service.runtime.live, cap=1)
    many = parse_completion(b'{"prompt": [1, 2, 3], "max_tokens": 1, "n": 6}')
    assert len(asyncio.run(service.open(many, 0.0)).choices) == 6
    with pytest.raises(QueueFull, match="max_num_queued_reqs is 2"):
        asyncio.run(service.open(parse_completion(BODY), 0.0))


def test_a_worker_that_drains_takes_requests_until_its_time_is_up(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig())
    service.runtime.drain()
    assert (service.runtime.readiness().ok, service.runtime.lifetime()) == (False, 0.0)
    asyncio.run(service.open(parse_completion(BODY), 0.0))
    service.runtime.close()
    assert service.client.num_open == 0, "it was told so"
    with pytest.raises(Draining):
        asyncio.run(service.open(parse_completion(BODY), 0.0))


def test_a_worker_that_leaves_says_so_also_once_its_engine_is_gone(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig())
    service.runtime.close()
    service.client.closed.set()
    with pytest.raises(Draining):
        asyncio.run(service.open(parse_completion(BODY), 0.0))


def test_lengths_are_booked_for_each_prompt(tmp_path: Path) -> None:
    service = create_service(tmp_path, ServerConfig())
    body = b'{"prompt": [[1, 2], [1, 3], [1, 4]], "max_tokens": 1, "n": 2}'
    generation = asyncio.run(service.open(parse_completion(body), 0.0))
    for choice in generation.choices:
        token = TokenOut("0", 2, first=FirstParts(0.0, 0.0, 0.0, 0), finish_reason="length")
        choice.feed(token)
        generation.handed_over(
            Arrived(choice, token, at_cap=False, is_long=False, at_s=1.0), "length", 1.0
        )
    booked = service.runtime.stats.histograms["request_max_num_generation_tokens"]
    assert (sum(booked.counts), booked.total) == (3, 3.0)


@pytest.mark.parametrize(
    "bound",
    [ServerConfig(max_num_queued_reqs=4), ServerConfig(max_num_queued_tokens=12)],
    ids=["sequences", "tokens"],
)
def test_a_full_queue_takes_a_client_with_less_than_its_part_for_the_newest_of_another(
    tmp_path: Path, bound: ServerConfig
) -> None:
    service = create_service(tmp_path, bound)
    service.runtime.live = msgspec.structs.replace(service.runtime.live, cap=1)
    asked = parse_completion(BODY)

    def fill(client: str) -> int:
        """How many of it are taken."""
        for number in range(20):
            try:
                asyncio.run(service.open(replace(asked, client=client), 0.0))
            except QueueFull:
                return number
        return 20

    first = fill("a")
    assert first == (5 if bound.max_num_queued_reqs == 4 else 4)
    second = fill("b")
    assert second == 2, "a half of what may wait"
    assert len(service.client._dropped) >= 2
    dropped = [service.client._sinks[name] for name in service.client._dropped]
    assert {sink.choice.timer.client for sink in dropped} == {"a"}  # type: ignore[union-attr]
    assert fill("a") == 0
    assert fill("c") == 1
