"""Linear layers of the C++ kernels beside oneDNN's, packed: the four of an 88 M Llama's layer.

    PYTHONPATH=tests .venv/bin/python -m bench.linear

A round multiplies the weights of twelve layers by the same rows, once by each, so that no weight
comes from a cache that a model of this size would not find it in. Ratios are of a round, of all
four shapes together; threads, and how they wait, are as in a worker.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence

from sluice_worker.base.resources import Resources
from sluice_worker.engine.process import set_threads

set_threads(Resources().num_threads())

import torch  # noqa: E402 - reads the settings above
from bench.environment import as_engine  # noqa: E402
from sluice.machine import processor  # noqa: E402
from sluice_kernels.choose import Quantization, choose  # noqa: E402
from sluice_kernels.cpu.kernels import CppKernels  # noqa: E402
from sluice_kernels.cpu.panels import PanelLinear  # noqa: E402
from sluice_kernels.int8 import onednn_int8  # noqa: E402
from sluice_kernels.interface import Projection  # noqa: E402
from sluice_kernels.linear import packed_projection  # noqa: E402

SHAPES = ((4096, 768), (768, 2048), (1280, 768), (768, 768))
LAYERS = 12
ROWS = (1, 8, 16, 32, 64, 128, 512)


def layers(kernels: CppKernels, narrow: bool) -> dict[str, list[list[Projection]]]:
    """Of each maker, for each shape, the layers."""
    theirs = onednn_int8(kernels.library) if narrow else packed_projection
    found: dict[str, list[list[Projection]]] = {"own": [], "oneDNN": []}
    for outputs, width in SHAPES:
        weights = [torch.randn(outputs, width).bfloat16() / width**0.5 for _ in range(LAYERS)]
        found["own"].append([kernels.projection(w, None, None, narrow=True) for w in weights])
        found["oneDNN"].append([theirs(w, None) for w in weights])
    return found


def seconds(of_shapes: Sequence[Sequence[Projection]], inputs: Sequence[torch.Tensor]) -> float:
    """Wall time of all layers of all shapes."""
    started = time.perf_counter()
    for projections, rows in zip(of_shapes, inputs, strict=True):
        for project in projections:
            project(rows)
    return time.perf_counter() - started


def compare(made: dict[str, list[list[Projection]]], num_rows: int, rounds: int) -> str:
    """A line of what was measured."""
    inputs = [torch.randn(num_rows, width).bfloat16() for _, width in SHAPES]
    for of_shapes in made.values():
        seconds(of_shapes, inputs)
    times = [{n: seconds(made[n], inputs) for n in made} for _ in range(rounds)]
    ratios = sorted(found["oneDNN"] / found["own"] for found in times)
    work = 2 * num_rows * LAYERS * sum(outputs * width for outputs, width in SHAPES)
    speeds = {n: work / statistics.median(t[n] for t in times) / 1e9 for n in made}
    return (
        f"{num_rows:5} rows: own {speeds['own']:5.0f}, oneDNN {speeds['oneDNN']:5.0f} GOP/s, "
        f"{statistics.median(ratios):.2f} x ({ratios[0]:.2f} .. {ratios[-1]:.2f})"
    )


def main() -> None:
    """bfloat16, then int8."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    as_engine("bench.linear")
    print(f"{processor()}, {torch.get_num_threads()} threads, {given.rounds} rounds")
    kinds: tuple[Quantization | None, ...] = (None, "w8a8")
    for quantization in kinds:
        kernels = choose(
            torch.device("cpu"),
            torch.bfloat16,
            quantization,
            os.environ,
            max_gather_bytes=1 << 26,
            max_scores_bytes=1 << 26,
        )
        made = layers(kernels, quantization is not None) if isinstance(kernels, CppKernels) else {}
        own = {type(layer) for shape in made.get("own", []) for layer in shape}
        if own != {PanelLinear}:
            print("products of our own are not used on this processor")
            return
        print(quantization or "bfloat16")
        for num_rows in ROWS:
            print(compare(made, num_rows, given.rounds), flush=True)


if __name__ == "__main__":
    main()
