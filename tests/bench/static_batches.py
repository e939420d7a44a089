"""What static batches gain: as measured on two real workers, and by the formula of `sluice bench`.

    PYTHONPATH=tests nice -n 19 .venv/bin/python -m bench.static_batches

The demo's model behind one continuous and one static worker, both for 8 sequences. Each pair of
waves has the same lengths. What is compared is the engines' CPU time, of one thread, which other
load of the machine hardly moves.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from statistics import median, quantiles

import aiohttp
from bench.peers.processes import cpu_seconds
from bench.serving import NAME, VOCAB_SIZE, serving
from integration.worker_process import Worker
from sluice.machine import processor
from sluice.measure.client import COMPLETIONS, Outcome, Shape, request
from sluice.measure.curve import CurveTally, Length, static
from sluice.measure.endpoint import ServerCounters, scrape
from sluice.measure.targets import read_targets

SIZE, WAVE, CHUNK = 8, 32, 2048
STATIC = ("--batching-mode=static", f"--static-batch-size={SIZE}")
FLAGS = ("--dtype=float32", "--max-num-seqs=32", "--num-gpu-blocks-override=512", "--slo-itl-ms=60")
OUTPUTS = ((64, 64), (32, 96), (8, 128))


async def wave(
    session: aiohttp.ClientSession, worker: Worker, bodies: list[dict[str, object]]
) -> tuple[list[Outcome], float, ServerCounters]:
    """Answers, CPU seconds of the engine, and the counters after them."""
    start = cpu_seconds(worker.engine_pid())
    url = worker.url + COMPLETIONS
    outcomes = await asyncio.gather(*(request(session, url, b, max_retries=0) for b in bodies))
    seconds = cpu_seconds(worker.engine_pid()) - start
    counters = await scrape(session, worker.admin_url, CHUNK)
    assert counters is not None
    assert all(outcome.is_ok for outcome in outcomes)
    return list(outcomes), seconds, counters


async def pair(
    session: aiohttp.ClientSession, workers: dict[bool, Worker], shape: Shape, rng: random.Random
) -> tuple[float, float]:
    """Throughput that static batches gain: measured, and by the formula."""
    lengths: list[Length] = [shape.lengths(rng) for _ in range(WAVE)]
    seconds, gain = {}, 0.0
    for is_static in rng.sample([False, True], 2):
        worker = workers[is_static]
        before = await scrape(session, worker.admin_url, CHUNK)
        assert before is not None
        bodies = [shape.body(rng, one) for one in lengths]
        outcomes, seconds[is_static], after = await wave(session, worker, bodies)
        if not is_static:
            tally = CurveTally(SIZE)
            prompts = [prompt for prompt, _ in lengths]
            steps = after.steps - before.steps
            tally.add(outcomes, prompts, seconds[False], read_targets("ttft=1s"), steps, None)
            gain = static(tally, after.costs)["gain"]
    return seconds[False] / seconds[True] - 1, gain


async def compare(workers: dict[bool, Worker], num_pairs: int) -> None:
    """All output lengths, the first pair of each left out."""
    rng = random.Random(3)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for low, high in OUTPUTS:
            shape = Shape((26, 102), (low, high), VOCAB_SIZE, NAME)
            found = [await pair(session, workers, shape, rng) for _ in range(num_pairs + 1)][1:]
            measured, predicted = zip(*found, strict=True)
            first, _, third = quantiles(measured)
            print(
                f"outputs of {low} to {high} tokens: static gains {median(measured):+.1%} "
                f"(quartiles {first:+.1%}, {third:+.1%}), by the formula {median(predicted):+.1%}",
                flush=True,
            )


def main() -> None:
    """Two workers, and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    print(f"{processor()}, {given.pairs} pairs of {WAVE} requests, {SIZE} sequences")
    with (
        serving(*FLAGS, f"--initial-num-seqs={SIZE}") as continuous,
        serving(*FLAGS, *STATIC) as static_one,
    ):
        asyncio.run(compare({False: continuous, True: static_one}, given.pairs))


if __name__ == "__main__":
    main()
