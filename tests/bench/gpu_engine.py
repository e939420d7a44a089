"""Whole steps of an 8B-shaped engine of random weights, for `bench.gpu`: HTTP is not in them."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from bench.gpu_kernels import (
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    HIDDEN,
    KV_BYTES,
    KV_HEADS,
    LAYERS,
    PAGE,
    REHEARSED,
    SHRUNK,
    VOCAB,
    WIDTH,
    Job,
    KernelTime,
    Point,
    Timing,
    num_processors,
    shrunk,
    timed,
)
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Abort, Submit, packed
from sluice_core.work import Sampling
from sluice_kernels.triton.kernels import TritonKernels
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.gpu.capture import graph_sizes
from sluice_worker.execution.gpu.rows import Row
from sluice_worker.execution.gpu.runner import GpuRunner
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.sampler import Draw
from sluice_worker.execution.weights import random_weights
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

EIGHT_B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 131072 // SHRUNK,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CONTEXT, NEW_TOKENS = 1024 // SHRUNK, 128 // min(SHRUNK, 8)
BATCHES = (1, 8, 32, 64)
PREFILL_TOKENS = 2048 // SHRUNK
"""Of a step, as a server's: two prompts."""
EVERY = 8 // min(SHRUNK, 4)
"""Steps from one arrival to the next."""
CUT = Sampling(top_p=0.8, top_k=20)
"""As many chat models have them in generation_config.json."""
PENALISED = Sampling(top_p=0.8, top_k=20, repetition_penalty=1.05)
"""As Qwen2.5's."""
MOST_KERNELS = 16


@dataclass(frozen=True, slots=True)
class Machine:
    """The loaded model, and what its CUDA graphs took to capture."""

    engine: Engine
    model: Decoder
    graphs_s: float
    graphs_bytes: int


def engine_jobs(copy: Point, matmul: Point, repeats: int) -> Iterator[Job]:
    """Batches of several sizes, greedy and drawn; nothing behind the first where loading fails."""
    loaded: list[Machine] = []

    def graphs() -> Point:
        loaded.append(load(BATCHES[-1]))
        took_ms, num_bytes = 1000 * loaded[0].graphs_s, loaded[0].graphs_bytes
        return Point("graphs", Timing.of([took_ms]), num_bytes / 1e9, "GB")

    yield "graphs", graphs
    if not loaded:
        return
    machine = loaded[0]
    for batch in BATCHES:
        yield f"batch {batch}", partial(engine_point, f"batch {batch}", machine, copy, batch)
    yield "prefill step", partial(prefill_step_point, machine, matmul, repeats)
    yield "arrivals beside 32", partial(arrivals_point, machine, 32)
    for batch in (1, 32):
        name = f"graph of {batch}"
        yield name, partial(graph_point, name, machine, copy, repeats, batch)
    for more, sampling in (("top-p and top-k", CUT), ("repetition_penalty", PENALISED)):
        name = f"batch 32, {more}"
        yield name, partial(engine_point, name, machine, copy, 32, sampling)


def read_bytes(model: Decoder, batch: int, context: int) -> int:
    """What a step must read: every weight but the embeddings, and the keys and values."""
    weights = model.num_bytes - model.embedding.nbytes
    return weights + batch * context * KV_BYTES * LAYERS


def load(largest: int) -> Machine:
    """An 8B of random weights, with pages for `largest` sequences and all graphs captured."""
    config = DecoderConfig.from_json(EIGHT_B)
    with torch.inference_mode():
        source = random_weights(0, DTYPE, DEVICE)
        model = Decoder(config, source, TritonKernels(HEADS // KV_HEADS, num_processors()))
    longest = CONTEXT + NEW_TOKENS
    num_blocks = largest * (-(-longest // PAGE) + 2)
    started, free = time.monotonic(), free_bytes()
    sizes = {"ceiling": largest, "max_model_len": longest, "activation_bytes": 0}
    runner = GpuRunner(model, num_blocks, PAGE, frozenset(), **sizes)
    while runner.use_idle_time():
        pass
    missing = {*graph_sizes(largest)} - {*runner._decodes._graphs}
    if (
        missing and not REHEARSED
    ):  # a worker goes on without them, but what is measured then is the host
        raise RuntimeError(f"no CUDA graphs for steps of {sorted(missing)} sequences")
    graphs_bytes = free - free_bytes() - runner.num_bytes
    scheduler = Scheduler(
        BlockPool(num_blocks, PAGE, prefix_caching=False),
        EngineLimits(0, largest, 8192),
        max_model_len=longest,
        vocab_size=config.shape.vocab_size,
        num_ahead=1,
    )
    engine = Engine(scheduler, runner, StepTimes())
    return Machine(engine, model, time.monotonic() - started, graphs_bytes)


def free_bytes() -> int:
    """Of the GPU, without what torch keeps for later."""
    if REHEARSED:
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def engine_point(
    name: str, machine: Machine, copy: Point, batch: int, sampling: Sampling | None = None
) -> Point:
    """Tokens a second of `batch` sequences whose contexts grow around CONTEXT, greedy or drawn."""
    engine, chance, batch = machine.engine, random.Random(batch), shrunk(batch)
    vocab_size = machine.model.config.shape.vocab_size
    temperature, drawn = (0.0, Sampling()) if sampling is None else (1.0, sampling)
    vocab_size = machine.model.config.shape.vocab_size
    for number in range(batch):
        prompt = [chance.randrange(vocab_size) for _ in range(CONTEXT - NEW_TOKENS // 2)]
        request = Submit(
            str(number), packed(prompt), NEW_TOKENS, temperature, number, True, [], 0, 0.0,
            sampling=drawn,
        )  # fmt: skip
        assert engine.submit(request, 0.0) is None
    try:
        times = _step_times(engine, batch)
    finally:  # a step that failed leaves its sequences to the next point
        for number in range(batch):
            engine.abort(Abort(str(number)))
    time_ms = Timing.of(times[len(times) // 16 :])  # the first ones may still compile
    bound_ms = read_bytes(machine.model, batch, CONTEXT) / copy.rate / 1e9
    rate = 1000 * batch / time_ms.median
    return Point(name, time_ms, rate, "tokens/s", bound_ms / time_ms.median)


def _step_times(engine: Engine, batch: int) -> list[float]:
    """Milliseconds from one step of `batch` decodes to the next, until nothing is left to do."""
    times, last = [], 0.0
    while engine.has_work:
        report, failed = engine.step()
        if failed:
            raise RuntimeError(f"the engine failed {len(failed)} requests")
        now = time.monotonic()
        if report is not None and report.num_decodes == batch:
            times.append(1000 * (now - last))
        last = now
    return times


def arrivals_point(machine: Machine, batch: int) -> Point:
    """What a prompt of CONTEXT / 2 tokens costs beside `batch` that decode: milliseconds more than
    their steps alone take; and the longest gap in which each of them was served."""
    engine, count = machine.engine, shrunk(batch)
    names = [*map(str, range(count))]
    try:
        for name in names:
            _submit(machine, name, CONTEXT - NEW_TOKENS // 2, NEW_TOKENS)
        while not (report := engine.step()[0]) or report.num_decodes < count:
            pass
        plain = [_timed_step(engine) for _ in range(NEW_TOKENS // 4)][EVERY:]
        gaps, more = [], []
        for number in range(NEW_TOKENS // 2 // EVERY):
            names.append(f"arrival {number}")
            _submit(machine, names[-1], CONTEXT // 2, 1)
            steps = [_timed_step(engine) for _ in range(EVERY)]
            gaps.append(max(steps))
            more.append(sum(steps) - EVERY * statistics.median(plain))
    finally:
        for name in names:
            engine.abort(Abort(name))
    return Point(f"arrivals beside {batch}", Timing.of(gaps), statistics.median(more), "ms more")


def _submit(machine: Machine, name: str, num_tokens: int, max_tokens: int) -> None:
    chance, vocab_size = random.Random(name), machine.model.config.shape.vocab_size
    prompt = [chance.randrange(vocab_size) for _ in range(num_tokens)]
    request = Submit(name, packed(prompt), max_tokens, 0.0, 0, True, [], 0, 0.0)
    assert machine.engine.submit(request, 0.0) is None


def _timed_step(engine: Engine) -> float:
    """Milliseconds of one."""
    began = time.monotonic()
    engine.step()
    return 1000 * (time.monotonic() - began)


def prefill_step_point(machine: Machine, matmul: Point, repeats: int) -> Point:
    """A whole step of two prompts: the operations of its products and of causal attention."""
    sequences = [row_of(number, CONTEXT).sequence for number in range(PREFILL_TOKENS // CONTEXT)]
    works = [StepWork(sequence, 0, CONTEXT, samples=True) for sequence in sequences]
    runner, model = machine.engine.runner, machine.model
    kernels = () if REHEARSED else traced(partial(runner.execute, works))
    time_ms = timed(partial(runner.execute, works), repeats)
    products = model.num_bytes - 2 * model.embedding.nbytes  # the head sees two rows
    seen = CONTEXT * (CONTEXT + 1) // 2 * len(works)
    operations = products / 2 * 2 * PREFILL_TOKENS + 4 * seen * HEADS * DIM * LAYERS
    rate = operations / time_ms.median / 1e9
    return Point("prefill step", time_ms, rate, "TFLOP/s", rate / matmul.rate, kernels)


def graph_point(name: str, machine: Machine, copy: Point, repeats: int, batch: int) -> Point:
    """One step of `batch` sequences again and again: what it takes without the host, and what its
    kernels take of that."""
    batch = shrunk(batch)
    decodes = machine.engine.runner._decodes  # type: ignore[attr-defined]
    rows = [row_of(number, CONTEXT) for number in range(batch)]
    decodes.launch(rows).tokens()
    replay = partial(decodes.launch, rows) if REHEARSED else decodes._graphs[batch].replay
    time_ms = timed(replay, repeats)
    kernels = () if REHEARSED else traced(replay)
    busy_us = sum(kernel.time_us for kernel in kernels)
    bound_ms = read_bytes(machine.model, batch, CONTEXT) / copy.rate / 1e9
    share = bound_ms / time_ms.median
    return Point(name, time_ms, busy_us, "us", share, kernels)


def row_of(number: int, context: int) -> Row:
    """The next token of a sequence of `context` tokens, in pages of its own."""
    num_pages = -(-context // PAGE)
    request = Submit(str(number), packed([0] * context), 1, 0.0, 0, False, [], 0, 0.0)
    sequence = Sequence(request, seed=0, token_ids=request.prompt_token_ids)
    sequence.block_ids = [*range(number * num_pages, (number + 1) * num_pages)]
    return Row(sequence, context - 1, sequence.block_ids[-1], Draw(0.0, 0, context))


def traced(work: Callable[[], object]) -> tuple[KernelTime, ...]:
    """What `work` runs on the GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    found = summed(
        (event.name, event.time_range.elapsed_us())
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    if not found:
        raise RuntimeError("torch's profiler saw no kernel on the GPU")
    return found


def summed(calls: Iterable[tuple[str, float]]) -> tuple[KernelTime, ...]:
    """Calls, each with its microseconds, by name; what is beyond MOST_KERNELS as one."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, time_us in calls:
        by_name[name].append(time_us)
    found = [KernelTime(name, len(times), sum(times)) for name, times in by_name.items()]
    found.sort(key=lambda kernel: -kernel.time_us)
    shown, rest = found[:MOST_KERNELS], found[MOST_KERNELS:]
    if rest:
        calls_left = sum(kernel.calls for kernel in rest)
        shown.append(KernelTime("all others", calls_left, sum(kernel.time_us for kernel in rest)))
    return tuple(shown)
