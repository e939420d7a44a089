"""Load on an OpenAI-compatible endpoint: closed loop to find capacity, open loop to test it.

It prints one JSON object a line: progress every two seconds, and a `phase` line at the end of each
phase. `kubectl logs -f` is its interface in a cluster.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sluice_operator.tuner import Targets

from sluice.measure import targets
from sluice.measure.client import (
    COMPLETIONS,
    EMBEDDINGS,
    REQUEST_TIMEOUT_SECONDS,
    Outcome,
    Shape,
    add_length_arguments,
    exact_quantile_ms,
    request,
)
from sluice.measure.endpoint import EndpointError, base_url, open_session
from sluice.numbers import positive, vocabulary

KINDS = ("closed", "open", "burst")
CAPACITY = "capacity"
"""A closed phase of this name measures the capacity; other phases send shares of it."""
PHASES = (
    "NAME:closed:CONCURRENCY:SECONDS, NAME:open:FRACTION:SECONDS of the capacity, or "
    "NAME:burst:FRACTION:SECONDS, at once as many requests as the capacity brings in FRACTION s. "
    "The capacity is what the closed phase named `capacity` brings, or --capacity"
)
Phase = tuple[str, str, float, float]
"""Name, kind, amount and seconds."""


@dataclass
class LoadLedger:
    """Counts of one phase; at its end every request sent has exactly one of `outcomes`.

    A request without an answer counts as waiting for ever for its first token.
    """

    name: str
    targets: Targets | None = None
    sent: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self, seconds: float) -> dict[str, object]:
        """The phase in numbers: seconds are wall time from its first request to its last answer."""
        good = [o for o in self.outcomes if o.is_ok]
        gaps = [gap for o in self.outcomes for gap in o.gaps_s]
        first_s = [o.ttft_s if o.is_ok else math.inf for o in self.outcomes]
        held = self.targets and sum(targets.is_good(o, self.targets) for o in self.outcomes)
        return {
            "phase": self.name,
            "seconds": round(seconds, 2),
            "sent": self.sent,
            "results": dict(Counter(o.result for o in self.outcomes)),
            "retries": sum(o.retries for o in self.outcomes),
            "details": dict(Counter(o.detail for o in self.outcomes if o.detail).most_common(3)),
            "by_pod": dict(Counter(o.pod for o in good)),
            "requests_per_s": round(len(good) / seconds, 3) if seconds else 0.0,
            "tokens_per_s": round(sum(o.num_tokens for o in good) / seconds, 1) if seconds else 0.0,
            "p50_ttft_ms": quantile_ms(first_s, 0.5),
            "p99_ttft_ms": quantile_ms(first_s, 0.99),
            "p50_tpot_ms": quantile_ms(
                [(o.total_s - o.ttft_s) / (o.num_tokens - 1) for o in good if o.num_tokens > 1], 0.5
            ),
            "p99_itl_ms": quantile_ms(gaps, 0.99),
            **({} if held is None else {"good": held}),
        }


def quantile_ms(seconds: Sequence[float], q: float) -> float | None:
    """`exact_quantile_ms`, rounded to a hundredth."""
    value = exact_quantile_ms(seconds, q)
    return None if value is None else round(value, 2)


Send = Callable[..., "asyncio.Task[None]"]
"""Sends one request of a ledger; a second argument is its due time on the monotonic clock."""


async def closed_loop(send: Send, ledger: LoadLedger, concurrency: int, seconds: float) -> None:
    """Keep `concurrency` requests open for `seconds`, then let them finish."""
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            await send(ledger)

    await asyncio.gather(*(client() for _ in range(concurrency)))


async def open_loop(
    send: Send, ledger: LoadLedger, rate: float, seconds: float, rng: random.Random
) -> None:
    """Poisson arrivals at `rate` a second for `seconds`, whatever the answers; awaits them."""
    start = time.monotonic()
    due, tasks = start, []
    while (due := due + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(send(ledger, due))
    await asyncio.gather(*tasks)


async def burst(send: Send, ledger: LoadLedger, size: int, seconds: float) -> None:
    """Send `size` requests at once, then nothing until all are answered, `seconds` at least."""
    end = time.monotonic() + seconds
    await asyncio.gather(*(send(ledger) for _ in range(size)))
    await asyncio.sleep(max(0.0, end - time.monotonic()))


def emit(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


async def report_progress(ledgers: list[LoadLedger]) -> None:
    """Print a progress line every two seconds, for ever."""
    while True:
        await asyncio.sleep(2.0)
        if ledgers:
            now = ledgers[-1]
            emit(
                {"t_s": time.time(), "name": now.name, "sent": now.sent, "done": len(now.outcomes)}
            )


async def run(args: argparse.Namespace) -> int:
    """All phases of the command line in order; 0 if requests were sent and all ended ok.

    Raises EndpointError if they cannot be sent.
    """
    rng = random.Random(args.seed)  # noqa: S311 - a load, not a secret
    (prompt, longest), (least, most) = sorted(args.prompt_tokens), sorted(args.max_tokens)
    shape = Shape(
        (prompt, longest), (least, most), args.vocab_size, args.model, not args.whole, args.words,
        args.route,
    )  # fmt: skip
    ledgers: list[LoadLedger] = []
    async with open_session(args.api_key_file, REQUEST_TIMEOUT_SECONDS) as session:

        def send(ledger: LoadLedger, due_s: float | None = None) -> asyncio.Task[None]:
            ledger.sent += 1
            body = shape.body(rng)

            async def one() -> None:
                url = args.url + args.route
                ledger.outcomes.append(await request(session, url, body, due_s=due_s))

            return asyncio.create_task(one())

        progress = asyncio.create_task(report_progress(ledgers))
        # An error that ends it, such as a reader who left, ends the next phase's line as well.
        progress.add_done_callback(lambda task: task.cancelled() or task.exception())
        capacity = args.capacity or 1.0
        for one in args.phases:
            if not capacity:
                emit({"error": "there is no capacity to take a part of"})
                break
            ledgers.append(LoadLedger(one[0], args.slo))
            capacity = await _run_phase(one, ledgers[-1], capacity, send, rng)
        progress.cancel()
    ended = [outcome.is_ok for ledger in ledgers for outcome in ledger.outcomes]
    if not ended:
        emit({"error": "no request was sent: the phases are too short for their rate"})
    return 0 if ended and all(ended) else 1


async def _run_phase(
    one: Phase, ledger: LoadLedger, capacity: float, send: Send, rng: random.Random
) -> float:
    """Run it, print its summary, and return the capacity in requests/s from then on."""
    name, kind, amount, seconds = one
    start = time.monotonic()
    if kind == "closed":
        await closed_loop(send, ledger, int(amount), seconds)
    elif kind == "burst":
        await burst(send, ledger, round(amount * capacity), seconds)
    else:
        await open_loop(send, ledger, amount * capacity, seconds, rng)
    summary = ledger.summary(time.monotonic() - start)
    if kind == "closed" and name == CAPACITY:
        capacity = float(str(summary["requests_per_s"]))
    emit(summary | {"t_s": time.time(), "capacity": capacity})
    if why := unanswered(ledger):
        emit({"error": f"phase {name}: no request was answered: {why}"})
    return capacity


def unanswered(ledger: LoadLedger) -> str:
    """The commonest failure of a phase without any answer, else ""."""
    if not ledger.outcomes or any(outcome.is_ok for outcome in ledger.outcomes):
        return ""
    return Counter(o.detail or o.result for o in ledger.outcomes).most_common(1)[0][0]


def phase(text: str) -> Phase:
    """The phase of a text like `PHASES`; raises ArgumentTypeError."""
    try:
        name, kind, amount, seconds = text.split(":")
        number, is_closed = positive(amount), kind == "closed"
        if kind not in KINDS or (is_closed and not number.is_integer()):
            raise ValueError(text)
        return name, kind, number, positive(seconds)
    except (ValueError, argparse.ArgumentTypeError) as e:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME:closed:CONCURRENCY:SECONDS with a whole CONCURRENCY, "
            "NAME:open:FRACTION:SECONDS or NAME:burst:FRACTION:SECONDS"
        ) from e


def refusal(phases: Sequence[Phase], capacity: float | None) -> str:
    """Why the shares would be of another capacity than they seem to be, "" if they would not.

    `capacity`: the given one.
    """
    measured = [name == CAPACITY and kind == "closed" for name, kind, _, _ in phases]
    shares = [kind != "closed" for _, kind, _, _ in phases]
    if capacity is not None:
        if any(measured):
            return "a closed phase named `capacity` measures what --capacity gives; leave one out"
        return "" if any(shares) else "--capacity says nothing without an open phase or a burst"
    if not any(shares) or all(shares) or any(measured[: shares.index(True)]):
        return ""
    early = phases[shares.index(True)][0]
    return (
        f"phase {early} takes a share of the capacity, and no closed phase named `capacity` has "
        "measured it before; name one so, or give --capacity"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=base_url, required=True, help="base URL of the service")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--api-key-file", type=Path, help="bearer of the API")
    parser.add_argument(
        "--phases", type=phase, nargs="+", required=True, help=PHASES, metavar="PHASE"
    )
    parser.add_argument(
        "--capacity", type=positive, help="requests/s that a fraction of 1 stands for; default: 1"
    )
    parser.add_argument(
        "--route", choices=(COMPLETIONS, EMBEDDINGS), default=COMPLETIONS, help="of the API"
    )
    add_length_arguments(parser, prompt=(64, 192), output=(32, 96))
    parser.add_argument("--whole", action="store_true", help="ask for whole answers, no streams")
    parser.add_argument(
        "--vocab-size", type=vocabulary, default=1000, help="token ids are drawn below it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths, tokens and arrivals")
    parser.add_argument("--slo", type=targets.read_targets, help=f"count good ones: {targets.HELP}")


def main(args: argparse.Namespace) -> int:
    if why := refusal(args.phases, args.capacity):
        print(f"sluice load: {why}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(run(args))
    except EndpointError as e:
        print(f"sluice load: {e}", file=sys.stderr)
        return 2
