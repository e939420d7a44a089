"""What the Triton kernels and the GPU's engine reach on this GPU: `make bench-gpu`.

    PYTHONPATH=tests .venv/bin/python -m bench.gpu [--out docs] [--quick]

First the kernels against their torch references, in bfloat16. Then two ceilings, measured here: the
bandwidth of a copy (bytes read and written) and a large matrix product. Then the attention kernels
as shares of them, and whole engine steps of an 8B-shaped model of random weights: scheduler, CUDA
graphs, sampling and reports included, HTTP not. Times are medians of repeats, with the smallest and
the largest; a decode kernel goes over many layers' caches, more than the GPU's own cache holds.
Writes gpu.json and gpu.png, and exits 1 where there is no GPU or a kernel is wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch
import triton
from bench.gpu_kernels import (
    HEADS,
    HIDDEN,
    KV_BYTES,
    KV_HEADS,
    LAYERS,
    PAGE,
    Batch,
    Point,
    Timing,
    ceilings,
    decode_name,
    decode_points,
    errors,
    prefill_name,
    prefill_points,
)
from sluice_kernels.triton.kernels import TritonKernels
from sluice_worker.blocks import BlockPool
from sluice_worker.engine import Engine
from sluice_worker.gpu.capture import graph_sizes
from sluice_worker.gpu.runner import GpuRunner
from sluice_worker.models.config import DecoderConfig
from sluice_worker.models.decoder import Decoder
from sluice_worker.scheduler import Scheduler
from sluice_worker.steptime import StepTimes
from sluice_worker.weights import random_weights
from sluice_worker.wire import Limits, Sampling, Submit, packed

EIGHT_B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": HIDDEN,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CONTEXT, NEW_TOKENS = 1024, 128
WORST_ERROR = 0.01
CUT = Sampling(top_p=0.8, top_k=20)
"""As many chat models have them in generation_config.json."""
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


# The engine


def read_bytes(model: Decoder, batch: int, context: int) -> int:
    """What a step must read: every weight but the embeddings, and the keys and values."""
    weights = model.num_bytes - model.embedding.nbytes
    return weights + batch * context * KV_BYTES * LAYERS


@dataclass(frozen=True, slots=True)
class Machine:
    """The loaded model, and what its CUDA graphs took to capture."""

    engine: Engine
    model: Decoder
    graphs_s: float
    graphs_bytes: int


def load(largest: int) -> Machine:
    """An 8B of random weights, with pages for `largest` sequences and all graphs captured."""
    config = DecoderConfig.from_json(EIGHT_B)
    with torch.inference_mode():
        source = random_weights(0, torch.bfloat16, torch.device("cuda"))
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        model = Decoder(config, source, TritonKernels(HEADS // KV_HEADS, processors))
    longest = CONTEXT + NEW_TOKENS
    num_blocks = largest * (-(-longest // PAGE) + 2)
    torch.cuda.empty_cache()
    started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
    sizes = {"ceiling": largest, "max_model_len": longest, "activation_bytes": 0}
    runner = GpuRunner(model, num_blocks, PAGE, frozenset(), **sizes)
    while runner.use_idle_time():
        pass
    missing = {*graph_sizes(largest)} - {*runner._decodes._graphs}
    if missing:  # a worker goes on without them, but what is measured then is the host
        raise RuntimeError(f"no CUDA graphs for steps of {sorted(missing)} sequences")
    torch.cuda.synchronize()
    graphs_bytes = free - torch.cuda.mem_get_info()[0] - runner.num_bytes
    scheduler = Scheduler(
        BlockPool(num_blocks, PAGE, prefix_caching=False),
        Limits(0, largest, 8192),
        max_model_len=longest,
        vocab_size=config.shape.vocab_size,
        num_ahead=1,
    )
    engine = Engine(scheduler, runner, StepTimes())
    return Machine(engine, model, time.monotonic() - started, graphs_bytes)


def engine_point(
    machine: Machine, copy: Point, batch: int, sampling: Sampling | None = None
) -> Point:
    """Tokens a second of `batch` sequences whose contexts grow around CONTEXT, greedy or drawn."""
    engine, chance = machine.engine, torch.Generator().manual_seed(batch)
    prompt_len = CONTEXT - NEW_TOKENS // 2
    for number in range(batch):
        prompt = torch.randint(128256, (prompt_len,), generator=chance).tolist()
        temperature, drawn = (0.0, Sampling()) if sampling is None else (1.0, sampling)
        request = Submit(
            str(number), packed(prompt), NEW_TOKENS, temperature, number, True, [], 0, 0.0,
            sampling=drawn,
        )  # fmt: skip
        assert engine.submit(request, 0.0) is None
    times, last = [], 0.0
    while engine.has_work:
        report, failed = engine.step()
        assert not failed
        now = time.monotonic()
        if report is not None and report.num_decodes == batch:
            times.append(1000 * (now - last))
        last = now
    time_ms = Timing.of(times[8:])  # the first ones may still compile
    bound_ms = read_bytes(machine.model, batch, CONTEXT) / copy.rate / 1e9
    rate = 1000 * batch / time_ms.median
    name = f"batch {batch}" + ("" if sampling is None else ", top-p and top-k")
    return Point(name, time_ms, rate, "tokens/s", bound_ms / time_ms.median)


# The report


def told(point: Point) -> str:
    share = "" if point.share is None else f"  {point.share:6.1%} of its ceiling"
    times = point.time_ms
    return (
        f"{point.name:22} {point.rate:9.2f} {point.unit:8}{share}  "
        f"({times.median:.3f} ms, {times.smallest:.3f} .. {times.largest:.3f})"
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
    axes.set_xlabel(
        "% of the measured copy bandwidth (decode, batches) or matrix product (prefill)"
    )
    axes.set_title(
        f"{device}: kernels and an 8B-shaped engine; red: the least aimed at", fontsize=10
    )
    figure.savefig(path, dpi=120)


def write_report(device: str, distances: dict[str, float], points: list[Point], out: Path) -> None:
    """gpu.json and gpu.png in the directory `out`."""
    result = {
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "errors": distances,
        "points": [asdict(point) for point in points],
    }
    (out / "gpu.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(points, device, out / "gpu.png")


def measure(quick: bool) -> Iterator[Point]:
    """All points, ceilings first, each told as it is found."""
    repeats = 5 if quick else 20
    copy, matmul = ceilings(repeats)
    yield from (copy, matmul)
    yield from decode_points(copy, repeats, DECODES)
    yield from prefill_points(matmul, repeats, PREFILLS)
    torch.cuda.empty_cache()
    machine = load(64)
    yield Point("graphs", Timing.of([1000 * machine.graphs_s]), machine.graphs_bytes / 1e9, "GB")
    for batch in (1, 8, 32, 64):
        yield engine_point(machine, copy, batch)
    yield engine_point(machine, copy, 32, CUT)


def main() -> int:
    """Print, write JSON and PNG; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--quick", action="store_true", help="5 repeats instead of 20")
    given = parser.parse_args()
    out: Path = given.out
    if not torch.cuda.is_available():
        print("bench-gpu: torch finds no CUDA GPU on this machine, so nothing was measured.")
        return 1
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    wrong = 0
    with torch.inference_mode():
        distances = dict(errors())
        for name, distance in distances.items():
            is_wrong = not distance < WORST_ERROR
            wrong += is_wrong
            print(f"{name:45} {distance:.5f}{'  WRONG' * is_wrong}", flush=True)
        points: list[Point] = []
        try:
            for point in measure(given.quick):
                print(told(point), flush=True)
                points.append(point)
        finally:  # what was measured is kept, whatever stops the rest
            write_report(device, distances, points, out)
    growth = {p.name: p.time_ms.median for p in points}
    print(f"32 sequences take {growth['batch 32'] / growth['batch 1']:.2f} x the time of one")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
