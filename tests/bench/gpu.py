"""What the Triton kernels and the GPU's engine reach on this GPU: `make bench-gpu`.

    PYTHONPATH=tests .venv/bin/python -m bench.gpu [--out docs] [--quick] [--only PART ...]

First the kernels against their torch references, in bfloat16. Then two ceilings, measured here: the
bandwidth of a copy (bytes read and written) and a large matrix product. Then the attention kernels
and the model's products as shares of them, the small kernels, and whole engine steps of an
8B-shaped model of random weights: scheduler, CUDA graphs, sampling and reports included, HTTP not.
Times are medians of repeats, with the smallest and the largest; a decode kernel goes over many
layers' caches, more than the GPU's own cache holds. A point that fails says why, and the next one
follows. Writes gpu.json after each point, at the end gpu-measured.md and gpu.png; exits 1 where
there is no GPU, a kernel is wrong or a point failed.
"""

import argparse
import gc
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import triton
from bench.gpu_engine import engine_jobs
from bench.gpu_kernels import (
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
from bench.gpu_parts import product_jobs, small_jobs

Found = TypeVar("Found")
WORST_ERROR = 0.01
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
PARTS = ("checks", "decode", "prefill", "products", "small", "engine")


@dataclass(frozen=True, slots=True)
class Failed:
    """A point that was not measured."""

    name: str
    error: str


@dataclass(slots=True)
class Results:
    """What was found on `device` so far; errors: each kernel's distance from its reference."""

    device: str
    errors: dict[str, float | Failed] = field(default_factory=dict)
    points: list[Point | Failed] = field(default_factory=list)

    @property
    def measured(self) -> list[Point]:
        return [point for point in self.points if isinstance(point, Point)]

    @property
    def wrong(self) -> list[str]:
        """What makes this a failure."""
        wrong = [name for name, error in self.errors.items() if is_wrong(error)]
        return wrong + [point.name for point in self.points if isinstance(point, Failed)]


def is_wrong(error: float | Failed) -> bool:
    """Whether a kernel is too far from its reference; what is no number is."""
    return isinstance(error, Failed) or not error < WORST_ERROR


def attempt(name: str, work: Callable[[], Found]) -> Found | Failed:
    """What `work` finds, or why it finds nothing. What the work before left is free by then."""
    try:
        gc.collect()  # a graph and its pool may be part of a cycle
        torch.cuda.empty_cache()
        return work()
    except Exception as error:  # of any kind: all else is worth measuring still
        told = str(error).strip().partition("\n")[0]
        return Failed(name, f"{type(error).__name__}: {told}")


# Measuring


def ceilings(repeats: int) -> tuple[Point | Failed, Point | Failed]:
    """Of memory and of products."""
    copy = attempt("copy", lambda: copy_point(repeats))
    return copy, attempt("matmul", lambda: matmul_point(repeats))


def jobs(copy: Point, matmul: Point, repeats: int, parts: Collection[str]) -> Iterator[Job]:
    """All points of `parts` behind the ceilings."""
    if "decode" in parts:
        yield from decode_jobs(copy, repeats, DECODES)
    if "prefill" in parts:
        yield from prefill_jobs(matmul, repeats, PREFILLS)
    if "products" in parts:
        yield from product_jobs(copy, repeats)
    if "small" in parts:
        yield from small_jobs(repeats)
    if "engine" in parts:
        yield from engine_jobs(copy, repeats)


def measure(results: Results, parts: Collection[str], repeats: int, out: Path) -> None:
    """Fill `results`, and tell and keep each thing as it is found."""
    for name, check in checks() if "checks" in parts else ():
        results.errors[name] = error = attempt(name, check)
        distance = error.error if isinstance(error, Failed) else f"{error:.5f}"
        print(f"{name:45} {distance}{'  WRONG' * is_wrong(error)}", flush=True)

    def keep(point: Point | Failed) -> None:
        results.points.append(point)
        print(told(point), flush=True)
        write_json(results, out)

    copy, matmul = ceilings(repeats)
    keep(copy)
    keep(matmul)
    if isinstance(copy, Failed) or isinstance(matmul, Failed):
        return
    for name, job in jobs(copy, matmul, repeats, parts):
        keep(attempt(name, job))


# The report


def told(point: Point | Failed) -> str:
    """One line, and one for each kernel that was looked at."""
    if isinstance(point, Failed):
        return f"{point.name:28} FAILED: {point.error}"
    share = "" if point.share is None else f"  {point.share:6.1%} of its ceiling"
    times = point.time_ms
    line = (
        f"{point.name:28} {point.rate:9.2f} {point.unit:8}{share}  "
        f"({times.median:.3f} ms, {times.smallest:.3f} .. {times.largest:.3f})"
    )
    kernels = (f"  {k.time_us:9.1f} us {k.calls:5} x {k.name[:80]}" for k in point.kernels)
    return "\n".join([line, *kernels])


def write_json(results: Results, out: Path) -> None:
    """gpu.json in the directory `out`. Where a distance is no number it is null."""
    distances = {
        name: asdict(error)
        if isinstance(error, Failed)
        else error
        if math.isfinite(error)
        else None
        for name, error in results.errors.items()
    }
    result = {
        "device": results.device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "errors": distances,
        "points": [asdict(point) for point in results.points],
    }
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")


def page(results: Results) -> str:
    """The same as tables: gpu-measured.md."""
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    rows = [row(point) for point in results.points]
    lines = [
        f"# Measured on {results.device}",
        "",
        f"By `make bench-gpu` with {versions}; what the points are says [gpu.md](gpu.md).",
        "",
        "| point | rate | of its ceiling | median ms | smallest | largest |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    for point in results.measured:
        if point.kernels:
            lines += ["", f"## {point.name}", "| kernel | calls | us |", "|---|---|---|"]
            lines += [f"| `{k.name[:100]}` | {k.calls} | {k.time_us:.1f} |" for k in point.kernels]
    lines += ["", "| kernel | distance from its reference |", "|---|---|"]
    for name, error in results.errors.items():
        lines.append(f"| {name} | {error.error if isinstance(error, Failed) else f'{error:.5f}'} |")
    return "\n".join(lines) + "\n"


def row(point: Point | Failed) -> str:
    if isinstance(point, Failed):
        return f"| {point.name} | failed: {point.error.replace('|', '/')} | | | | |"
    times, share = point.time_ms, "" if point.share is None else f"{point.share:.1%}"
    return (
        f"| {point.name} | {point.rate:,.2f} {point.unit} | {share} | {times.median:.3f} "
        f"| {times.smallest:.3f} | {times.largest:.3f} |"
    )


def plot(points: list[Point], device: str, path: Path) -> None:
    """Shares of the ceilings as bars, with the aims as lines."""
    from matplotlib.figure import Figure

    shown = [point for point in points if point.share is not None]
    figure = Figure(figsize=(9, 0.4 * len(shown) + 1.5), layout="constrained")
    axes = figure.add_subplot()
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
    figure.savefig(path, dpi=120)


def write_report(results: Results, out: Path) -> None:
    """gpu.json, gpu-measured.md and, where there is matplotlib, gpu.png in the directory `out`."""
    write_json(results, out)
    (out / "gpu-measured.md").write_text(page(results))
    try:
        plot(results.measured, results.device, out / "gpu.png")
    except ImportError as error:
        print(f"no gpu.png: {error}")


def main() -> int:
    """Print, write the report; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 20")
    parts = " ".join(PARTS)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {parts}"
    )
    given = parser.parse_args()
    out: Path = given.out
    if not torch.cuda.is_available():
        print("bench-gpu: torch finds no CUDA GPU on this machine, so nothing was measured.")
        return 1
    results = Results(torch.cuda.get_device_name())
    print(f"{results.device}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    with torch.inference_mode():
        try:
            measure(results, given.only, 5 if given.quick else 20, out)
        finally:  # what was measured is kept, whatever stops the rest
            write_report(results, out)
    growth = {point.name: point.time_ms.median for point in results.measured}
    if {"batch 1", "batch 32"} <= growth.keys():
        print(f"32 sequences take {growth['batch 32'] / growth['batch 1']:.2f} x the time of one")
    return int(bool(results.wrong))


if __name__ == "__main__":
    sys.exit(main())
