"""Whether the simulator is the worker: fitted at two caps, compared at others.

    PYTHONPATH=tests nice -n 19 .venv/bin/python -m bench.simulator_fit --out fit.json

The worker's own engine runs the demo's model, real steps of a real forward pass. Its clock is the
CPU time of its thread, and it jumps over idle times; so other load of the machine is not in it.
The streams (a cap and a trace each) take turns of some steps, so that all see the same machine.
Step records at caps 2 and 8 give a, b, c, d, the time between steps and, by how far the run is, the
noise: so the simulated pods too meet the minutes in which the machine was slow. With these the
simulator predicts the other streams, and its quantiles are compared with the measured ones.
"""

import argparse
import json
import platform
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import torch
from bench.speculation import load_model
from research.generate import Lengths
from research.policies import Replay
from sluice.machine import processor
from sluice.simulate.noise import Noise
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.trace import Request
from sluice.simulate.world import World
from sluice_core import sketch
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord, StepTimes, non_negative_fit
from sluice_core.wire import StepReport, Submit, packed
from sluice_operator.tuner import Targets
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler

TARGETS = Targets("99", 1000, 30, None)
NUM_BLOCKS, BLOCK_SIZE, BUDGET = 256, 64, 512
TURN_STEPS = 100
FIT_CAPS = (2, 8)
LOAD, FIT_LOAD = 0.5, 0.9
"""Shares of a full batch's throughput; the fit has to see full batches."""
LENGTHS = Lengths(24, 5)
OTHER = Lengths(24, 5, 0.9)
QUANTILES = (0.5, 0.9, 0.99)
AIMS = {0.5: 0.10, 0.9: 0.10, 0.99: 0.15}
FIT_PASSES = 5
NOISE_PARTS = 200
"""Parts of the run, in each of which the machine is taken to be equally fast."""
STALLED = 2.0
"""A step of over this many times its mean waited for something else; the fit is without those."""


class BusyClock:
    """CPU seconds of this thread while it runs; it stands between the steps, and can jump."""

    def __init__(self) -> None:
        self._held_s = 0.0
        self._since_s: float | None = None

    def __call__(self) -> float:
        if self._since_s is None:
            return self._held_s
        return self._held_s + time.thread_time() - self._since_s

    def run(self) -> None:
        self._since_s = time.thread_time()

    def stop(self) -> None:
        self._held_s, self._since_s = self(), None

    def skip_to(self, now_s: float) -> None:
        self._held_s = max(self._held_s, now_s)


@dataclass
class Stream:
    """One engine under one trace; what came of it."""

    name: str
    cap: int
    trace: Sequence[Request]
    engine: Engine
    clock: BusyClock
    arrivals: deque[tuple[int, Request]] = field(default_factory=deque)
    records: list[StepRecord] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    last_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrivals.extend(enumerate(self.trace))

    @property
    def progress(self) -> float:
        """Share of the requests that have come."""
        return 1 - len(self.arrivals) / len(self.trace)

    @property
    def is_over(self) -> bool:
        return not self.arrivals and not self.engine.has_work

    def turn(self) -> None:
        """A few steps."""
        for _ in range(TURN_STEPS):
            if not self.engine.has_work:
                if not self.arrivals:
                    return
                self.clock.skip_to(self.arrivals[0][1].t_s)
            while self.arrivals and self.arrivals[0][1].t_s <= self.clock():
                self._submit(*self.arrivals.popleft())
            self.clock.run()
            began_s = self.clock()
            report, _ = self.engine.step()
            ended_s = self.clock()
            self.clock.stop()
            assert report is not None
            self._book(report, ended_s, ended_s - began_s)

    def _submit(self, number: int, request: Request) -> None:
        prompt = [(number * 31 + 7 * i * i + i) % 2048 for i in range(request.prompt_tokens)]
        submit = Submit(
            str(number), packed(prompt), request.max_tokens, 0.0, 0, True, [], 0, request.t_s
        )
        refused = self.engine.submit(submit, self.clock())
        assert refused is None, refused

    def _book(self, report: StepReport, ended_s: float, cycle_s: float) -> None:
        step_ms = 1e3 * report.step_s
        kinds = (report.num_decodes, report.num_kv_tokens, report.num_prefill_tokens)
        self.records.append(StepRecord(ended_s, *kinds, step_ms))
        self.between_ms.append(1e3 * cycle_s - step_ms)
        for token in report.tokens:
            arrival_s = self.trace[int(token.request_id)].t_s
            if token.first is not None:
                self.first_ms.append(1e3 * (ended_s - arrival_s))
            else:
                self.gaps_ms.append(1e3 * (ended_s - self.last_s[token.request_id]))
            self.last_s[token.request_id] = ended_s
            if token.finish_reason is not None:
                self.total_ms.append(1e3 * (ended_s - arrival_s))
                del self.last_s[token.request_id]


def make_stream(name: str, model: Decoder, cap: int, trace: Sequence[Request]) -> Stream:
    clock = BusyClock()
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=False),
        EngineLimits(1, cap, BUDGET, TARGETS.itl_ms),
        max_model_len=1024,
        vocab_size=2048,
    )
    runner = Runner(model, NUM_BLOCKS, BLOCK_SIZE, frozenset())
    return Stream(name, cap, trace, Engine(scheduler, runner, StepTimes(), clock), clock)


def poisson(lengths: Lengths, per_s: float, num: int, seed: int) -> list[Request]:
    random, now_s, trace = Random(seed), 0.0, list[Request]()
    for _ in range(num):
        now_s += random.expovariate(per_s)
        prompt, output = lengths.draw(random)
        trace.append(Request(now_s, min(prompt, 800), min(output, 200)))
    return trace


def waves(lengths: Lengths, per_s: float, num: int, seed: int) -> list[Request]:
    """Twenty at once, then silence: another kind of traffic than what was fitted."""
    random = Random(seed)
    trace = []
    for index in range(num):
        prompt, output = lengths.draw(random)
        trace.append(Request(20 / per_s * (index // 20), min(prompt, 800), min(output, 200)))
    return trace


def play(streams: Sequence[Stream]) -> None:
    """All streams to their ends, in turns: who is behind goes on, so that all end together."""
    started_s, told = time.monotonic(), 0.0
    while left := [stream for stream in streams if not stream.is_over]:
        min(left, key=lambda stream: stream.progress).turn()
        if time.monotonic() - told > 30:
            told = time.monotonic()
            done = min(stream.progress for stream in streams)
            print(f"{told - started_s:5.0f} s: {done:.0%}", flush=True)


def capacity(streams: Sequence[Stream], lengths: Lengths, cap: int) -> float:
    """Requests per second of a full batch of `cap`, by a fit on the records of `streams`."""
    params = fitted(streams)
    records = [record for s in streams for record in s.records]
    stalled = sum(r.step_ms for r in records) / sum(predicted_ms(params, r) for r in records)
    context = lengths.prompt + lengths.output / 2
    step_ms = params.step_ms(cap, cap * context, cap * lengths.prompt / lengths.output)
    return 1e3 * cap / (lengths.output * (stalled * step_ms + params.between_ms))


def predicted_ms(params: Params, record: StepRecord) -> float:
    """What `params` say of a step."""
    kinds = record.num_decodes, record.num_kv_tokens, record.num_prefill_tokens
    return params.step_ms(*kinds)


def fit_coefficients(records: Sequence[StepRecord]) -> tuple[float, float, float, float]:
    """a, b, c and d, so that the mean of measured over predicted is 1 for steps that did not stall:
    errors are relative to the prediction, found in some passes. A shape's records count with the
    root of their number."""
    shapes = [(r.num_decodes.bit_length(), r.num_prefill_tokens.bit_length()) for r in records]
    num = Counter(shapes)
    weights = np.array([num[shape] ** -0.5 for shape in shapes])
    kinds = [(1, r.num_decodes, r.num_kv_tokens, r.num_prefill_tokens) for r in records]
    features, step_ms = np.array(kinds, dtype=float), np.array([r.step_ms for r in records])
    found = non_negative_fit(features, step_ms, weights)
    for _ in range(FIT_PASSES):
        predicted = np.maximum(features @ found, 1e-3)
        counts = weights * (step_ms / predicted) ** 2 * (step_ms <= STALLED * predicted)
        found = non_negative_fit(features, step_ms, counts)
    a, b, c, d = found.tolist()
    return a, b, c, d


class Part:
    """One part of the run, by its steps' (ms, ms predicted). `usual`: times as long as predicted.
    What holds a step up adds to it, whatever its length: little to most, much to those that
    stalled, which come by time (`stalls_per_ms` of time predicted)."""

    def __init__(self, steps: Sequence[tuple[float, float]]) -> None:
        self.usual = median([step_ms / mean_ms for step_ms, mean_ms in steps] or [1.0])
        off = [(step_ms - self.usual * mean_ms, mean_ms) for step_ms, mean_ms in steps]
        limit = (STALLED - 1) * self.usual
        self.added_ms = [ms for ms, mean_ms in off if ms <= limit * mean_ms] or [0.0]
        self.stalls_ms = [ms for ms, mean_ms in off if ms > limit * mean_ms]
        self.stalls_per_ms = len(self.stalls_ms) / max(sum(ms for _, ms in off), 1e-9)

    def draw(self, mean_ms: float, random: Random) -> float:
        """The time of a step that is predicted to take `mean_ms`."""
        least_ms = self.usual * mean_ms / STALLED
        step_ms = max(self.usual * mean_ms + random.choice(self.added_ms), least_ms)
        left = mean_ms * self.stalls_per_ms
        while self.stalls_ms and (left := left - random.expovariate(1.0)) > 0:
            step_ms += random.choice(self.stalls_ms)
        return step_ms


class MeasuredNoise(Noise):
    """Draws from the steps that were made when the run was as far."""

    def __init__(self, params: Params, streams: Sequence[Stream], end_s: float) -> None:
        super().__init__(params, 1)
        self._end_s = end_s
        self._random = Random(1)
        steps: list[list[tuple[float, float]]] = [[] for _ in range(NOISE_PARTS)]
        for stream in streams:
            for r in stream.records:
                part = _part(r.at_s, stream.trace[-1].t_s)
                steps[part].append((r.step_ms, predicted_ms(params, r)))
        self._parts = [Part(part) for part in steps]

    def step_ms(self, mean_ms: float, now_s: float) -> float:
        return self._parts[_part(now_s, self._end_s)].draw(mean_ms, self._random)


def _part(now_s: float, end_s: float) -> int:
    return min(int(NOISE_PARTS * now_s / end_s), NOISE_PARTS - 1)


def fitted(streams: Sequence[Stream]) -> Params:
    """The simulator's parameters from step records."""
    a, b, c, d = fit_coefficients([record for stream in streams for record in stream.records])
    between = [value for stream in streams for value in stream.between_ms]
    return Params(
        a=a,
        b=b,
        c=c,
        d=d,
        between_ms=float(np.mean(between)),
        kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
        cold_start_s=0,
        ceiling=64,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=BUDGET,
        prefix_caching=False,
    )


def simulated(params: Params, fits: Sequence[Stream], stream: Stream) -> dict[str, list[float]]:
    """Quantiles of the same stream in the simulator."""
    world = World(
        params, TARGETS, stream.trace, Replay(stream.cap, ()), seed=1, pod_type=SimulatedPod
    )
    world.pods[0].noise = MeasuredNoise(params, fits, stream.trace[-1].t_s)
    world.run()
    jobs = [job for pod in world.pods for job in pod.outcomes()[0]]
    assert len(jobs) == len(stream.trace)
    firsts = [1e3 * (job.first_s - job.t_s) for job in jobs]
    totals = [1e3 * (job.last_s - job.t_s) for job in jobs]
    return {
        "first_token_ms": np.quantile(firsts, QUANTILES).tolist(),
        "gap_ms": [sketch.quantile_ms(world.totals.sketch, q) or 0.0 for q in QUANTILES],
        "end_to_end_ms": np.quantile(totals, QUANTILES).tolist(),
    }


def compared(params: Params, fits: Sequence[Stream], stream: Stream) -> dict[str, Any]:
    measured = {
        "first_token_ms": np.quantile(stream.first_ms, QUANTILES).tolist(),
        "gap_ms": np.quantile(stream.gaps_ms, QUANTILES).tolist(),
        "end_to_end_ms": np.quantile(stream.total_ms, QUANTILES).tolist(),
    }
    predicted = simulated(params, fits, stream)
    errors = {
        name: [p / m - 1 for p, m in zip(predicted[name], measured[name], strict=True)]
        for name in measured
    }
    return {
        "stream": stream.name,
        "cap": stream.cap,
        "requests": len(stream.trace),
        "steps": len(stream.records),
        "mean_decodes": float(np.mean([r.num_decodes for r in stream.records])),
        "measured": measured,
        "simulated": predicted,
        "error": errors,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Measured and simulated, in Markdown."""
    lines = [
        "| stream | | P50 ms | simulated | P90 ms | simulated | P99 ms | simulated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name in row["measured"]:
            cells = [
                f"{m:.2f} | {s:.2f} ({100 * e:+.0f} %{'' if abs(e) <= AIMS[q] else ' !'})"
                for q, m, s, e in zip(
                    QUANTILES,
                    row["measured"][name],
                    row["simulated"][name],
                    row["error"][name],
                    strict=True,
                )
            ]
            lines.append(
                f"| {row['stream']} | {name[:-3].replace('_', ' ')} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Fit, compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--fit-requests", type=int, default=2_500)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("auto")
    pilots = [make_stream("pilot", model, c, poisson(LENGTHS, 50, 300, 9)) for c in FIT_CAPS]
    play(pilots)

    def stream(name: str, cap: int, lengths: Lengths, num: int, seed: int) -> Stream:
        load = FIT_LOAD if name.startswith("fit") else LOAD
        per_s = load * capacity(pilots, lengths, cap)
        make = waves if name.startswith("waves") else poisson
        return make_stream(name, model, cap, make(lengths, per_s, num, seed))

    fits = [stream(f"fit, cap {cap}", cap, LENGTHS, given.fit_requests, cap) for cap in FIT_CAPS]
    others = [stream(f"cap {c}", c, LENGTHS, given.requests, c) for c in (1, 4, 16)]
    others.append(stream("waves of 20, longer tails, cap 8", 8, OTHER, given.requests, 7))
    play([*fits, *others])
    params = fitted(fits)
    rows = [compared(params, fits, one) for one in [*others, *fits]]
    coefficients = {name: getattr(params, name) for name in ("a", "b", "c", "d", "between_ms")}
    print(f"{processor()}, 1 thread, CPU time; ms: {coefficients}")
    print(table(rows))
    if given.out:
        result = {
            "processor": processor(),
            "machine": platform.machine(),
            "clock": "CPU time of the engine's thread",
            "fitted_ms": coefficients,
            "rows": rows,
        }
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
