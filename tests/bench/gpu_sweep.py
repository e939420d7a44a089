"""What launching the attention kernels otherwise would bring on this GPU.

    PYTHONPATH=tests .venv/bin/python -m bench.gpu_sweep [--seconds 100] [--out docs]

Blocks, warps and stages of decode, and rows, blocks, warps and stages of prefill. Several processes
compile them first, as that takes seconds each. Writes gpu-sweep.json.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from bench.gpu_kernels import Point, copy_point, decode_point, matmul_point, prefill_point
from sluice_kernels.triton import decode, prefill

BATCHES = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (1, 32768)]
CHUNKS = [(0, 1024), (0, 2048), (0, 8192), (8192, 2048)]
PROCESSES, REPEATS = 12, 5
_decode_constants, _prefill_constants = decode.decode_constants, prefill.prefill_constants


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to launch a kernel."""

    is_decode: bool
    changes: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """As the report calls it."""
        told = " ".join(f"{key.lower().removeprefix('num_')} {n}" for key, n in self.changes)
        return f"{'decode' if self.is_decode else 'prefill'}: {told or 'as it is'}"

    def use(self) -> None:
        """Launch kernels so from now on."""
        changes = dict(self.changes)
        decode.decode_constants = lambda *of: {**_decode_constants(*of), **changes}  # type: ignore[assignment]
        prefill.prefill_constants = lambda *of: {**_prefill_constants(*of), **changes}  # type: ignore[assignment]
        decode.join_constants.cache_clear()

    def measure(self, copy: Point, matmul: Point, repeats: int) -> Iterator[Point]:
        """Its share of a ceiling at each size."""
        self.use()
        if self.is_decode:
            yield from (decode_point(copy, repeats, [size]) for size in BATCHES)
        else:
            for start, count in CHUNKS:
                yield prefill_point(f"{count} at {start}", matmul, repeats, start, count)


def variants() -> Iterator[Variant]:
    """The present ones first."""
    yield Variant(True, ())
    yield Variant(False, ())
    for block, warps, stages in product((64, 32, 128), (4, 2, 8), (3, 4, 5, 2)):
        yield _variant(True, BLOCK=block, num_warps=warps, num_stages=stages)
    for rows, block, warps, stages in product((128, 64), (64, 128, 32), (8, 4), (3, 4, 2, 5)):
        yield _variant(False, ROWS=rows, BLOCK=block, num_warps=warps, num_stages=stages)


def _variant(is_decode: bool, **changes: int) -> Variant:
    return Variant(is_decode, tuple(changes.items()))


def attempt(variant: Variant, work: Callable[[], list[Point]]) -> list[Point]:
    """What `work` finds; nothing, and why, where it takes too much of a processor."""
    try:
        return work()
    except Exception as error:
        print(f"{variant.name}: {str(error)[:80]}", flush=True)
        return []


def compile_some(some: list[Variant], ceilings: tuple[Point, Point]) -> None:
    """In a process of its own: what it compiles is found on disk by the others."""
    with torch.inference_mode():
        for one in some:
            attempt(one, lambda one=one: [*one.measure(*ceilings, 1)])  # type: ignore[misc]


def compile_all(every: list[Variant], ceilings: tuple[Point, Point], seconds: float) -> None:
    """In several processes, until the time is over."""
    context, end_s = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    parts = [every[at::PROCESSES] for at in range(PROCESSES)]
    processes = [context.Process(target=compile_some, args=(part, ceilings)) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.1, end_s - time.monotonic()))
        process.kill()


def main() -> None:
    """Print and write what each brings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    end_s, every = time.monotonic() + given.seconds, [*variants()]
    found: dict[str, dict[str, float | None]] = {}
    with torch.inference_mode():
        ceilings = copy_point(REPEATS), matmul_point(REPEATS)
        compile_all(every, ceilings, given.seconds / 2)
        for one in every:
            if time.monotonic() > end_s:
                print("no time for the rest", flush=True)
                break
            points = attempt(one, lambda one=one: [*one.measure(*ceilings, REPEATS)])  # type: ignore[misc]
            found[one.name] = {point.name: point.share for point in points}
            shares = "  ".join(f"{point.name}: {point.share or 0:5.1%}" for point in points)
            print(f"{one.name:46} {shares}", flush=True)
            (given.out / "gpu-sweep.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
