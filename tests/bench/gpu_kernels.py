"""What one GPU can do, and what the Triton kernels reach of it: the parts of `bench.gpu`.

`--rehearse` runs all of it small, interpreted, on the CPU. Such figures mean nothing.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from sluice_kernels.triton import (
    add_norm,
    attend,
    choose,
    cut,
    decode,
    gated,
    prefill,
    rotate_store,
)
from sluice_kernels.triton.kernels import upload
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

REHEARSE = "SLUICE_REHEARSE"
REHEARSED = REHEARSE in os.environ
DEVICE = torch.device("cpu" if REHEARSED else "cuda")
HEADS, KV_HEADS, DIM, PAGE = (4, 2, 16, 16) if REHEARSED else (32, 8, 128, 16)
HIDDEN, LAYERS, WIDTH, VOCAB = (64, 2, 96, 384) if REHEARSED else (4096, 32, 14336, 128256)
DTYPE = torch.float16 if REHEARSED else torch.bfloat16  # which the interpreter has not
SHRUNK = 64 if REHEARSED else 1
"""What contexts, chunks and copies are divided by."""
KV_BYTES = 2 * KV_HEADS * DIM * 2  # of one token in one layer
SCALE = DIM**-0.5
Batch = Sequence[tuple[int, int]]
"""How many sequences of which context."""


def shrunk(count: int) -> int:
    """`count`, or of a rehearsal's one at least."""
    return max(count // SHRUNK, 1)


def num_processors() -> int:
    """Multiprocessors of the GPU."""
    return 1 if REHEARSED else torch.cuda.get_device_properties(0).multi_processor_count


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds: the median of all repeats, the smallest and the largest."""

    median: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, times_ms: list[float]) -> "Timing":
        return cls(statistics.median(times_ms), min(times_ms), max(times_ms))


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All calls of one kernel, in microseconds of the GPU's time."""

    name: str
    calls: int
    time_us: float


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: how long, how much of its kind a second, and which share of its ceiling.

    kernels: what the time goes to, the longest first, where that was looked at.
    """

    name: str
    time_ms: Timing
    rate: float
    unit: str
    share: float | None = None
    kernels: tuple[KernelTime, ...] = ()


Job = tuple[str, Callable[[], Point]]
"""A point's name, and what measures it."""


def timed(work: Callable[[], object], repeats: int, calls: int = 1) -> Timing:
    """`work` by the GPU's clock, divided by the `calls` that it makes."""
    for _ in range(1 if REHEARSED else 3):
        work()
    times = []
    for _ in range(repeats):
        if REHEARSED:
            started = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - started) / calls)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return Timing.of(times)


def graphed(work: Callable[[], object]) -> Callable[[], None]:
    """`work` as a CUDA graph, so that launching it is not what is measured."""
    work()
    if REHEARSED:
        return lambda: (work(), None)[1]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def random(*size: int) -> Tensor:
    return torch.randn(*size, device=DEVICE, dtype=DTYPE)


def random_rotary(count: int) -> Tensor:
    """Unit complex numbers, [count, 1, DIM / 2]."""
    angles = torch.randn(count, 1, DIM // 2, device=DEVICE)
    return torch.polar(torch.ones_like(angles), angles)


# Ceilings


def copy_point(repeats: int) -> Point:
    """A copy of 4 GiB: bytes read and written."""
    source = torch.randn((1 << 30) // SHRUNK**2, device=DEVICE)
    target = torch.empty_like(source)
    time_ms = timed(lambda: target.copy_(source), repeats)
    return Point("copy", time_ms, 2 * source.nbytes / time_ms.median / 1e9, "TB/s")


def matmul_point(repeats: int) -> Point:
    """An 8192-cubed product of random bfloat16."""
    size = 8192 // SHRUNK
    left, right = random(size, size), random(size, size)
    time_ms = timed(lambda: left @ right, repeats)
    return Point("matmul", time_ms, 2 * size**3 / time_ms.median / 1e9, "TFLOP/s")


# Kernels


def tables_of(num_pages: Sequence[int]) -> Tensor:
    """So many pages for each sequence, in no order, each used once."""
    order = torch.randperm(sum(num_pages), device=DEVICE, dtype=torch.int32)
    return pad_sequence([*torch.split(order, [*num_pages])], batch_first=True)


def distance(found: Tensor, expected: Tensor) -> float:
    """How far from the reference, relative to its norm; infinite where a number is not finite."""
    gap = (found.float() - expected.float()).norm() / expected.float().norm()
    return gap.item() if gap.isfinite() else float("inf")


def checks() -> Iterator[tuple[str, Callable[[], float]]]:
    """Each kernel's distance from its reference, in bfloat16."""
    for window, softcap, splits in ((None, None, (1, 16)), (300, 2.0, (4,))):
        variant = f"window {window}, cap {softcap}"
        for num in splits:
            yield f"decode, {num} splits, {variant}", partial(decode_error, num, window, softcap)
        longer = partial(decode_error, 8, window, softcap, 4)
        yield f"decode, 8 splits of 4 blocks, {variant}", longer
        yield f"prefill, {variant}", partial(prefill_error, window, softcap)
    yield "add, norm", norm_error
    yield "silu, mul", gate_error
    yield "rotate, store", rotate_error
    yield "choose: likeliest", likeliest_error
    yield "cut: edges", edges_error
    yield "choose: shares of draws", shares_error


def decode_error(
    num_splits: int, window: int | None, softcap: float | None, min_blocks: int = 1
) -> float:
    """Eight sequences, some of them a slot before or after a page's end."""
    cache, tables = random(520, 2, KV_HEADS, PAGE, DIM), tables_of([65] * 8)
    lengths = [1, 16, 17, 500, 999, 1024, 1033, 1040]
    query = random(8, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
    found = decode.decode(
        query, torch.tensor(lengths, device=DEVICE, dtype=torch.int32), cache, tables, SCALE,
        splits=decode.Splits(num_splits, min_blocks), window=window, softcap=softcap,
    )  # fmt: skip
    expected = [
        attend.reference(query[i : i + 1], cache, tables[i], n - 1, SCALE, window, softcap)
        for i, n in enumerate(lengths)
    ]
    return distance(found, torch.cat(expected).flatten(1))


def prefill_error(window: int | None, softcap: float | None) -> float:
    """A long chunk behind a past, and a prompt's beginning."""
    cache, tables = random(520, 2, KV_HEADS, PAGE, DIM), tables_of([65] * 8)
    query = random(700, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
    chunks = [(0, 0, 300, 600), (1, 600, 0, 100)]
    found = prefill.prefill(query, tiles_of(chunks, cache), cache, tables, SCALE, window, softcap)
    expected = [
        attend.reference(query[at : at + n], cache, tables[i], start, SCALE, window, softcap)
        for i, at, start, n in chunks
    ]
    return distance(found, torch.cat(expected).flatten(1))


def tiles_of(chunks: list[tuple[int, int, int, int]], cache: Tensor) -> Tensor:
    """The tiles of `chunks` on the GPU."""
    tiles = prefill.cut_tiles(chunks, prefill.tile_tokens(HEADS // KV_HEADS, cache))
    return upload(torch.from_numpy(tiles), DEVICE)


def norm_error() -> float:
    residual, added, weight = random(33, HIDDEN), random(33, HIDDEN), random(HIDDEN)
    expected = add_norm.reference(residual + added, weight, 1e-5)
    return distance(add_norm.add_norm(residual, added, weight, 1e-5), expected)


def gate_error() -> float:
    rows = random(33, 2 * WIDTH)
    return distance(gated.gated(rows, "silu"), gated.reference(rows, "silu"))


def rotate_error() -> float:
    """The worse of the queries' and the pages'."""
    heads, rotary = random(33, HEADS + 2 * KV_HEADS, DIM), random_rotary(33)
    cache = torch.zeros(520, 2, KV_HEADS, PAGE, DIM, device=DEVICE, dtype=DTYPE)
    places = torch.randperm(520 * PAGE, device=DEVICE)[:33]
    blocks, slots = places // PAGE, places % PAGE
    rows, pages = heads.clone(), cache.clone()
    rotate_store.reference(rows, rotary, None, 1e-5, pages, blocks, slots, HEADS)
    rotate_store.rotate_store(heads, rotary, None, 1e-5, cache, blocks, slots, HEADS)
    return max(distance(heads[:, :HEADS], rows[:, :HEADS]), distance(cache, pages))


def likeliest_error() -> float:
    """Infinite where another token than the likeliest is chosen."""
    logits, zeros = random(33, VOCAB), torch.zeros(33, device=DEVICE)
    none = torch.zeros(33, device=DEVICE, dtype=torch.int64)
    found = choose.choose(logits, cut.Draws(zeros, zeros + 1, zeros, none, none))
    return 0.0 if torch.equal(found, logits.argmax(1)) else float("inf")


def edges_error() -> float:
    """The worst edge of a cut row that is not where sorting finds it."""
    logits, chance = random(33, VOCAB), torch.rand(3, 33, device=DEVICE)
    top_k = torch.arange(33, device=DEVICE) * 3
    draws = cut.Draws(chance[0] + 0.2, chance[1], chance[2] / 10, top_k, 0 * top_k)
    edges, expected = cut.cut(logits, draws), cut.reference(logits, draws, None)
    # Weights are summed in another order: the edge may be its neighbour's, a thousandth away.
    return ((edges - expected).abs() / expected.abs()).max().item()


def shares_error() -> float:
    """A tenth of the worst share of many draws, off by chance too."""
    weights, count = torch.tensor([0.5, 0.3, 0.15, 0.05], device=DEVICE), (1 << 18) // SHRUNK**2
    ones, seeds = torch.ones(count, device=DEVICE), torch.randint(1 << 62, (count,), device=DEVICE)
    rows, draws = weights.log().expand(count, -1), cut.Draws(ones, ones, 0 * ones, 0 * seeds, seeds)
    shares = torch.bincount(choose.choose(rows, draws)) / count
    return ((shares - weights).abs() / weights).max().item() / 10


# Attention


def decode_jobs(copy: Point, repeats: int, batches: Iterable[Batch]) -> Iterator[Job]:
    """The decode kernel over the caches of many layers; its bytes are keys and values, once."""
    for batch in batches:
        yield decode_name(batch), partial(decode_point, copy, repeats, batch)


def decode_point(copy: Point, repeats: int, batch: Batch) -> Point:
    contexts = [context // SHRUNK for count, context in batch for _ in range(shrunk(count))]
    num_pages = [-(-context // PAGE) for context in contexts]
    num_bytes = sum(contexts) * KV_BYTES
    layers = min(LAYERS, max(2, (4 << 30) // num_bytes))
    caches = [random(sum(num_pages), 2, KV_HEADS, PAGE, DIM) for _ in range(layers)]
    lengths = torch.tensor(contexts, device=DEVICE, dtype=torch.int32)
    query, tables = random(len(contexts), HEADS, DIM), tables_of(num_pages)
    splits = decode.choose_splits(len(contexts), KV_HEADS, num_processors())
    step = partial(_decode_all, query, caches, tables, lengths, splits)
    time_ms = timed(graphed(step), repeats, layers)
    rate = num_bytes / time_ms.median / 1e9
    return Point(decode_name(batch), time_ms, rate, "TB/s", rate / copy.rate)


def decode_name(batch: Batch) -> str:
    """As reports call it: "decode 1 x 32768 + 63 x 1024"."""
    return "decode " + " + ".join(f"{count} x {context}" for count, context in batch)


def _decode_all(
    query: Tensor, caches: list[Tensor], tables: Tensor, lengths: Tensor, splits: decode.Splits
) -> None:
    for cache in caches:
        decode.decode(query, lengths, cache, tables, SCALE, splits=splits)


def prefill_jobs(matmul: Point, repeats: int, sizes: list[tuple[int, int]]) -> Iterator[Job]:
    """The prefill kernel; only the products that causality asks for are counted."""
    for start, count in sizes:
        name = prefill_name(start, count)
        yield name, partial(prefill_point, name, matmul, repeats, start, count)


def prefill_point(name: str, matmul: Point, repeats: int, start: int, count: int) -> Point:
    start, count = start // SHRUNK, count // SHRUNK
    num_pages = -(-(start + count) // PAGE)
    cache, tables = random(num_pages, 2, KV_HEADS, PAGE, DIM), tables_of([num_pages])
    query, tiles = random(count, HEADS, DIM), tiles_of([(0, 0, start, count)], cache)
    step = partial(prefill.prefill, query, tiles, cache, tables, SCALE)
    time_ms = timed(graphed(step), repeats)
    seen = count * start + count * (count + 1) // 2
    rate = 4 * seen * HEADS * DIM / time_ms.median / 1e9
    return Point(name, time_ms, rate, "TFLOP/s", rate / matmul.rate)


def prefill_name(start: int, count: int) -> str:
    """As reports call it."""
    return f"prefill {count} at {start}"
