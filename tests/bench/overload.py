"""What three times a worker's capacity does to its goodput, on the demo's model over HTTP.

    PYTHONPATH=tests .venv/bin/python -m bench.overload

A worker that sheds for its first-token target, in turns at its capacity (as many clients as it has
places, each with its next request at once) and at three times that in Poisson arrivals, with
clients that take a 429 for an answer. Goodput counts the requests that were answered in full within
both targets, as the client saw them. The load runs on the machine's other processor.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import aiohttp
from bench.serving import NAME, VOCAB_SIZE, serving
from sluice.load import LoadLedger, closed_loop, open_loop
from sluice.machine import processor
from sluice.measure.client import COMPLETIONS, Outcome, Retry, Shape, attempt

AIM_GOODPUT, AIM_WITHIN = 0.9, 0.95
SHAPE = Shape((64, 192), (32, 96), VOCAB_SIZE, NAME)


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests a second that came, and shares and rates of what became of them."""

    offered_rps: float
    accepted_rps: float
    good_rps: float
    within: float
    """Share of the accepted requests that met both targets."""

    def __str__(self) -> str:
        return (
            f"{self.offered_rps:6.1f} requests/s came, {self.accepted_rps:5.1f} accepted, "
            f"{self.good_rps:5.1f} good, {self.within:.1%} of the accepted within the targets"
        )


def is_good(outcome: Outcome, ttft_ms: float, tpot_ms: float) -> bool:
    """Whether a request that was answered in full was in time."""
    after_s = outcome.total_s - outcome.ttft_s
    per_token_s = after_s / max(1, outcome.num_tokens - 1)
    return 1e3 * outcome.ttft_s <= ttft_ms and 1e3 * per_token_s <= tpot_ms


async def offer(url: str, seed: int, given: argparse.Namespace, rate: float | None) -> Phase:
    """One phase: `rate` arrivals a second, or None for as many clients as there are places."""
    rng = random.Random(seed)
    ledger = LoadLedger("")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def one(body: dict[str, object], due_s: float) -> None:
            try:
                outcome = await attempt(session, url + COMPLETIONS, body, due_s)
            except Retry:  # refused, and this client does not come again
                return
            ledger.outcomes.append(outcome)

        def send(ledger: LoadLedger, due_s: float | None = None) -> asyncio.Task[None]:
            ledger.sent += 1
            return asyncio.create_task(one(SHAPE.body(rng), due_s or time.monotonic()))

        started = time.monotonic()
        if rate is None:
            await closed_loop(send, ledger, given.cap, given.seconds)
        else:
            await open_loop(send, ledger, rate, given.seconds, rng)
        seconds = time.monotonic() - started
    bad = [outcome for outcome in ledger.outcomes if outcome.result != "ok"]
    if bad:
        raise SystemExit(f"{len(bad)} requests were cut or failed: {bad[0].detail}")
    good = sum(is_good(o, given.ttft_ms, given.tpot_ms) for o in ledger.outcomes)
    accepted = len(ledger.outcomes)
    return Phase(ledger.sent / seconds, accepted / seconds, good / seconds, good / accepted)


def rounds(url: str, given: argparse.Namespace) -> list[tuple[Phase, Phase]]:
    """Capacity and overload in turns; the first pair warms up and is not counted."""
    pairs = []
    for number in range(given.rounds + 1):
        full = asyncio.run(offer(url, number, given, None))
        over = asyncio.run(offer(url, number, given, given.factor * full.accepted_rps))
        name = f"round {number}" if number else "warm-up"
        print(f"{name} full: {full}\n{name} over: {over}", flush=True)
        pairs.append((full, over))
    return pairs[1:]


def spread(values: Seq[float]) -> str:
    """Median, and all from to."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


def main() -> None:
    """The ratio of the goodputs, and how many of the accepted were in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cap", type=int, default=16)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--tpot-ms", type=float, default=100.0)
    given = parser.parse_args()
    flags = ["--overload", "Shed", "--max-num-seqs", str(given.cap)]
    flags += ["--slo-ttft-ms", str(given.ttft_ms), "--slo-itl-ms", str(given.tpot_ms)]
    print(f"{processor()}, cap {given.cap}, first token {given.ttft_ms:g} ms, ", end="")
    print(f"{given.tpot_ms:g} ms a token, {given.rounds} rounds of {given.seconds:g} s")
    with serving(*flags) as worker:
        pairs = rounds(worker.url, given)
    ratios = [over.good_rps / full.good_rps for full, over in pairs]
    within = [over.within for _, over in pairs]
    print(f"goodput at {given.factor:g} x capacity: {spread(ratios)} of that at capacity", end="")
    print(f" (aim {AIM_GOODPUT}); {spread(within)} of the accepted in time (aim {AIM_WITHIN})")


if __name__ == "__main__":
    main()
