"""Fixed caps and the tuner on real workers, over HTTP.

    PYTHONPATH=tests .venv/bin/python -m bench.real_caps --out docs/slo/real.json

Traces of the simulator, and an overload of 1.3 times what a worker does, against a worker with an
88M model on one thread. For each repeat and trace a worker is measured, and its figures decide load
and inter-token target. Clients stream, and take a refusal for an answer. `ours` is the operator's
tuner, told by the operator's scraper what the worker's admin port says, every tick; it begins at
the cap that the worker predicted for itself. `no hold` is the same with a worker that holds no
first token, `before` with the worker of another checkout (`--before`). Each run, a fixed cap's too,
has a fresh worker and a few requests that are not counted, because evidence, step model and lengths
that another contender left would be ours to use. `--cold` leaves these requests out. Missed and
cancelled is what has no answer some seconds after the last arrival. `--resume` goes on with a bench
that was cut.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import aiohttp
import httpx
from bench.peers.checkpoint import CACHE, MODELS, write
from bench.peers.processes import cpu_seconds
from bench.peers.traces import VOCAB_SIZE
from bench.real_picture import real_png
from bench.real_rows import (
    BEFORE,
    CAP,
    LENGTHS,
    NO_HOLD,
    OURS,
    OVERLOAD,
    Row,
    findings,
    in_order,
    itl_target_ms,
    make_row,
    num_early,
    real_trace,
    table,
)
from bench.real_turns import Kept, Setting, add_turns, settings, turns
from bench.serving import NAME, product_of, serving
from integration.worker_process import Worker
from research.generate import TRACES, Lengths
from sluice.bench import caps
from sluice.load import LoadLedger, closed_loop
from sluice.measure.client import COMPLETIONS, Outcome, Shape, request
from sluice.numbers import positive
from sluice.simulate.trace import Request
from sluice_core.contract import TICK_SECONDS, Evidence, RuntimeConfig, RuntimePatch, Slo
from sluice_operator.metrics import Metrics
from sluice_operator.pods.scrape import MAX_OPEN, ScrapeError, Scraper, ScrapeTarget, create_client
from sluice_operator.tuner import CapLimits, Observation, Past, PodView, Targets, decide

MODEL = "88M"
AIM_CAP = 8
"""The inter-token target is the least one for which the worker's rule has this cap hold it."""
LOAD_CAP = 16
"""Loads are shares of what this cap brings: in simulation it then is about the best one, lower ones
let requests wait, and from 32 on gaps break."""
SETTLE_S = 8.0
CAPACITY_S = 16.0
GRACE_S = 10.0
WARM_UP = [Request(at, int(LENGTHS.prompt), int(LENGTHS.output)) for at in range(4)]
"""One a second: not a queue, which would be evidence."""
POD = "worker"
NO_TOKEN = "none"  # an admin port on loopback asks for no bearer
SHAPE = Shape((1, 1), (1, 1), VOCAB_SIZE, NAME)  # lengths are given with each request


@dataclass
class Steered:
    """A worker's admin port, spoken to as the operator does. `path`: caps and when each was set."""

    scraper: Scraper
    target: ScrapeTarget
    began_s: float = 0.0
    path: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, worker: Worker, client: httpx.AsyncClient) -> "Steered":
        """That of `worker`."""
        target = ScrapeTarget(POD, "127.0.0.1", urlsplit(worker.admin_url).port or 0)
        return cls(Scraper(client, Metrics(), asyncio.Semaphore(MAX_OPEN)), target)

    async def seen(self) -> tuple[Evidence, RuntimeConfig, float]:
        """What is held of the worker after one more look, and when it was read."""
        held = (await self.scraper.scrape((self.target,), NO_TOKEN, time.time()))[POD]
        if held.evidence is None or held.config is None or held.seen_s is None:
            raise SystemExit(f"the worker's admin port does not answer: {held.problem}")
        return held.evidence, held.config, held.seen_s

    async def put(self, cap: int | None = None, slo: Slo | None = None) -> None:
        """Open the next epoch; what is not given stays."""
        _, config, _ = await self.seen()
        patch = RuntimePatch(config.epoch + 1, cap or config.cap, slo=slo)
        config = await self.scraper.patch(self.target, NO_TOKEN, patch)
        self.path.append((round(time.time() - self.began_s, 1), config.cap))

    def begin(self) -> None:
        """The first arrival comes now, at the cap that is in force."""
        self.began_s, self.path = time.time(), [(0.0, self.path[-1][1])]

    async def tune(self, targets: Targets) -> None:
        """The operator's passes, one a tick, until cancelled."""
        past, told = Past(), ""
        while True:
            evidence, config, seen_s = await self.seen()
            pod = PodView(POD, True, False, evidence, config, evidence.started_s, seen_s)
            limits = CapLimits(config.ceiling, 1, 1, 1, ceiling_by="User")
            cap, epoch = config.cap, config.epoch
            seen = Observation(time.time(), targets, limits, cap, epoch, 1, (pod,))
            past, decision = decide(past, seen)
            move = decision.cap_move
            if decision.cap != cap or move.reason != told:
                told = move.reason
                print(f"      {cap} -> {decision.cap}: {told}: {move.message}", flush=True)
            if decision.cap != cap:
                try:
                    await self.put(decision.cap)
                except ScrapeError as e:  # the next pass finds the old cap and decides again
                    print(f"      not changed: {e}", flush=True)
            await asyncio.sleep(seen_s + TICK_SECONDS - time.time())


def connections() -> aiohttp.ClientSession:
    """As many as there are requests."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


@dataclass(frozen=True, slots=True)
class Aim:
    """How a worker is measured: so many closed clients after `settle_s` for `capacity_s`, and the
    inter-token target is the least one for which its rule has `cap` hold it, if P99 is `tail` times
    the mean."""

    ttft_ms: float
    tail: float
    clients: int = LOAD_CAP
    cap: int = AIM_CAP
    shape: Shape = SHAPE
    lengths: Lengths = LENGTHS
    settle_s: float = SETTLE_S
    capacity_s: float = CAPACITY_S


async def targets_of(worker: Worker, client: httpx.AsyncClient, aim: Aim) -> Targets:
    """The targets to which a closed loop of clients has led; the worker is told them."""
    admin = Steered.of(worker, client)
    await admin.put(aim.clients)
    await _loop(worker.url, aim, LoadLedger("warm-up"), aim.settle_s)
    model = (await admin.seen())[0].step_model
    if model is None:
        raise SystemExit("the worker has no step model")
    itl_ms = itl_target_ms(model, aim.cap, aim.tail, aim.lengths)
    targets = Targets("99", aim.ttft_ms, itl_ms, None)
    await admin.put(slo=Slo(targets.ttft_ms, targets.itl_ms))
    return targets


async def capacity(url: str, aim: Aim) -> float:
    """Requests/s of a closed loop of clients."""
    ledger, start = LoadLedger("capacity"), time.monotonic()
    await _loop(url, aim, ledger, aim.capacity_s)
    return len(ledger.outcomes) / (time.monotonic() - start)


async def _loop(url: str, aim: Aim, into: LoadLedger, seconds: float) -> None:
    rng = Random(0)
    async with connections() as session:

        def send(ledger: LoadLedger) -> asyncio.Task[None]:
            body = aim.shape.body(rng, aim.lengths.draw(rng))

            async def one() -> None:
                ledger.outcomes.append(await request(session, url + COMPLETIONS, body))

            return asyncio.create_task(one())

        await closed_loop(send, into, aim.clients, seconds)


async def calibrate(worker: Worker, client: httpx.AsyncClient, aim: Aim) -> Setting:
    """What a closed loop of clients gets, under the targets to which a first such loop has led."""
    targets = await targets_of(worker, client, aim)
    return Setting(targets, await capacity(worker.url, aim))


async def replay(
    url: str,
    trace: Sequence[Request],
    seed: int,
    shape: Shape = SHAPE,
    grace_s: float = GRACE_S,
) -> list[Outcome | None]:
    """What came of each request; None of those that were not answered so soon after the last."""
    rng = Random(seed)
    bodies = [shape.body(rng, (one.prompt_tokens, one.max_tokens)) for one in trace]
    async with connections() as session:
        tasks, start = [], time.monotonic()
        for one, body in zip(trace, bodies, strict=True):
            await asyncio.sleep(max(0.0, start + one.t_s - time.monotonic()))
            sent = request(session, url + COMPLETIONS, body, max_retries=0)
            tasks.append(asyncio.create_task(sent))
        done, late = await asyncio.wait(tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [task.result() if task in done else None for task in tasks]


async def measured(
    worker: Worker, replaying: Awaitable[Sequence[Outcome | None]]
) -> tuple[Sequence[Outcome | None], float, float]:
    """What came of it, its seconds, and the CPU-seconds of the worker's processes meanwhile."""
    before_s, start = cpu_seconds(worker.process.pid), time.monotonic()
    outcomes = await replaying
    return outcomes, time.monotonic() - start, cpu_seconds(worker.process.pid) - before_s


async def contend(
    worker: Worker,
    admin: Steered,
    targets: Targets,
    cap: int | None,
    replaying: Awaitable[Sequence[Outcome | None]],
) -> tuple[Sequence[Outcome | None], float, float]:
    """As `measured`, at a fixed `cap`. None: ours, which adopts the cap that the worker predicted,
    as the operator does."""
    await admin.put(cap)
    admin.begin()
    tuning = asyncio.create_task(admin.tune(targets)) if cap is None else None
    done = await measured(worker, replaying)
    if tuning and not tuning.cancel():
        tuning.result()  # it ended by itself: with an error
    return done


def contender(cap: int | None) -> str:
    """The name of one in the rows."""
    return OURS if cap is None else f"{CAP}{cap}"


def cap_of(name: str) -> int | None:
    """The fixed cap of a contender; None: it is tuned."""
    return int(name.removeprefix(CAP)) if name.startswith(CAP) else None


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    client: httpx.AsyncClient
    model: Path
    given: argparse.Namespace

    async def run(self, trace: str, name: str, repeat: int, found: Setting) -> Row:
        """One contender on a fresh worker."""
        seed, targets = self.given.seed + repeat, found.targets
        requests = real_trace(trace, found.per_s, self.given.seconds, seed)
        flags = ["--slo-ttft-ms", str(targets.ttft_ms), "--slo-itl-ms", str(targets.itl_ms)]
        flags += ["--hold-share", "0"] if name == NO_HOLD else []
        before = product_of(self.given.before) if name == BEFORE else None
        with self._worker(max(self.given.caps), *flags, environ=before) as worker:
            if not self.given.cold:
                await replay(worker.url, WARM_UP, seed)
            admin, sent = Steered.of(worker, self.client), replay(worker.url, requests, seed + 1)
            done = await contend(worker, admin, targets, cap_of(name), sent)
        outcomes, took_s, cpu_s = done
        told = (outcomes, targets, took_s, cpu_s, admin.path, found.per_s, num_early(requests))
        return make_row(trace, name, repeat, *told)

    async def setting(self) -> Setting:
        """What a fresh worker does now."""
        with self._worker(max(*self.given.caps, LOAD_CAP)) as worker:
            return await calibrate(worker, self.client, Aim(self.given.ttft_ms, self.given.tail))

    async def per_s(self) -> float:
        """As in `setting`, again."""
        return (await self.setting()).per_s

    def _worker(
        self, ceiling: int, *flags: str, environ: Mapping[str, str] | None = None
    ) -> AbstractContextManager[Worker]:
        given = ("--max-num-seqs", str(ceiling), *flags)
        return serving(*given, model=self.model, environ=environ)


async def measure(given: argparse.Namespace, kept: Kept) -> None:
    """Runs each contender on each trace."""
    names = [*map(contender, given.caps), *given.contenders, *[BEFORE] * bool(given.before)]
    async with create_client() as client:
        bench = Bench(client, write(MODELS[MODEL], given.cache / "models"), given)
        await turns(bench, kept, given.traces, lambda _: names, given.repeats, given.seed)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--caps", type=caps, default=[8, 16, 32], metavar="1,2,4")
    parser.add_argument("--contenders", nargs="*", default=[OURS], choices=(OURS, NO_HOLD))
    parser.add_argument(
        "--traces", nargs="+", default=["steps", "bursts", OVERLOAD], choices=TRACES
    )
    parser.add_argument("--cold", action="store_true", help="no requests before those that count")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of a trace")
    parser.add_argument("--ttft-ms", type=positive, default=2000.0)
    parser.add_argument(
        "--tail", type=float, default=1.25, help="of the target: P99 over mean step"
    )
    add_turns(parser)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the checkpoint is made")
    parser.add_argument("--out", type=Path, default=Path("build/real/real.json"))
    return parser.parse_args(argv)


def main() -> None:
    """Measures, tells the table, and writes --out and the picture beside it."""
    given = parse(sys.argv[1:])
    told = settings(given) | {"model": MODEL, "lengths": asdict(LENGTHS)}
    kept = Kept.of(given.out, told, given.resume)
    asyncio.run(measure(given, kept))
    rows = in_order(kept.rows)
    real_png(rows, given.out.with_suffix(".png"))
    print(f"\n{table(rows)}\n", *findings(rows, max(given.caps)), sep="\n")


if __name__ == "__main__":
    main()
