"""What a prompt takes while it waits: little more than its token ids packed, in both processes."""

import asyncio
import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from sluice_core.contract import MemoryReport
from sluice_core.port import EngineLimits
from sluice_core.wire import Ready, Submit, encode_frame, packed, split_frames, to_engine_decoder
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.config import ServerConfig
from sluice_worker.api.generation import Generation
from sluice_worker.api.service import Service
from sluice_worker.base.config import EngineConfig, WorkerConfig
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from unit.worker.api.tiny import VOCAB_SIZE, write_checkpoint

NUM_REQUESTS, NUM_TOKENS = 20, 2048
MOST_BYTES = 8
"""For each token: its four, and its share of all else that a request takes."""
READY = Ready(
    ceiling=4,
    predicted_cap=4,
    cap=4,
    max_model_len=4096,
    block_size=16,
    num_blocks=256,
    kv_tokens=4096,
    memory=MemoryReport({}, {}, 4096),
    step_model=None,
    kernels="",
)


def serves(service: Service) -> None:
    """Let its engine be ready."""
    service.client.facts = READY
    service.runtime.serves(READY)


def create_service(directory: Path, server: ServerConfig) -> Service:
    """One that is ready, and whose engine never answers."""
    engine = EngineConfig(model=str(write_checkpoint(directory, max_position=4096)))
    service = Service(WorkerConfig(engine, server))
    serves(service)
    service.client._send = lambda message: None  # type: ignore[method-assign]
    return service


def prompts() -> list[list[int]]:
    """Ids that the interpreter keeps no objects of, as most of a real vocabulary are."""
    chance = random.Random(1)
    return [
        [chance.randrange(257, VOCAB_SIZE) for _ in range(NUM_TOKENS)] for _ in range(NUM_REQUESTS)
    ]


def bytes_per_token(take_in: Callable[[], object]) -> float:
    """What is kept of the prompts, for each of their tokens."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    kept = take_in()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept
    return (after - before) / (NUM_REQUESTS * NUM_TOKENS)


def test_a_prompt_that_waits_for_the_engine_is_kept_packed_in_the_api_process(
    tmp_path: Path,
) -> None:
    service = create_service(tmp_path, ServerConfig())
    bodies = [json.dumps({"prompt": ids, "max_tokens": 1}).encode() for ids in prompts()]

    async def ask(body: bytes) -> Generation:
        return await service.open(parse_completion(body), 0.0)

    asyncio.run(ask(bodies[0]))  # what is made once is no request's
    assert bytes_per_token(lambda: [asyncio.run(ask(body)) for body in bodies]) < MOST_BYTES


def test_a_prompt_that_waits_in_the_engine_is_kept_packed() -> None:
    scheduler = Scheduler(
        BlockPool(1024, 16), EngineLimits(0, 4, 512), max_model_len=4096, vocab_size=VOCAB_SIZE
    )
    frames = bytearray()
    for i, ids in enumerate(prompts()):
        frames += encode_frame(Submit(str(i), packed(ids), 8, 0.0, 0, True, [], 0, 0.0))

    def queue() -> int:
        for body in split_frames(frames):
            request = to_engine_decoder.decode(body)
            assert isinstance(request, Submit)
            assert scheduler.can_admit(request) is None
            scheduler.add(Sequence(request, seed=0), 0.0)
        return len(scheduler.waiting)

    assert bytes_per_token(queue) < MOST_BYTES
