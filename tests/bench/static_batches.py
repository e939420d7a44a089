"""One by one, static batches and continuous ones on the same prompts, and which to take.

    PYTHONPATH=tests .venv/bin/python -m bench.static_batches --out docs/benchmarks

The demo's model behind six workers of one thread each, which take turns. A static batch of 8 or 32
starts when it is full, or when its first has waited: 100 ms, or 2 s, as good as only when it is
full. 1,000 prompts come all at once, of equal and of mixed lengths, or in bursts with pauses, which
are half of what continuous batches can do. `sluice batch` sends those that come all at once to the
continuous worker. DIR gets `static.md`, `.json` and `.png`.

One by one is so slow that it runs in the first repeat alone. Fewer `--prompts` make a shorter run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
from bench.peers.processes import cpu_seconds
from bench.real_turns import ROOT, commit_of
from bench.serving import NAME, VOCAB_SIZE, serving
from bench.static_page import advice, page, static_png, table
from bench.static_rows import (
    BATCH,
    BLOCK,
    CONTINUOUS,
    ONE,
    Answer,
    Row,
    Timed,
    batch_row,
    bursts,
    padding_share,
    row_of,
)
from integration.worker_process import Worker
from sluice.machine import processor
from sluice.measure.client import COMPLETIONS, Shape, request
from sluice.measure.curve import CurveTally, static
from sluice.measure.endpoint import scrape
from sluice.measure.targets import read_targets
from sluice.numbers import count

CAP, BUDGET, NUM_OPEN = 32, 2048, 256
PROMPTS, REPEATS = 1000, 3
FLAGS = ("--dtype=float32", "--num-gpu-blocks-override=512", f"--block-size={BLOCK}")
EQUAL = Shape((64, 64), (64, 64), VOCAB_SIZE, NAME)
MIXED = Shape((26, 102), (8, 128), VOCAB_SIZE, NAME)
LOAD = 0.5
"""Of the bursts: their part of what continuous batches do with the mixed lengths."""
WHOLE = {"stream": False, "stream_options": None}
"""Fields of a body whose answer comes as one."""
TRACES = ("equal at once", "mixed at once", "mixed in bursts")
WAITS_MS = {"full": 2000, "100 ms": 100}


def flags_of() -> dict[str, tuple[str, ...]]:
    """Each contender's flags of the worker."""
    batches = {
        f"static {size}, {name}": (
            *("--batching-mode=static", f"--static-batch-size={size}"),
            *(f"--static-batch-timeout-ms={wait_ms}", f"--max-num-seqs={size}"),
        )
        for size in (8, CAP)
        for name, wait_ms in WAITS_MS.items()
    }
    return {ONE: ("--max-num-seqs=1",), **batches, CONTINUOUS: (f"--max-num-seqs={CAP}",)}


def contenders(workers: Mapping[str, Worker], name: str) -> dict[str, Worker]:
    """Whom a trace is sent to."""
    is_at_once = name != TRACES[2]
    return {**workers, BATCH: workers[CONTINUOUS]} if is_at_once else dict(workers)


def trace_of(name: str, num: int, per_s: float) -> list[Timed]:
    """Arrivals and lengths, the same in each run. `per_s`: requests/s of the bursts."""
    rng = Random(name)
    shape = EQUAL if name == TRACES[0] else MIXED
    starts = bursts(rng, num, per_s) if name == TRACES[2] else [0.0] * num
    return [Timed(start_s, *shape.lengths(rng)) for start_s in starts]


async def send(
    session: aiohttp.ClientSession, worker: Worker, trace: Sequence[Timed], seed: int
) -> tuple[list[Answer], float]:
    """Answers in the order of the trace, and seconds until the last."""
    rng, slots, start_s = Random(seed), asyncio.Semaphore(NUM_OPEN), time.monotonic()

    async def one(timed: Timed, body: dict[str, object]) -> Answer:
        await asyncio.sleep(start_s + timed.start_s - time.monotonic())
        due_s = start_s + timed.start_s
        url = worker.url + COMPLETIONS
        outcome = await request(session, url, body, max_retries=0, slot=slots, due_s=due_s)
        assert outcome.is_ok, outcome
        return Answer(timed, outcome)

    bodies = [MIXED.body(rng, (one.prompt, one.output)) for one in trace]
    answers = await asyncio.gather(*map(one, trace, bodies))
    return list(answers), time.monotonic() - start_s


async def send_file(worker: Worker, trace: Sequence[Timed], seed: int) -> float:
    """Seconds of `sluice batch` over the same prompts, its own start and end included."""
    rng = Random(seed)
    bodies = [MIXED.body(rng, (one.prompt, one.output)) for one in trace]
    with TemporaryDirectory() as folder:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": {**body, **WHOLE}}
            for i, body in enumerate(bodies)
        ]
        path = Path(folder) / "in.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        start_s = time.monotonic()
        batch = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice", "batch", path, "-o", path.with_name("out.jsonl")),
            *("--url", worker.url, "--admin-url", worker.admin_url),
        )
        assert await batch.wait() == 0
        return time.monotonic() - start_s


async def run(
    session: aiohttp.ClientSession,
    worker: Worker,
    contender: str,
    trace: tuple[str, Sequence[Timed]],
    repeat: int,
) -> Row:
    """One contender on one trace."""
    name, timed = trace
    before = await counters(session, worker)
    was_s = cpu_seconds(worker.engine_pid())
    if contender == BATCH:
        row = batch_row(name, repeat, timed, await send_file(worker, timed, repeat))
    else:
        answers, seconds = await send(session, worker, timed, repeat)
        row = row_of(name, contender, repeat, answers, seconds)
    cpu_s = cpu_seconds(worker.engine_pid()) - was_s
    after = await counters(session, worker)
    made = {kind: after[kind] - before[kind] for kind in after}
    row = replace(row, cpu_s=cpu_s, padding_share=padding_share(made))
    if contender != CONTINUOUS:
        return row
    found = await scrape(session, worker.admin_url, BUDGET)
    assert found is not None
    tally = CurveTally(CAP)
    outcomes, prompts = [a.outcome for a in answers], [a.timed.prompt for a in answers]
    tally.add(outcomes, prompts, seconds, read_targets("ttft=1s"), made["steps"], None)
    return replace(row, formula_gain=static(tally, found.costs)["gain"])


async def counters(session: aiohttp.ClientSession, worker: Worker) -> dict[str, float]:
    """Tokens that the worker's steps have computed so far, by kind; and `steps`."""
    async with session.get(worker.admin_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    found = {"steps": 0.0}
    for line in lines:
        if line.startswith("sluice_step_tokens_total{"):
            found[line.split('kind="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
        if line.startswith("sluice_steps_total{"):
            found["steps"] = float(line.rsplit(" ", 1)[1])
    return found


async def compare(workers: Mapping[str, Worker], num: int, repeats: int) -> list[Row]:
    """All traces and contenders, each repeat in the other order. The first run of each worker,
    short, is not counted."""
    rows: list[Row] = []
    connector, per_s = aiohttp.TCPConnector(limit=0), 1.0
    async with aiohttp.ClientSession(connector=connector) as session:
        for worker in workers.values():
            await send(session, worker, trace_of(TRACES[1], CAP, per_s), -1)
        for repeat in range(repeats):
            for name in TRACES:
                trace = trace_of(name, num, per_s)
                sent_to = contenders(workers, name)
                for contender in list(sent_to)[:: 1 - 2 * (repeat % 2)]:
                    if repeat and contender == ONE:
                        continue
                    row = await run(session, sent_to[contender], contender, (name, trace), repeat)
                    print(row.told, flush=True)
                    rows.append(row)
                    if repeat == 0 and (name, contender) == (TRACES[1], CONTINUOUS):
                        per_s = LOAD * num / row.seconds
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build"), metavar="DIR")
    parser.add_argument("--prompts", type=count, default=PROMPTS, help="of each run; default: 1000")
    parser.add_argument("--repeats", type=count, default=REPEATS, help="default: 3")
    return parser.parse_args()


def main() -> None:
    """Run all, write the files, and print table and advice."""
    given = parse()
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(serving(*FLAGS, *flags)) for name, flags in flags_of().items()
        }
        rows = asyncio.run(compare(workers, given.prompts, given.repeats))
    given.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "commit": commit_of(ROOT),
        "prompts": given.prompts,
        "repeats": given.repeats,
    }
    result = {**settings, "advice": advice(rows), "rows": [asdict(row) for row in rows]}
    (given.out / "static.json").write_text(json.dumps(result, indent=1) + "\n")
    options = "" if given.prompts == PROMPTS else f" --prompts {given.prompts}"
    options += "" if given.repeats == REPEATS else f" --repeats {given.repeats}"
    (given.out / "static.md").write_text(page(settings, rows, options))
    static_png(rows, given.out / "static.png")
    print(f"{table(rows)}\n{result['advice']}")


if __name__ == "__main__":
    main()
