"""Whether a worker on a CPU takes the memory that it planned: JSON.

    PYTHONPATH=tests .venv/bin/python -m bench.memory

A random 88M Llama in bf16, its KV cache filled to the last block by sequences that run at once.
Compared are what the engine process takes beyond the baseline, anonymous and shared memory at its
peak, and the plan that its KV cache was made by: weights, activations, workspace, KV cache. The
baseline is an engine with a model of a few kilobytes: Python, torch and their threads. Pages of
files are not in it, as they are given up when others need them.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median

import aiohttp
import httpx
from bench.peers.checkpoint import CACHE, MODELS, write
from bench.peers.traces import VOCAB_SIZE
from bench.serving import NAME, serving
from integration.worker_process import Worker
from sluice.machine import processor
from sluice.measure.client import COMPLETIONS, Shape, request
from unit.worker.api.tiny import write_checkpoint

BLOCK_SIZE, SEQUENCES, BLOCKS_EACH, OUTPUT = 64, 32, (5, 20, 31), 24
REPEATS, POLL_S = 3, 0.02
PARTS = ("RssAnon:", "RssShmem:")
PLANNED = ("weights_bytes", "activation_bytes", "workspace_bytes", "kv_cache_bytes")
SHAPE = Shape((1, 1), (1, 1), VOCAB_SIZE, NAME)


def own_bytes(pid: int) -> int:
    """Resident memory of a process that no file can give back."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(PARTS))


@contextmanager
def worker(model: Path, num_blocks: int, load_format: str = "auto") -> Iterator[Worker]:
    """One that keeps `SEQUENCES` of any length at once, as far as its blocks go."""
    flags = f"--dtype bfloat16 --block-size {BLOCK_SIZE} --num-gpu-blocks-override {num_blocks}"
    flags += f" --max-num-seqs {SEQUENCES} --initial-num-seqs {SEQUENCES} --max-model-len 2048"
    flags += f" --load-format {load_format}"
    with serving(*flags.split(), model=model) as running:
        yield running


async def fill(running: Worker, num_blocks: int) -> int:
    """The engine's largest own memory while sequences fill all blocks to the last slot but one."""
    rng, tokens = Random(num_blocks), num_blocks // SEQUENCES * BLOCK_SIZE - OUTPUT
    pid, url, peak = running.engine_pid(), running.url + COMPLETIONS, 0
    async with aiohttp.ClientSession() as session:
        bodies = [SHAPE.body(rng, (tokens, OUTPUT)) for _ in range(SEQUENCES)]
        sent = [asyncio.create_task(request(session, url, body)) for body in bodies]
        while not all(task.done() for task in sent):
            peak = max(peak, own_bytes(pid))
            await asyncio.sleep(POLL_S)
    if not all(task.result().is_ok for task in sent):
        raise SystemExit("a request failed")
    return peak


def measure(model: Path, num_blocks: int) -> tuple[dict[str, int], int]:
    """What one worker planned, and what its engine took with a full KV cache."""
    with worker(model, num_blocks) as running:
        evidence = httpx.get(running.admin_url + "/v1/evidence?after=0").json()
        return evidence["memory"]["corrected"], asyncio.run(fill(running, num_blocks))


def main() -> None:
    """Prints planned and measured bytes of caches of several sizes."""
    model = write(MODELS["88M"], CACHE / "models")
    with tempfile.TemporaryDirectory() as directory:
        tiny = write_checkpoint(Path(directory) / "model", max_position=2048)
        with worker(tiny, SEQUENCES, "dummy") as running:
            baseline = own_bytes(running.engine_pid())
    told: dict[str, object] = {"processor": processor(), "processors": os.cpu_count()}
    told["baseline_bytes"] = baseline
    for blocks_each in BLOCKS_EACH:
        errors = []
        for _ in range(REPEATS):
            planned, peak = measure(model, SEQUENCES * blocks_each)
            plan = sum(planned[part] for part in PLANNED)
            errors.append(100 * ((peak - baseline) / plan - 1))
        told[f"KV cache of {planned['kv_cache_bytes'] >> 20} MiB"] = {
            "planned": planned,
            "measured_bytes": peak - baseline,
            "error_percent": f"{median(errors):+.1f} ({min(errors):+.1f} .. {max(errors):+.1f})",
        }
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
