"""What batching is for: one pass over the weights serves all sequences of a step."""

import time
from pathlib import Path

import torch

from .factories import create_engine, create_request, create_scheduler, save_llama


def tokens_per_cpu_second(checkpoint: Path, cap: int) -> float:
    """Median over 60 decode steps at a full batch, in CPU time, which other load cannot stretch."""
    engine = create_engine(checkpoint, create_scheduler(cap=cap, budget=512, num_blocks=128))
    for i in range(cap):
        engine.submit(create_request(f"r{i}", 40, max_tokens=100, ignore_eos=True), 0.0)
    for _ in range(8):
        engine.step()
    spent = []
    for _ in range(60):
        started = time.thread_time()
        engine.step()
        spent.append(time.thread_time() - started)
    return cap / sorted(spent)[len(spent) // 2]


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
        alone, together = (tokens_per_cpu_second(tmp_path, cap) for cap in (1, 8))
    finally:
        torch.set_num_threads(threads)
    assert together >= 2.5 * alone, f"cap 1: {alone:.0f}, cap 8: {together:.0f} tokens/CPU-s"
