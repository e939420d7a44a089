"""What the CPU kernels bring: CPU time of whole steps of a random 88 M Llama, variant by variant.

    PYTHONPATH=tests nice -n 19 .venv/bin/python -m bench.kernels

before   plain torch, weights as they are read
torch    plain torch, weights packed by oneDNN (what runs without a compiler)
cpp      the C++ kernels, weights packed
w8a8     the same with int8 linear layers

A round makes one step of each in turns, so that other load on the machine meets all; ratios are of
a round. Steps decode one token of each sequence behind so many, or compute one chunk of a prompt;
sampling is in it. The register peak is measured before and after each round: products of registers
alone, in the model's dtype. A round during which it moved by over a tenth is not counted.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from bench.environment import as_engine
from sluice.machine import processor
from sluice_core.model.sizing import MAX_GATHER_BYTES, MAX_SCORES_BYTES, blocks_for
from sluice_core.wire import Submit, packed
from sluice_kernels.choose import choose
from sluice_kernels.cpu.build import COMPILER, FLAGS, SOURCES, BuildTarget, usable_targets
from sluice_kernels.interface import Kernels
from sluice_kernels.plain import PlainKernels
from sluice_worker.base.config import Quantization
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.execution.weights import random_weights
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork

CPU = torch.device("cpu")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}
BLOCK_SIZE = 64
PEAK_ROUNDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of step: `batch` sequences of `context` tokens, of which `new` are computed."""

    batch: int
    context: int
    new: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.new

    def flops(self, config: DecoderConfig) -> float:
        """Multiplications and additions of the matrix products and of attention."""
        shape = config.shape
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        layer = shape.hidden_size * (2 * query + 2 * kv + 3 * shape.intermediate_size)
        seen = sum(range(self.context - self.new + 1, self.context + 1)) / self.new
        layer_flops = 2 * layer + 4 * query * seen
        head = 2 * self.batch * shape.vocab_size * shape.hidden_size
        return self.num_tokens * shape.num_layers * layer_flops + head


SHAPES = (
    *(Shape(batch, context, 1) for batch in (1, 8, 32) for context in (128, 1024)),
    Shape(1, 512, 512),
    Shape(1, 2048, 256),
)


def variants(dtype: torch.dtype) -> dict[str, Kernels]:
    """The kernels that are compared."""

    def chosen(asked: str, quantization: Quantization | None) -> Kernels:
        environ = {**os.environ, "SLUICE_KERNELS": asked}
        return choose(
            CPU,
            dtype,
            quantization,
            environ,
            max_gather_bytes=MAX_GATHER_BYTES,
            max_scores_bytes=MAX_SCORES_BYTES,
        )

    return {
        "before": PlainKernels(MAX_GATHER_BYTES, MAX_SCORES_BYTES),
        "torch": chosen("torch", None),
        "cpp": chosen("cpp", None),
        "w8a8": chosen("cpp", "w8a8"),
    }


def works_of(shape: Shape) -> list[StepWork]:
    """The step's work; all sequences have pages of their own, so that the cache helps none."""
    works = []
    num_blocks = blocks_for(shape.context, BLOCK_SIZE)
    for number in range(shape.batch):
        tokens = [(7 * number + 31 * i) % 8192 for i in range(shape.context)]
        sequence = Sequence(
            Submit("", packed(tokens), 1, 0.0, 0, False, [], 0, 0.0), seed=0, token_ids=tokens
        )
        sequence.block_ids = list(range(number * num_blocks, (number + 1) * num_blocks))
        works.append(StepWork(sequence, shape.context - shape.new, shape.new, samples=True))
    return works


def cpu_s(call: Callable[[], object]) -> float:
    """CPU-seconds of all threads."""
    started = time.process_time()
    call()
    return time.process_time() - started


def build_peak(target: BuildTarget, directory: Path) -> ctypes.CDLL:
    """The register peak's loop, compiled as the kernels are."""
    path, source = directory / "peak.so", Path(__file__).with_name("peak.cpp")
    flags = [*FLAGS, *target.flags, f"-I{SOURCES}", "-shared", str(source), "-o", str(path)]
    subprocess.run([COMPILER, *flags], check=True)
    library = ctypes.CDLL(str(path))
    library.peak.restype, library.peak.argtypes = ctypes.c_double, [ctypes.c_int, ctypes.c_int64]
    return library


class Bench:
    """All variants, loaded."""

    def __init__(self, dtype: torch.dtype, peak: ctypes.CDLL) -> None:
        self.config = DecoderConfig.from_json(MODEL)
        self._peak = partial(peak.peak, dtype == torch.bfloat16, PEAK_ROUNDS)
        num_blocks = max(shape.batch * blocks_for(shape.context, BLOCK_SIZE) for shape in SHAPES)
        self.runners: dict[str, Runner] = {}
        for name, kernels in variants(dtype).items():
            model = Decoder(self.config, random_weights(0, dtype, CPU), kernels)
            self.runners[name] = Runner(model, num_blocks, BLOCK_SIZE, frozenset())
            print(f"{name:7} {kernels.name}, weights {model.num_bytes / 2**20:.1f} MiB", flush=True)

    def peak(self) -> float:
        """Operations in a CPU-second, the best of three."""
        flops = self._peak()
        return float(flops / min(cpu_s(self._peak) for _ in range(3)))

    def round(self, works: list[StepWork]) -> dict[str, float]:
        """CPU-seconds of one step of each."""
        return {
            name: cpu_s(partial(runner.execute, works)) for name, runner in self.runners.items()
        }

    def measure(self, shape: Shape, rounds: int) -> None:
        """Print a line for each variant."""
        works = works_of(shape)
        self.round(works)  # the first calls are slow
        found, peaks, before = [], [], self.peak()
        for _ in range(rounds):
            seconds, after = self.round(works), self.peak()
            if abs(after - before) <= 0.1 * before:
                found.append(seconds)
                peaks.append((before + after) / 2)
            before = after
        told = f"{shape.batch} x {shape.new} token(s) at {shape.context}"
        print(f"\n{told}: {len(found)} of {rounds} rounds counted")
        if len(found) <= rounds / 2:
            print("  the machine was too busy: no figure")
            return
        flops, peak = shape.flops(self.config), statistics.median(peaks)
        for name in self.runners:
            times = [seconds[name] for seconds in found]
            ratios = [seconds["before"] / seconds[name] for seconds in found]
            middle = statistics.median(times)
            print(
                f"  {name:7} {1e3 * middle:8.2f} CPU-ms ({1e3 * min(times):.2f} .. "
                f"{1e3 * max(times):.2f}), {shape.num_tokens / middle:8.0f} tokens/CPU-s, "
                f"{statistics.median(ratios):5.2f} x before ({min(ratios):.2f} .. "
                f"{max(ratios):.2f}), {flops / middle / peak:4.0%} of the peak",
                flush=True,
            )


def main() -> None:
    """All shapes, all variants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    given = parser.parse_args()
    as_engine("bench.kernels")
    target = usable_targets(os.uname().machine, Path("/proc/cpuinfo").read_text())[0]
    with tempfile.TemporaryDirectory() as directory:
        peak = build_peak(target, Path(directory))
    threads = torch.get_num_threads()
    print(f"{processor()}, {threads} thread(s), {given.dtype}, torch {torch.__version__}, median")
    bench = Bench(getattr(torch, given.dtype), peak)
    print(f"register peak {bench.peak() / 1e9:.0f} GFLOP/s of a core")
    for shape in SHAPES:
        bench.measure(shape, given.rounds)


if __name__ == "__main__":
    main()
