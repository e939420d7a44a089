"""What batching is for: one pass over the weights serves all sequences of a step."""

import time
from pathlib import Path

import torch
from sluice_worker.engine.loop import Engine
from unit.worker.engine.factories import create_engine, create_request, create_scheduler, save_llama


def decoding(checkpoint: Path, cap: int) -> Engine:
    """An engine that decodes a full batch."""
    engine = create_engine(checkpoint, create_scheduler(cap=cap, budget=512, num_blocks=128))
    for i in range(cap):
        engine.submit(create_request(f"r{i}", 40, max_tokens=100, ignore_eos=True), 0.0)
    for _ in range(8):
        engine.step()
    return engine


def step_s(engine: Engine) -> float:
    """CPU time of one step, which other load cannot stretch as it does wall time."""
    started = time.thread_time()
    engine.step()
    return time.thread_time() - started


def tokens_per_cpu_second(checkpoint: Path, caps: tuple[int, ...]) -> list[float]:
    """The best of 60 decode steps at each cap, in turns: a processor that slows down does so for
    all of them."""
    engines = [decoding(checkpoint, cap) for cap in caps]
    rounds = [[step_s(engine) for engine in engines] for _ in range(60)]
    return [cap / min(spent) for cap, spent in zip(caps, zip(*rounds, strict=True), strict=True)]


def test_cap_8_gives_at_least_2_5_times_the_tokens_of_cap_1(tmp_path: Path) -> None:
    model = save_llama(
        tmp_path,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        tie_word_embeddings=True,
    )
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 6e6
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone, together = tokens_per_cpu_second(tmp_path, (1, 8))
    finally:
        torch.set_num_threads(threads)
    assert together >= 2.5 * alone, f"cap 1: {alone:.0f}, cap 8: {together:.0f} tokens/CPU-s"
