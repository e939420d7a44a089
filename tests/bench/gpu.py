"""What the Triton kernels, the engine and the worker reach on this GPU: `make gpu-check`.

    PYTHONPATH=tests .venv/bin/python -m bench.gpu [--out docs] [--quick] [--only PART ...]

Each part is a process of its own with a deadline, all together take `--limit-s` seconds at most,
and each figure is written when it is found. `checks`: kernels against their torch references, in
bfloat16. `engine`: whole steps of an 8B-shaped model of random weights. `attention`: the attention
kernels. `families`: a small model of each family beside transformers. `memory`: the memory plan
beside what was measured. `worker`: the 8B over HTTP at fixed caps and under the tuner. `products`,
`small`: what else a step is made of. `law`, only where asked for: the tuner from cold beside fixed
settings, at three loads and two targets. Shares are of two ceilings, which each part measures: the
bandwidth of a copy (bytes read and written) and a large matrix product. Times are medians of
repeats, with the smallest and the largest; a decode kernel goes over many layers' caches, more than
the GPU's own cache holds. Writes gpu.json, gpu-measured.md and pictures; exits 1 where there is no
GPU, or something is wrong or failed. `--rehearse` runs all of it small on a CPU.
"""

import argparse
import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, prod
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import triton
from bench.gpu_engine import BATCHES, engine_jobs
from bench.gpu_kernels import (
    REHEARSE,
    Batch,
    Job,
    Point,
    checks,
    copy_point,
    decode_jobs,
    decode_name,
    matmul_point,
    prefill_jobs,
    prefill_name,
)
from bench.gpu_memory import IN_USE, Bytes, measured_memory
from bench.gpu_parts import product_jobs, small_jobs
from bench.real_rows import Row, cold_verdicts, findings, line, models, table

Found = TypeVar("Found")
WORST_ERROR = 0.01
WORST_MEMORY_ERROR = 0.03
DECODES: list[Batch] = [
    *([size] for size in ((1, 1024), (8, 1024), (32, 1024), (32, 4096), (128, 1024), (1, 32768))),
    [(1, 32768), (63, 1024)],
]
PREFILLS = [(0, 1024), (0, 2048), (0, 8192), (8192, 2048), (32768, 64)]
FULL_TOKENS = 32 * 1024
"""Tokens that decoding must read to be as fast as a copy: less is over before all of the GPU has
begun. A batch whose sequences differ has no aim, nor has a chunk that makes few tiles."""
AIMS = {decode_name(b): 0.8 for b in DECODES if len(b) == 1 and prod(b[0]) >= FULL_TOKENS}
AIMS |= {prefill_name(*size): 0.5 for size in PREFILLS if size[1] >= 1024}
AIMS |= {"batch 1": 0.65, "batch 32": 0.70}
PARTS = {
    "checks": 60,
    "engine": 100,
    "attention": 60,
    "memory": 60,
    "worker": 230,
    "families": 75,
    "products": 40,
    "small": 40,
    "law": 470,
}
"""Each part's deadline in seconds, the most important first."""
ASKED = ("law",)
"""Parts that take all the time there is, and run only where they are asked for."""
LIMIT_S = 480.0
END_S = 15.0
"""Before a part's deadline it begins nothing, because its start and end take time too."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A point that was not measured, or a part that was not done."""

    name: str
    error: str


@dataclass(slots=True)
class Results:
    """What was found on `device` so far; errors: each kernel's or model's distance from its
    reference, None where it is no number."""

    device: str
    torch: str = str(torch.__version__)
    triton: str = triton.__version__
    errors: dict[str, float | None] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    memory: list[Bytes] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    law: list[Row] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """What makes this a failure."""
        wrong = [name for name, error in self.errors.items() if is_wrong(error)]
        wrong += [b.name for b in self.memory if not abs(self.error_of(b)) <= WORST_MEMORY_ERROR]
        return wrong + [failed.name for failed in self.failed]

    def error_of(self, one: Bytes) -> float:
        """Of the plan of one class, as a share of all that was measured."""
        whole = sum(b.measured for b in self.memory if b.name != IN_USE)
        return (one.planned - one.measured) / whole

    def add(self, other: "Results") -> None:
        """What another part has found; the ceilings are kept once."""
        known = {point.name for point in self.points}
        self.errors |= other.errors
        self.points += [point for point in other.points if point.name not in known]
        self.memory += other.memory
        self.rows += other.rows
        self.law += other.law
        self.failed += other.failed


def is_wrong(error: float | None) -> bool:
    """Whether something is too far from its reference; what is no number is."""
    return error is None or not error < WORST_ERROR


# One part


@dataclass(frozen=True, slots=True)
class Part:
    """Fills `results`, and tells and keeps each thing as it is found; `limit_s`: its deadline."""

    results: Results
    repeats: int
    out: Path
    limit_s: float = LIMIT_S

    def measure(self, name: str) -> None:
        """The part `name` of PARTS."""
        if name == "checks":
            self._check(checks())
        elif name == "families":
            from bench.gpu_families import family_checks  # transformers takes seconds to import

            self._check(family_checks())
        elif name == "memory":
            self._attempt("memory", self._memory)
        elif name == "worker":
            self._attempt("worker", self._load)
        elif name == "law":
            self._attempt("law", self._law)
        else:
            self._points(name)

    def _attempt(self, name: str, work: Callable[[], Found]) -> Found | None:
        """What `work` finds; why it finds nothing is kept. What the work before left is free."""
        try:
            gc.collect()  # a graph and its pool may be part of a cycle
            torch.cuda.empty_cache()
            return work()
        except Exception as error:  # of any kind: all else is worth measuring still
            traceback.print_exc()
            told = str(error).strip().partition("\n")[0]
            self.results.failed.append(Failed(name, f"{type(error).__name__}: {told}"))
            print(f"{name:45} FAILED: {type(error).__name__}: {told}", flush=True)
            write_json(self.results, self.out)
            return None

    def _check(self, found: Iterator[tuple[str, Callable[[], float]]]) -> None:
        for name, check in found:
            error = self._attempt(name, check)
            if error is not None:
                known = error if isfinite(error) else None
                self.results.errors[name] = known
                print(f"{name:45} {error:.5f}{'  WRONG' * is_wrong(known)}", flush=True)
                write_json(self.results, self.out)

    def _points(self, name: str) -> None:
        copy = self._keep("copy", partial(copy_point, self.repeats))
        matmul = self._keep("matmul", partial(matmul_point, self.repeats))
        if copy is not None and matmul is not None:
            for told, job in self._jobs(name, copy, matmul):
                self._keep(told, job)

    def _jobs(self, part: str, copy: Point, matmul: Point) -> Iterator[Job]:
        if part == "attention":
            yield from decode_jobs(copy, self.repeats, DECODES)
            yield from prefill_jobs(matmul, self.repeats, PREFILLS)
        elif part == "products":
            yield from product_jobs(copy, self.repeats)
        elif part == "small":
            yield from small_jobs(self.repeats)
        else:
            yield from engine_jobs(copy, matmul, self.repeats)

    def _keep(self, name: str, job: Callable[[], Point]) -> Point | None:
        point = self._attempt(name, job)
        if point is not None:
            self.results.points.append(point)
            print(told(point), flush=True)
            write_json(self.results, self.out)
        return point

    def _memory(self) -> None:
        self.results.memory, took_s = measured_memory()
        print(f"a worker's start takes {took_s:.1f} s", flush=True)
        for one in self.results.memory:
            print(memory_line(one, self.results.error_of(one)), flush=True)
        write_json(self.results, self.out)

    def _load(self) -> None:
        from bench.gpu_worker import measured_load

        def keep(row: Row) -> None:
            self.results.rows.append(row)
            print(line(row), flush=True)
            write_json(self.results, self.out)

        asyncio.run(measured_load(self.repeats <= 5, keep))

    def _law(self) -> None:
        from bench.gpu_law import measured_law

        def keep(row: Row) -> None:
            self.results.law.append(row)
            print(line(row), flush=True)
            write_json(self.results, self.out)

        asyncio.run(measured_law(time.monotonic() + self.limit_s - END_S, keep))


def device_name() -> str:
    if REHEARSE in os.environ:
        return "a rehearsal, which measures nothing"
    return torch.cuda.get_device_name()


# All of them


def check_all(parts: Sequence[str], given: argparse.Namespace) -> Results:
    """Each part as a process, until the time is over."""
    results, end_s = Results(device_name()), time.monotonic() + given.limit_s
    for part in parts:
        patience = 5 if given.rehearse else 1
        seconds = min(patience * PARTS[part], end_s - time.monotonic())
        print(f"== {part}: at most {seconds:.0f} s", flush=True)
        if seconds > 0:
            with tempfile.TemporaryDirectory() as folder:
                found, why = run_part(part, seconds, given.quick, Path(folder))
        else:
            found, why = None, "no time was left"
        if found is not None:
            results.add(found)
        if why:
            results.failed.append(Failed(part, why))
            print(f"{part} FAILED: {why}", flush=True)
        write_json(results, given.out)
    return results


def run_part(part: str, seconds: float, quick: bool, out: Path) -> tuple[Results | None, str]:
    """What it found in time, and why it did not end well, if so."""
    command = [sys.executable, "-m", "bench.gpu", "--here", "--only", part, "--out", str(out)]
    command += ["--limit-s", str(seconds), *["--quick"] * quick]
    process, why = subprocess.Popen(command, start_new_session=True), ""
    try:
        status = process.wait(seconds)
        why = f"its process ended with {status}" if status not in (0, 1) else ""
    except subprocess.TimeoutExpired:
        why = f"it was not done after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):  # a worker that it left, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    path = out / "gpu.json"
    found = msgspec.json.decode(path.read_bytes(), type=Results) if path.exists() else None
    return found, why


# The report


def told(point: Point) -> str:
    """One line, and one for each kernel that was looked at."""
    share = "" if point.share is None else f"  {point.share:6.1%} of its ceiling"
    times = point.time_ms
    line = (
        f"{point.name:28} {point.rate:9.2f} {point.unit:8}{share}  "
        f"({times.median:.3f} ms, {times.smallest:.3f} .. {times.largest:.3f})"
    )
    kernels = (f"  {k.time_us:9.1f} us {k.calls:5} x {k.name[:80]}" for k in point.kernels)
    return "\n".join([line, *kernels])


def memory_line(one: Bytes, error: float) -> str:
    """Plan, measurement and error."""
    sizes = f"{one.planned / 2**30:8.3f} GiB planned, {one.measured / 2**30:8.3f} measured"
    return f"{one.name:12} {sizes}  {error:+.1%}"


def write_json(results: Results, out: Path) -> None:
    """gpu.json in the directory `out`."""
    found = msgspec.json.format(msgspec.json.encode(results), indent=1)
    (out / "gpu.json").write_bytes(found + b"\n")


def growth(points: Sequence[Point]) -> list[tuple[int, float, float]]:
    """Batch, tokens a second and milliseconds of a step, of each batch that was measured."""
    by_name = {point.name: point for point in points}
    found = [(batch, by_name.get(f"batch {batch}")) for batch in BATCHES]
    return [(batch, one.rate, one.time_ms.median) for batch, one in found if one is not None]


def page(results: Results) -> str:
    """The same as tables: gpu-measured.md."""
    versions = f"torch {results.torch}, Triton {results.triton}"
    lines = [
        f"# Measured on {results.device}",
        "",
        f"By `make gpu-check` with {versions}; [gpu.md](gpu.md) explains the points.",
        "",
        "| point | rate | of its ceiling | median ms | smallest | largest |",
        "|---|---|---|---|---|---|",
        *(row(point) for point in results.points),
    ]
    if curve := growth(results.points):
        first_ms = curve[0][2]
        lines += ["", "| sequences | tokens/s | a step, ms | of the first |", "|---|---|---|---|"]
        lines += [f"| {n} | {r:,.0f} | {ms:.2f} | {ms / first_ms:.2f} |" for n, r, ms in curve]
    if results.memory:
        lines += [
            "",
            "| memory | planned GiB | measured GiB | error, of all |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {b.name} | {b.planned / 2**30:.3f} | {b.measured / 2**30:.3f} "
            f"| {results.error_of(b):+.1%} |"
            for b in results.memory
        ]
    if results.rows:
        lines += ["", table(results.rows)]
    if results.law:
        told = [*cold_verdicts(results.law), *findings(results.law), *models(results.law)]
        lines += ["", table(results.law), "", *(f"- {sentence}" for sentence in told)]
    for point in results.points:
        if point.kernels:
            lines += ["", f"## {point.name}", "| kernel | calls | us |", "|---|---|---|"]
            lines += [f"| `{k.name[:100]}` | {k.calls} | {k.time_us:.1f} |" for k in point.kernels]
    lines += ["", "| kernel or model | distance from its reference |", "|---|---|"]
    for name, error in results.errors.items():
        lines.append(f"| {name} | {'not finite' if error is None else f'{error:.5f}'} |")
    if results.failed:
        lines += ["", "| failed | why |", "|---|---|"]
        lines += [f"| {one.name} | {one.error.replace('|', '/')} |" for one in results.failed]
    return "\n".join(lines) + "\n"


def row(point: Point) -> str:
    times, share = point.time_ms, "" if point.share is None else f"{point.share:.1%}"
    return (
        f"| {point.name} | {point.rate:,.2f} {point.unit} | {share} | {times.median:.3f} "
        f"| {times.smallest:.3f} | {times.largest:.3f} |"
    )


def plot(points: Sequence[Point], device: str, path: Path) -> None:
    """Shares of the ceilings as bars, with the aims as lines; and what batches bring and take."""
    from matplotlib.figure import Figure

    shown = [point for point in points if point.share is not None]
    figure = Figure(figsize=(9, 0.3 * len(shown) + 4.5), layout="constrained")
    heights = (0.3 * len(shown) + 1, 3.2)
    axes, curve = figure.subplots(2, 1, height_ratios=heights)
    shares = [100 * (point.share or 0.0) for point in shown]
    bars = axes.barh([point.name for point in shown], shares, color="#3b7ea1")
    axes.bar_label(bars, [f"{p.rate:,.1f} {p.unit}" for p in shown], padding=3, fontsize=8)
    for at, point in enumerate(shown):
        aim = AIMS.get(point.name)
        if aim is not None:
            axes.vlines(100 * aim, at - 0.4, at + 0.4, color="#c0392b")
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("% of the measured copy bandwidth, or of the matrix product (prefill)")
    axes.set_title(
        f"{device}: kernels and an 8B-shaped engine; red: the least aimed at", fontsize=10
    )
    if found := growth(points):
        batches, rates, steps = zip(*found, strict=True)
        curve.plot(batches, rates, "o-", color="#3b7ea1")
        curve.set_xscale("log", base=2)
        curve.set_xticks(batches, [str(batch) for batch in batches])
        curve.set_xlabel("sequences of 1,024 tokens")
        curve.set_ylabel("tokens/s", color="#3b7ea1")
        beside = curve.twinx()
        beside.plot(batches, steps, "s--", color="#c0392b")
        beside.set_ylim(0)
        beside.set_ylabel("a step, ms", color="#c0392b")
    figure.savefig(path, dpi=120)


def write_report(results: Results, out: Path) -> None:
    """gpu.json, gpu-measured.md and, where there is matplotlib, the pictures."""
    write_json(results, out)
    (out / "gpu-measured.md").write_text(page(results))
    try:
        plot(results.points, results.device, out / "gpu.png")
        if results.rows:
            from bench.real_picture import real_png

            real_png(results.rows, out / "gpu-caps.png")
        if results.law:
            from bench.real_picture import real_png

            real_png(results.law, out / "gpu-law.png")
    except ImportError as error:
        print(f"no picture: {error}")


def main() -> int:
    """Print, write the report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 20")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts together")
    parser.add_argument("--rehearse", action="store_true", help="small and without a GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parts = " ".join(PARTS)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, metavar="PART", help=f"of {parts}",
        default=[part for part in PARTS if part not in ASKED],
    )  # fmt: skip
    given = parser.parse_args()
    if given.rehearse:
        os.environ |= {REHEARSE: "1", "TRITON_INTERPRET": "1"}
    if not torch.cuda.is_available() and REHEARSE not in os.environ:
        print("gpu-check: torch finds no CUDA GPU on this machine, so nothing was measured.")
        return 1
    if given.here:
        results = Results(device_name())
        with torch.inference_mode():
            repeats = 5 if given.quick else 20
            Part(results, repeats, given.out, given.limit_s).measure(given.only[0])
        return int(bool(results.wrong))
    results = Results(device_name())
    print(f"{results.device}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    try:
        results = check_all(given.only, given)
    finally:
        write_report(results, given.out)
    if wrong := results.wrong:
        print(f"wrong or failed: {', '.join(wrong)}")
    return int(bool(results.wrong))


if __name__ == "__main__":
    sys.exit(main())
