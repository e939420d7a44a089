"""How long the gaps of running requests are while prompts of the whole window prefill.

    PYTHONPATH=tests nice -n 19 .venv/bin/python -m bench.chunk_margin

The demo's model, started as a worker starts it (memory plan, profile), with readers that decode and
one longest prompt after another beside them. Gaps are those of the engine's steps: in wall time,
which the budget goes by and which has other load of the machine in it, and in CPU time beside it.
"""

import argparse
import time

import numpy as np
import torch
from bench.serving import MODEL
from sluice.machine import processor
from sluice_core.wire import Abort, Submit, packed
from sluice_worker.base.config import EngineConfig
from sluice_worker.engine.loop import Engine
from sluice_worker.engine.startup import start
from sluice_worker.scheduling.blocks import BlockPool

AIM = 1.2


def submit(engine: Engine, name: str, length: int, max_tokens: int) -> None:
    """A request of `length` tokens that no other shares."""
    first = sum(name.encode())
    prompt = [(first * 31 + 7 * i * i + i) % 2048 for i in range(length)]
    request = Submit(name, packed(prompt), max_tokens, 0.0, 0, True, [], 0, time.monotonic())
    refused = engine.submit(request, time.monotonic())
    assert refused is None, refused


def gaps_ms(engine: Engine, num_readers: int, num_prompts: int) -> list[tuple[float, float]]:
    """Gaps of the readers' tokens while the long prompts prefill, as (wall, CPU) milliseconds."""
    pool = engine.scheduler.pool
    engine.scheduler.pool = BlockPool(pool.num_total, pool.block_size, prefix_caching=False)
    window = engine.scheduler.max_model_len
    gaps: list[tuple[float, float]] = []
    for number in range(num_prompts):
        for reader in range(num_readers):
            submit(engine, f"reader{reader}", 64, window - 64)
        for _ in range(20):
            engine.step()
        submit(engine, f"long{number}", window - 1, 1)
        while engine.scheduler.waiting or len(engine.scheduler.running) > num_readers:
            wall_s, cpu_s = time.monotonic(), time.thread_time()
            engine.step()
            wall_s, cpu_s = time.monotonic() - wall_s, time.thread_time() - cpu_s
            gaps += [(1e3 * wall_s, 1e3 * cpu_s)] * num_readers
        for reader in range(num_readers):
            engine.abort(Abort(f"reader{reader}"))
    return gaps


def main() -> None:
    """With the target, and without one for comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    parser.add_argument("--readers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{processor()}, 1 thread, {given.readers} readers, target {given.itl_ms:g} ms")
    for itl_ms in (None, given.itl_ms):
        config = EngineConfig(
            str(MODEL),
            num_gpu_blocks_override=256,
            max_num_seqs=16,
            initial_num_seqs=16,
            itl_ms=itl_ms,
        )
        engine, _ = start(config, lambda phase, percent: None)
        found = gaps_ms(engine, given.readers, given.prompts)
        p50, p99 = np.quantile(np.array(found), [0.5, 0.99], axis=0)
        name = "no target" if itl_ms is None else "target"
        for column, clock in enumerate(("wall", "CPU")):
            print(
                f"{name:9} {clock:4}: {len(found)} gaps, P50 {p50[column]:.1f} ms, P99 "
                f"{p99[column]:.1f} ms = {p99[column] / given.itl_ms:.2f} x target (aim {AIM})",
                flush=True,
            )


if __name__ == "__main__":
    main()
