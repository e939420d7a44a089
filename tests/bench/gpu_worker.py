"""A worker with an 8B of random weights on this GPU, over HTTP, for `bench.gpu`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
from bench.gpu_kernels import DEVICE, REHEARSED, VOCAB
from bench.gpu_memory import MAX_LEN, written_model
from bench.real_caps import Aim, Steered, calibrate, contend, contender, replay
from bench.real_rows import Row, make_row, num_early, scaled_trace
from bench.real_turns import Setting
from bench.serving import NAME, serving
from integration.worker_process import Worker
from research.generate import Lengths
from sluice.measure.client import Shape
from sluice_operator.pods.scrape import create_client

LENGTHS = Lengths(24, 16) if REHEARSED else Lengths(512, 128)
SHAPE = Shape((1, 1), (1, 1), VOCAB, NAME)  # lengths are given with each request
CAPS = (1, 8) if REHEARSED else (1, 2, 4, 8, 16, 32, 64)
AIM = Aim(1000.0, 2.5, CAPS[-1], CAPS[-1] // 2, SHAPE, LENGTHS, 3.0, 5.0)
CAP_S, TUNED_S, GRACE_S = 9.0, 63.0, 3.0
"""Seconds of bursts at a fixed cap and under the tuner, and for what is left behind the last."""
TRACE = "bursts"


async def measured_load(is_quick: bool, keep: Callable[[Row], None]) -> None:
    """Bursts at each of CAPS on one worker, then on a fresh one, from cold, the tuner's law; `keep`
    is given each row. All meet the same requests, which a worker at the largest cap could just do.
    is_quick: two caps, and a quarter of the tuner's time.
    """
    caps, tuned_s = (CAPS[::6], TUNED_S / 4) if is_quick else (CAPS, TUNED_S)
    async with create_client() as client:
        with written_model() as path:
            with worker_of(path) as worker:
                found = await calibrate(worker, client, AIM)
                targets = found.targets
                told = f"{found.per_s:.1f} requests/s; {targets.itl_ms:g} ms are due"
                print(told, flush=True)
                for cap in caps:
                    keep(await run(worker, client, found, CAP_S, cap))
            flags = ("--slo-ttft-ms", str(targets.ttft_ms), "--slo-itl-ms", str(targets.itl_ms))
            with worker_of(path, *flags) as worker:
                keep(await run(worker, client, found, tuned_s, None))


def worker_of(path: Path, *flags: str) -> AbstractContextManager[Worker]:
    """A worker on the device."""
    given = ("--load-format", "dummy", "--max-model-len", str(MAX_LEN), *flags)
    return serving(*given, "--max-num-seqs", "256", model=path, device=DEVICE.type)


async def run(
    worker: Worker, client: httpx.AsyncClient, found: Setting, seconds: float, cap: int | None
) -> Row:
    """One contender on the trace; `cap` None: the operator's tuner, from the worker's own cap."""
    trace = scaled_trace(TRACE, found.per_s, seconds, 1, LENGTHS)
    admin, replaying = Steered.of(worker, client), replay(worker.url, trace, 1, SHAPE, GRACE_S)
    outcomes, took_s, cpu_s = await contend(worker, admin, found.targets, cap, replaying)
    done = (outcomes, found.targets, took_s, cpu_s, admin.path, found.per_s, num_early(trace))
    if cap is None:
        await tell_steps(admin)
    return make_row(TRACE, contender(cap), 0, *done)


async def tell_steps(admin: Steered) -> None:
    """Print the steps of each tick, and the last step model."""
    evidence = (await admin.seen())[0]
    for tick in evidence.ticks:
        told = f"{tick.steps} steps of {1e3 * tick.busy_s / max(tick.steps, 1):.1f} ms"
        told += f", {tick.decodes} decodes, {tick.prefill_tokens} prefill tokens"
        print(f"      {told}; {tick.slow_steps} slow, {tick.running} run", flush=True)
    print(f"      {evidence.step_model}", flush=True)
