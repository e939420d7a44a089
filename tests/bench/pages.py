"""What pages cost and what sharing them saves, over HTTP.

    PYTHONPATH=tests .venv/bin/python -m bench.pages

Rounding waste: the share of the used KV slots that no token will have, as the worker's own metric
tells it while it serves prompts of 100 to 260 tokens with pages of 16. Shared prefix: the first
token's time of a prompt whose first 896 tokens were served before, over that of the prompt which
brought them, in pairs, with one client, so nothing else is in the time. The demo's model is so
small that HTTP is most of the second time; a random one of 60 M parameters stands beside it.
"""

import argparse
import asyncio
import random
import statistics
import time

import aiohttp
import httpx
from bench.serving import NAME, RANDOM_60M, VOCAB_SIZE, serving
from integration.worker_process import Worker
from sluice.load import LoadLedger, closed_loop
from sluice.machine import processor
from sluice.measure.client import COMPLETIONS, Shape, attempt

AIM_WASTE, AIM_PREFIX = 0.04, 0.25
PREFIX_TOKENS, TAIL_TOKENS = 896, 32
SHAPE = Shape((100, 260), (16, 64), VOCAB_SIZE, NAME)


async def waste(worker: Worker, cap: int, seconds: float) -> tuple[list[float], float]:
    """The metric, read ten times a second under a full cap, and the mean length in tokens."""
    rng = random.Random(0)
    ledger, seen = LoadLedger("waste"), []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: dict[str, object]) -> None:
            url = worker.url + COMPLETIONS
            ledger.outcomes.append(await attempt(session, url, body, time.monotonic()))

        def send(ledger: LoadLedger) -> asyncio.Task[None]:
            return asyncio.create_task(one(SHAPE.body(rng)))

        load = asyncio.create_task(closed_loop(send, ledger, cap, seconds))
        while not load.done():
            await asyncio.wait([load], timeout=0.1)
            if await asyncio.to_thread(worker.metric, "vllm:num_requests_running") >= 0.9 * cap:
                seen.append(await asyncio.to_thread(worker.metric, "sluice_kv_rounding_waste"))
    prompts = await asyncio.to_thread(worker.metric, "vllm:prompt_tokens_total")
    tokens = await asyncio.to_thread(worker.metric, "vllm:generation_tokens_total")
    # A sequence's length rises from its prompt's to its end: half of its output in the mean.
    return seen, (prompts + tokens / 2) / len(ledger.outcomes)


def first_token_s(url: str, prompt: list[int]) -> float:
    """Seconds until the first event of a stream."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    started = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        arrived_s = [time.monotonic() for _ in response.iter_bytes()]
    return arrived_s[0] - started


def prefix_ratios(url: str, pairs: int) -> list[float]:
    """First token on a shared prefix over the cold one's; the first pair warms up."""
    rng, ratios = random.Random(1), []
    for _ in range(pairs + 1):
        prefix = [rng.randrange(10, 1000) for _ in range(PREFIX_TOKENS)]
        tails = [[rng.randrange(10, 1000) for _ in range(TAIL_TOKENS)] for _ in range(2)]
        cold_s, shared_s = (first_token_s(url, prefix + tail) for tail in tails)
        ratios.append(shared_s / cold_s)
    return ratios[1:]


def main() -> None:
    """Both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cap", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--pairs", type=int, default=30)
    given = parser.parse_args()
    print(f"{processor()}, cap {given.cap}, pages of 16 tokens")
    flags = ["--block-size", "16", "--max-num-seqs", str(given.cap)]
    with serving(*flags) as worker:
        seen, length = asyncio.run(waste(worker, given.cap, given.seconds))
        small = prefix_ratios(worker.url, given.pairs)
    with serving(*flags, "--load-format", "dummy", model=RANDOM_60M) as worker:
        larger = prefix_ratios(worker.url, given.pairs)
    print(
        f"rounding waste: {statistics.mean(seen):.1%} in the mean of {len(seen)} readings "
        f"({min(seen):.1%} .. {max(seen):.1%}) at a mean length of {length:.0f} tokens "
        f"(aim {AIM_WASTE:.0%} at 188)"
    )
    for name, ratios in (("demo", small), ("60 M", larger)):
        print(
            f"{name}: first token on a shared prefix of {PREFIX_TOKENS} of "
            f"{PREFIX_TOKENS + TAIL_TOKENS} tokens: {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} .. {max(ratios):.2f}) of the cold one's time (aim {AIM_PREFIX})"
        )


if __name__ == "__main__":
    main()
