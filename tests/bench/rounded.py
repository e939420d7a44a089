"""What it is worth to round a step's rows where oneDNN multiplies: linear layers of an 88 M model.

    PYTHONPATH=tests .venv/bin/python -m bench.rounded --dtype bfloat16

Steps of 1 to `--largest` rows, in processes of their own, in turns: rounded or not, with few of
oneDNN's products kept or many. The first quarter of the steps is not counted.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

from sluice.measure.client import quantile
from sluice_worker.base.resources import PRODUCT_CACHES

WAYS = (("as they are", 128), ("as they are", 1024), ("rounded", 128), ("rounded", 256))
HIDDEN, INTERMEDIATE, QKV, LAYERS = 768, 2048, 1280, 12
STEPS, SMALL = 400, 32


def measure(dtype: str, is_rounded: bool, largest: int) -> dict[str, float | None]:
    """Total, P99 of small and of large steps in ms, and the most memory in MB."""
    import torch
    from sluice_kernels.linear import packed_projection, rounded_rows

    sizes = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    layers = [
        packed_projection(torch.randn(size, dtype=getattr(torch, dtype)), None)
        for _ in range(LAYERS)
        for size in sizes
    ]
    rng = random.Random(1)
    took: list[tuple[int, float]] = []
    with torch.inference_mode():
        for _ in range(STEPS):
            num = rng.randint(1, SMALL) if rng.random() < 0.6 else rng.randint(SMALL, largest)
            rows = rounded_rows(num) if is_rounded else num
            given = {
                width: torch.randn(rows, width).to(getattr(torch, dtype)) for _, width in sizes
            }
            begin = time.perf_counter()
            for layer, (_, width) in zip(layers, sizes * LAYERS, strict=True):
                layer(given[width])
            took.append((num, 1000 * (time.perf_counter() - begin)))
    counted = took[STEPS // 4 :]
    return {
        "total_ms": sum(ms for _, ms in counted),
        "small_p99_ms": quantile([ms for num, ms in counted if num <= SMALL], 0.99),
        "large_p99_ms": quantile([ms for num, ms in counted if num > SMALL], 0.99),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """All ways in turns; a table of medians, least and most."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--largest", type=int, default=300, help="rows of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", choices=("rounded", "as they are"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure(args.dtype, args.one == "rounded", args.largest)))
        return 0
    found: dict[tuple[str, int], list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(args.repeats):
        for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
            environ = os.environ | dict.fromkeys(PRODUCT_CACHES, str(way[1]))
            flags = ["--dtype", args.dtype, "--largest", str(args.largest), "--one", way[0]]
            command = [sys.executable, "-m", "bench.rounded", *flags]
            found[way].append(json.loads(subprocess.check_output(command, env=environ)))
            print(f"{repeat + 1} of {args.repeats}: {way}", file=sys.stderr, flush=True)
    names = list(found[WAYS[0]][0])
    print(f"| rows | kept | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    for (rows, kept), runs in found.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs]
            cells.append(f"{median(values):.0f} ({min(values):.0f} .. {max(values):.0f})")
        print(f"| {rows} | {kept} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
