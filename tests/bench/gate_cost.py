"""The cost of the gate: the same closed loops straight to an engine and through the gate, in turns.

    PYTHONPATH=tests .venv/bin/python -m bench.gate_cost --engine vllm --out build/gate.json

For each number of clients: first tokens (P50, P99), tokens/s, the gate's CPU time for a chunk, and
its memory. Each figure of the gate is beside the engine's own of the same round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import aiohttp
from bench.peers.checkpoint import CACHE
from bench.peers.processes import cpu_seconds, unwind_on_sigterm
from bench.peers.traces import VOCAB_SIZE
from bench.peers.variants import MODEL_NAME
from engines.launchers import CAPACITY, KINDS, running_engine, running_gate
from integration.worker_process import Worker
from sluice.measure.client import COMPLETIONS, Outcome, Shape, exact_quantile_ms, request
from sluice.numbers import count

CLIENTS = (1, 8, 32)
LENGTHS = (32, 64)
SHAPE = Shape((1, 1), (1, 1), VOCAB_SIZE, MODEL_NAME, words=True)


async def loop(url: str, clients: int, seconds: float, seed: int) -> tuple[list[Outcome], float]:
    """What `clients` get that ask again and again, and the seconds until the last answer."""
    rng, outcomes, start = Random(seed), list[Outcome](), time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)

    async def one(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < start + seconds:
            body = SHAPE.body(rng, LENGTHS)
            outcomes.append(await request(session, url + COMPLETIONS, body, max_retries=0))

    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one(session) for _ in range(clients)))
    return outcomes, time.monotonic() - start


def figures(outcomes: Sequence[Outcome], seconds: float) -> dict[str, float | int | None]:
    """Of one run."""
    answered = [one for one in outcomes if one.is_ok]
    first = [one.ttft_s for one in answered]
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "tokens_per_s": round(sum(one.num_tokens for one in answered) / seconds, 1),
        "p50_ttft_ms": exact_quantile_ms(first, 0.5),
        "p99_ttft_ms": exact_quantile_ms(first, 0.99),
    }


def resident_mib(pid: int) -> float:
    """Memory of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


async def measured(
    engine_url: str, gate: Worker, clients: int, given: argparse.Namespace
) -> list[dict[str, object]]:
    """All rounds of a number of clients, each beginning with the other way."""
    rows: list[dict[str, object]] = []
    for repeat in range(given.repeats):
        ways = [("alone", engine_url), ("gate", gate.url)]
        for way, url in ways if repeat % 2 else reversed(ways):
            before_s = cpu_seconds(gate.process.pid)
            outcomes, took_s = await loop(url, clients, given.seconds, repeat)
            cpu_s = cpu_seconds(gate.process.pid) - before_s
            row: dict[str, object] = {"clients": clients, "repeat": repeat, "way": way}
            row |= figures(outcomes, took_s)
            if way == "gate":
                tokens = sum(one.num_tokens for one in outcomes)
                row["cpu_us_per_token"] = round(1e6 * cpu_s / max(tokens, 1), 1)
                row["resident_mib"] = round(resident_mib(gate.process.pid), 1)
            print(row, flush=True)
            rows.append(row)
    return rows


def compared(rows: Sequence[dict[str, object]]) -> dict[str, object]:
    """Gate over engine alone, a pair a round: ratio of tokens/s, difference of P99 first tokens."""

    def each(way: str, name: str) -> list[float]:
        return [float(str(row[name])) for row in rows if row["way"] == way and row.get(name)]

    ratio = [
        a / b
        for a, b in zip(each("gate", "tokens_per_s"), each("alone", "tokens_per_s"), strict=True)
    ]
    more = [
        a - b
        for a, b in zip(each("gate", "p99_ttft_ms"), each("alone", "p99_ttft_ms"), strict=True)
    ]
    return {
        "tokens_per_s_ratio": _spread(ratio),
        "p99_ttft_more_ms": _spread(more),
        "cpu_us_per_token": _spread(each("gate", "cpu_us_per_token")),
        "resident_mib": _spread(each("gate", "resident_mib")),
    }


def _spread(values: Sequence[float]) -> list[float]:
    return [round(f(values), 3) for f in (statistics.median, min, max)]


async def run(given: argparse.Namespace) -> dict[str, object]:
    """All numbers of clients, on one engine and one gate."""
    found: dict[str, object] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        running_engine(KINDS[given.engine], Path(directory)) as engine,
        running_gate(engine, Path(directory) / "gate") as gate,
    ):
        await loop(engine.url, CAPACITY, given.seconds / 2, -1)  # warm up
        for clients in given.clients:
            rows = await measured(engine.url, gate, clients, given)
            found[str(clients)] = {"median, least, most": compared(rows), "runs": rows}
            print(clients, compared(rows), flush=True)
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gate_cost", description=__doc__)
    parser.add_argument("--engine", choices=KINDS, default="vllm")
    parser.add_argument("--clients", type=count, nargs="+", default=list(CLIENTS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--repeats", type=count, default=4)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m bench.gate_cost`."""
    given = parse(argv)
    unwind_on_sigterm()
    found = asyncio.run(run(given))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"engine": given.engine, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
