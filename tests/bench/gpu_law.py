"""The law and the tuner from cold on this GPU, beside fixed settings, for `bench.gpu`.

A worker with an 8B of random weights is measured once. Each run then has a fresh worker, and no
request comes before those that count. Bursts come every two seconds. First tokens are due in one
second. A run is not begun where the time that is left may not be enough: the cells and contenders
that tell most come first.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx
from bench.gpu_kernels import REHEARSED
from bench.gpu_memory import written_model
from bench.gpu_worker import AIM, GRACE_S, LENGTHS, SHAPE, tell_steps, worker_of
from bench.hard_loads import bursts
from bench.real_caps import Steered, capacity, contend, replay
from bench.real_rows import CAP, OURS, Row, make_row, num_early
from sluice.simulate.trace import Request
from sluice_operator.pods.scrape import create_client
from sluice_operator.tuner import Targets

TTFT_MS, EVERY_S = 1000.0, 2.0
RUN_S = 4.0 if REHEARSED else 30.0
FIXED = 8 if REHEARSED else 64
LAW, WHOLE = f"{CAP}{FIXED}", f"{CAP}{FIXED}, whole chunks"
CONTENDERS = (OURS, LAW, WHOLE)
"""`whole chunks`: the worker is told no target of gaps."""


class Cell(NamedTuple):
    """A share of the capacity, and the target of gaps."""

    load: float
    itl_ms: float

    def __str__(self) -> str:
        return f"{self.load:g} of capacity, {self.itl_ms:g} ms"


CELLS = [Cell(0.6, 20.0), Cell(0.9, 50.0), Cell(0.9, 20.0), Cell(0.2, 20.0), Cell(0.6, 50.0),
         Cell(0.2, 50.0)]  # fmt: skip
"""The most important first."""


async def measured_law(end_s: float, keep: Callable[[Row], None]) -> None:
    """Each contender in each cell, until `end_s` on the monotonic clock; `keep` is given each run
    at once."""
    async with create_client() as client:
        with written_model() as path:
            per_s = await _capacity(path, client)
            print(f"{per_s:.1f} requests/s at {AIM.clients} clients", flush=True)
            longest_s = 0.0
            for cell, name in product(CELLS, CONTENDERS):
                began_s = time.monotonic()
                if began_s + longest_s > end_s:
                    print(f"{cell}, {name} and what follows: no time was left", flush=True)
                    return
                keep(await run(path, client, cell, name, per_s))
                longest_s = max(longest_s, time.monotonic() - began_s)


async def _capacity(path: Path, client: httpx.AsyncClient) -> float:
    """Requests/s of a closed loop, of a worker without targets that has had such a loop before."""
    with worker_of(path) as worker:
        await Steered.of(worker, client).put(AIM.clients)
        await capacity(worker.url, replace(AIM, capacity_s=AIM.settle_s))
        return await capacity(worker.url, AIM)


async def run(path: Path, client: httpx.AsyncClient, cell: Cell, name: str, per_s: float) -> Row:
    """One contender from cold."""
    targets, requests = Targets("99", TTFT_MS, cell.itl_ms, None), made(cell, per_s)
    flags = ["--slo-ttft-ms", str(TTFT_MS)]
    flags += ["--slo-itl-ms", str(cell.itl_ms)] if name != WHOLE else []
    with worker_of(path, *flags) as worker:
        admin, sent = Steered.of(worker, client), replay(worker.url, requests, 1, SHAPE, GRACE_S)
        profile = (await admin.seen())[0].step_model
        cap = None if name == OURS else FIXED
        outcomes, took_s, cpu_s = await contend(worker, admin, targets, cap, sent)
        if name == OURS:
            await tell_steps(admin)
        fitted = (await admin.seen())[0].step_model
    told = (outcomes, targets, took_s, cpu_s, admin.path, cell.load * per_s, num_early(requests))
    return replace(make_row(str(cell), name, 0, *told), profile=profile, fitted=fitted)


def made(cell: Cell, per_s: float) -> list[Request]:
    """What all contenders of a cell meet."""
    size = max(1, round(cell.load * per_s * EVERY_S))
    return bursts(size, EVERY_S, RUN_S, LENGTHS.draw)(Random(1))
