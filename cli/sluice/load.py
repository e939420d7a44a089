"""Load on an OpenAI-compatible endpoint: closed loop to find capacity, open loop to test it.

Runs anywhere Python runs, inside the cluster too: it prints one JSON object a line, progress every
two seconds and a `phase` line at the end of each phase; `kubectl logs -f` is its interface. Clients
are ordinary: keep-alive connections, and a retry after 429, 503 or a connection that closed before
any byte of the answer, as the openai client does. A request's clock starts with its first try.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

MAX_RETRIES = 2  # openai-python's default
REQUEST_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths in tokens, drawn uniformly; prompts are random token ids below `vocab_size`."""

    prompt_tokens: tuple[int, int]
    max_tokens: tuple[int, int]
    vocab_size: int
    model: str

    def body(self, rng: random.Random) -> dict[str, object]:
        """One request's JSON body."""
        prompt = [
            rng.randrange(10, self.vocab_size) for _ in range(rng.randint(*self.prompt_tokens))
        ]
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": rng.randint(*self.max_tokens),
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. `result`: ok, failed (typed error) or cut (no `[DONE]`)."""

    result: str
    pod: str
    ttft_s: float
    total_s: float
    num_tokens: int
    gaps_s: tuple[float, ...]
    retries: int
    detail: str = ""


@dataclass
class Ledger:
    """Counts of one phase; at its end every request sent has exactly one of `outcomes`."""

    name: str
    sent: int = 0
    outcomes: list[Outcome] = field(default_factory=list)

    def summary(self, seconds: float) -> dict[str, object]:
        """The phase in numbers: seconds are wall time from its first request to its last answer."""
        good = [o for o in self.outcomes if o.result == "ok"]
        gaps = [gap for o in good for gap in o.gaps_s]
        return {
            "phase": self.name,
            "seconds": round(seconds, 2),
            "sent": self.sent,
            "results": dict(Counter(o.result for o in self.outcomes)),
            "retries": sum(o.retries for o in self.outcomes),
            "details": dict(Counter(o.detail for o in self.outcomes if o.detail).most_common(3)),
            "by_pod": dict(Counter(o.pod for o in self.outcomes)),
            "requests_per_s": round(len(good) / seconds, 3) if seconds else 0.0,
            "tokens_per_s": round(sum(o.num_tokens for o in good) / seconds, 1) if seconds else 0.0,
            "p50_ttft_ms": quantile_ms([o.ttft_s for o in good], 0.5),
            "p99_ttft_ms": quantile_ms([o.ttft_s for o in good], 0.99),
            "p50_tpot_ms": quantile_ms(
                [(o.total_s - o.ttft_s) / (o.num_tokens - 1) for o in good if o.num_tokens > 1], 0.5
            ),
            "p99_itl_ms": quantile_ms(gaps, 0.99),
        }


def quantile_ms(seconds: list[float], q: float) -> float | None:
    """The q-quantile (nearest rank) in milliseconds, or None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(1000 * ordered[min(len(ordered) - 1, int(q * len(ordered)))], 2)


class Retry(Exception):
    """The server asked to come again, or closed before it answered."""

    def __init__(self, after_s: float, why: str) -> None:
        super().__init__(why)
        self.after_s = after_s


async def read_stream(response: aiohttp.ClientResponse, start: float) -> Outcome:
    """Read one SSE answer to its end; without `[DONE]` it is cut, with an error event failed."""
    times: list[float] = []
    done, error = False, ""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            if b'"error"' in line and "error" in json.loads(line[6:]):
                error = line.decode(errors="replace")[:200]
            times.append(time.monotonic())
    gaps = tuple(b - a for a, b in zip(times, times[1:], strict=False))
    result = "failed" if error else ("ok" if done else "cut")
    ttft = times[0] - start if times else 0.0
    pod = response.headers.get("x-sluice-pod", "unknown")
    return Outcome(result, pod, ttft, time.monotonic() - start, len(times), gaps, 0, error)


async def attempt(
    session: aiohttp.ClientSession, url: str, body: dict[str, object], start: float
) -> Outcome:
    """One try; raises `Retry` where an ordinary client would come again."""
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status in (429, 503):
                after = float(response.headers.get("Retry-After", "1"))
                raise Retry(min(after, 10.0), f"HTTP {response.status}")
            if response.status != 200:
                detail = f"HTTP {response.status}: {(await response.text())[:200]}"
                return Outcome("failed", "", 0.0, time.monotonic() - start, 0, (), 0, detail)
            return await read_stream(response, start)
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientConnectorError, ConnectionError) as e:
        raise Retry(0.5, type(e).__name__) from e
    except (TimeoutError, aiohttp.ClientError) as e:
        detail = f"{type(e).__name__}: {e}"[:200]
        return Outcome("cut", "", 0.0, time.monotonic() - start, 0, (), 0, detail)


async def request(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Outcome:
    """One request with its retries, as one outcome."""
    start = time.monotonic()
    for retries in range(MAX_RETRIES + 1):
        try:
            outcome = await attempt(session, url, body, start)
        except Retry as again:
            if retries == MAX_RETRIES:
                return Outcome("failed", "", 0.0, 0.0, 0, (), retries, str(again))
            await asyncio.sleep(again.after_s)
        else:
            return outcome if not retries else _with_retries(outcome, retries)
    raise AssertionError("unreachable: the last try returns")


def _with_retries(o: Outcome, retries: int) -> Outcome:
    return Outcome(o.result, o.pod, o.ttft_s, o.total_s, o.num_tokens, o.gaps_s, retries, o.detail)


Send = Callable[[Ledger], "asyncio.Task[None]"]


async def closed_loop(send: Send, ledger: Ledger, concurrency: int, seconds: float) -> None:
    """Keep `concurrency` requests open for `seconds`, then let them finish."""
    end = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            await send(ledger)

    await asyncio.gather(*(client() for _ in range(concurrency)))


async def open_loop(
    send: Send, ledger: Ledger, rate: float, seconds: float, rng: random.Random
) -> None:
    """Poisson arrivals at `rate` a second for `seconds`, whatever the answers; awaits them."""
    start = time.monotonic()
    due, tasks = start, []
    while (due := due + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(send(ledger))
    await asyncio.gather(*tasks)


def emit(record: dict[str, object]) -> None:
    """One JSON line on standard output, flushed."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


async def report_progress(ledgers: list[Ledger]) -> None:
    """A progress line every two seconds, for ever."""
    while True:
        await asyncio.sleep(2.0)
        if ledgers:
            now = ledgers[-1]
            emit(
                {"t_s": time.time(), "name": now.name, "sent": now.sent, "done": len(now.outcomes)}
            )


async def run(args: argparse.Namespace) -> int:
    """All phases of the command line in order; 0 if every request ended ok."""
    rng = random.Random(args.seed)  # noqa: S311 - a load, not a secret
    shape = Shape(tuple(args.prompt_tokens), tuple(args.max_tokens), args.vocab_size, args.model)
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    ledgers: list[Ledger] = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        def send(ledger: Ledger) -> asyncio.Task[None]:
            ledger.sent += 1
            body = shape.body(rng)

            async def one() -> None:
                ledger.outcomes.append(await request(session, args.url, body))

            return asyncio.create_task(one())

        progress = asyncio.create_task(report_progress(ledgers))
        capacity = args.capacity
        for name, kind, amount, seconds in args.phases:
            ledgers.append(Ledger(name))
            start = time.monotonic()
            if not capacity:
                emit(
                    {"error": "no request was answered, so there is no capacity to take a part of"}
                )
                break
            if kind == "closed":
                await closed_loop(send, ledgers[-1], int(amount), seconds)
            else:
                await open_loop(send, ledgers[-1], amount * capacity, seconds, rng)
            summary = ledgers[-1].summary(time.monotonic() - start)
            if kind == "closed" and name == "capacity":
                capacity = float(str(summary["requests_per_s"]))
            emit(summary | {"t_s": time.time(), "capacity": capacity})
        progress.cancel()
    return 0 if all(o.result == "ok" for led in ledgers for o in led.outcomes) else 1


def phase(text: str) -> tuple[str, str, float, float]:
    """`NAME:closed:CONCURRENCY:SECONDS` or `NAME:open:FRACTION_OF_CAPACITY:SECONDS`."""
    try:
        name, kind, amount, seconds = text.split(":")
        if kind not in ("closed", "open") or float(amount) <= 0 or float(seconds) <= 0:
            raise ValueError(text)
        return name, kind, float(amount), float(seconds)
    except ValueError as e:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME:closed:CONCURRENCY:SECONDS or NAME:open:FRACTION:SECONDS"
        ) from e


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `sluice load`."""
    parser.add_argument("--url", required=True, help="base URL of the service")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument(
        "--phases", type=phase, nargs="+", required=True, help=phase.__doc__, metavar="PHASE"
    )
    parser.add_argument(
        "--capacity", type=float, default=1.0, help="requests/s that a fraction of 1 stands for"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[64, 192], metavar=("A", "B"))
    parser.add_argument("--max-tokens", type=int, nargs=2, default=[32, 96], metavar=("A", "B"))
    parser.add_argument("--vocab-size", type=int, default=1000, help="token ids are drawn below it")
    parser.add_argument("--seed", type=int, default=0)


def main(args: argparse.Namespace) -> int:
    """Entry of `sluice load`."""
    return asyncio.run(run(args))
