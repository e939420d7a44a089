"""From a configuration to an engine that serves: weights, memory, profile.

Memory is planned by the formula before anything is loaded, then again with measured bytes and with
the kernels' needs. All plans are reported.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sluice_core.contract import MemoryReport, policy_in_force
from sluice_core.errors import ConfigError, DoesNotFit, UnsupportedModel
from sluice_core.heap import release_freed
from sluice_core.latency import FIRST_CONTEXT, MIN_CHUNK_TOKENS, predicted_cap
from sluice_core.model.files import Directory, checkpoint_dir
from sluice_core.model.sizing import (
    CONTEXT_BYTES,
    DEFAULT_BLOCK_SIZE,
    DTYPE_BYTES,
    MemoryPlan,
    MemoryRequest,
    SizingError,
    advice,
    blocks_for,
    bytes_saved,
    plan_memory,
    resolve_dtype,
    weights_bytes,
)
from sluice_core.model.stored import Weights, read_config, with_stored_dtype
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord, StepTimes
from sluice_core.wire import Ready, Submit, packed

from ..base.config import EngineConfig
from ..base.resources import Resources
from ..execution.gpu.capture import graph_sizes
from ..execution.models.config import DecoderConfig
from ..execution.models.decoder import Decoder
from ..execution.runner import Runner
from ..execution.weights import Checkpoint, random_weights
from ..scheduling.blocks import BlockPool
from ..scheduling.scheduler import SCORED_LOGITS, Scheduler
from ..scheduling.sequence import Sequence
from ..scheduling.static_batch import StaticBatching
from ..scheduling.step import StepWork
from ..text.tokenizer_config import TokenizerConfig, eos_token_ids
from .loop import Engine
from .machine import Machine

Progress = Callable[[str, int], None]
"""(phase, percent) of the start."""

PROFILE_CPU_S = 1.5
"""CPU seconds that the profile may take: three seconds of waiting in a pod with half a core."""
PREPARE_S = 5.0
"""Seconds before readiness for work that otherwise waits for idle time. On a GPU it captures CUDA
graphs of large steps, some tenths of a second each."""
GPU_SCORED_LOGITS = 1 << 28
"""As SCORED_LOGITS: 2,048 tokens of a vocabulary of 131k, some milliseconds."""
MAX_STEP_S = 0.25
"""Longest dummy step; the activations of a larger one are extrapolated."""


def start(config: EngineConfig, progress: Progress) -> tuple[Engine, Ready]:
    """Load the model and measure it. Raises StartupError with one sentence."""
    return _Start(config, Resources()).run(progress)


class _Start:
    """One start; its attributes are the results that later phases need."""

    def __init__(self, config: EngineConfig, resources: Resources) -> None:
        self.config = config
        self.resources = resources
        self.directory: Path = checkpoint_dir(config.model)
        source = Directory(self.directory)
        config_json = read_config(source)
        if config.load_format != "dummy":
            config_json = with_stored_dtype(config_json, Weights.of(source))
        self.decoder = DecoderConfig.from_json(config_json, config.max_model_len)
        self.eos = eos_token_ids(self.directory, config_json, TokenizerConfig(self.directory))
        self.machine = Machine(config, resources)
        self.kind, self.device = self.machine.kind, self.machine.device
        self.dtype_name = _run_dtype(config.dtype, self.decoder, self.kind)
        self.block_size = config.block_size or DEFAULT_BLOCK_SIZE[self.kind]
        self.max_model_len = config.max_model_len or self.decoder.shape.default_len
        group = self.decoder.shape.num_heads // self.decoder.shape.num_kv_heads
        self.kernels = self.machine.kernels(self.dtype_name, group)

    def run(self, progress: Progress) -> tuple[Engine, Ready]:
        progress("weights", 0)
        base_bytes = self.machine.base_bytes()
        planned, model = self._load()
        progress("profile", 60)
        activation_bytes, records = self._profile(model, planned)
        plan = self._plan(self._held_bytes(model), activation_bytes, model.in_a_row)
        _refuse_unless_fits(plan, self.decoder)
        progress("memory", 90)
        runner = self._runner(model, plan.num_blocks, plan)
        _prepare(runner)
        if self.kind == "cuda":
            records += self._time_decodes(runner, plan)
            self._rehearse(runner, plan)
        times = StepTimes(has_graphs=self.kind == "cuda")
        times.set_profile(records)
        predicted = self._predicted_cap(times, plan.ceiling)
        limits = self._limits(plan.ceiling, predicted)
        engine = Engine(
            self._scheduler(plan, limits),
            runner,
            times,
            seed=self.config.seed,
            throttled_s=self.resources.throttled_s,
        )
        measured = {
            "total_bytes": planned.total_bytes,
            "weights_bytes": model.num_bytes,
            "activation_bytes": activation_bytes,
            "reserve_bytes": base_bytes,
            "kv_cache_bytes": runner.num_bytes,
        }
        report = MemoryReport(planned.as_dict(), measured, plan.kv_tokens, plan.as_dict())
        return engine, self._ready(plan, predicted, limits, report, times)

    def _load(self) -> tuple[MemoryPlan, Decoder]:
        """The plan before anything is loaded, and the model, if it fits."""
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        is_dummy = self.config.load_format == "dummy"
        files = None if is_dummy else Checkpoint(self.directory, dtype, self.device)
        planned = self._plan(self._weights_bytes(files))
        _refuse_unless_fits(planned, self.decoder)
        if self.kind == "cuda":
            refuse_unless_free(planned, *torch.cuda.mem_get_info(self.device))
        if files is None:
            read = random_weights(self.config.seed or 0, dtype, self.device)
            model = Decoder(self.decoder, read, self.kernels)
        else:
            model = Decoder(self.decoder, files.read, self.kernels)
            files.finish(self.decoder.shape)
        release_freed()
        return planned, model

    # Memory

    def _plan(self, num_weights: int, activation: int = 0, in_a_row: bool = False) -> MemoryPlan:
        config = self.config
        try:
            return plan_memory(
                self.decoder.shape,
                MemoryRequest(
                    total_bytes=self.machine.total_bytes(),
                    utilization=config.memory_utilization,
                    weights_bytes=num_weights,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_model_len=self.max_model_len,
                    block_size=self.block_size,
                    dtype_bytes=DTYPE_BYTES[self.dtype_name],
                    max_num_seqs=config.max_num_seqs,
                    device=self.kind,
                    gathers=self.kernels.name != "triton" and not in_a_row,
                    measured_activation_bytes=activation,
                    in_a_row=in_a_row,
                    num_blocks=config.num_gpu_blocks_override,
                ),
            )
        except SizingError as error:
            raise ConfigError([str(error)]) from error

    def _held_bytes(self, model: Decoder) -> int:
        """Bytes of the weights. A GPU counts all that torch holds for them: segments of 20 MiB or
        more. The gaps between tensors in them are too small for a layer's KV cache."""
        if self.kind != "cuda":
            return model.num_bytes
        torch.cuda.empty_cache()  # the profile's pages, which the KV cache is too large to reuse
        return max(model.num_bytes, torch.cuda.memory_reserved(self.device))

    # Weights

    def _weights_bytes(self, files: Checkpoint | None) -> int:
        dtype_bytes = DTYPE_BYTES[self.dtype_name]
        shape = self.decoder.shape
        saved = bytes_saved(shape, self.dtype_name, self.config.quantization)
        if files is not None:
            return files.num_elements(shape) * dtype_bytes - saved
        return weights_bytes(shape, dtype_bytes) - saved

    def _runner(self, model: Decoder, num_blocks: int, plan: MemoryPlan) -> Runner:
        """Steps run ahead of the host on Triton's kernels, which only a GPU has."""
        if self.kernels.name != "triton":
            return Runner(model, num_blocks, self.block_size, self.eos)
        from ..execution.gpu.runner import GpuRunner

        return GpuRunner(
            model,
            num_blocks,
            self.block_size,
            self.eos,
            ceiling=plan.ceiling,
            max_model_len=self.max_model_len,
            activation_bytes=plan.activation_bytes,
        )

    # Profile

    def _profile(self, model: Decoder, plan: MemoryPlan) -> tuple[int, list[StepRecord]]:
        """Time a few dummy steps, cheap ones first, and take the peak of a large one, in bytes.

        A GPU's decodes are not among them (`_time_decodes`).
        """
        budget = self.config.max_num_batched_tokens
        largest = max(min(budget, self.max_model_len), 1)
        num_blocks = blocks_for(self.max_model_len, self.block_size)
        runner = self._runner(model, num_blocks, plan)
        dummy = _Dummy(runner, self.max_model_len)
        dummy.run(dummy.prefill(min(8, largest)))  # the first calls of a library are slow
        deadline = time.process_time() + PROFILE_CPU_S
        records = []
        for works in self._profile_steps(dummy, plan.ceiling, largest):
            if self.kind == "cuda" and _only_decodes(works):
                continue
            records.append(dummy.quicker(works))
            if time.process_time() > deadline:
                break
        prefills = [record for record in records if record.num_prefill_tokens]
        rate_ms = min((r.step_ms / r.num_prefill_tokens for r in prefills), default=1.0)
        affordable = min(budget, max(int(1000 * MAX_STEP_S / rate_ms), MIN_CHUNK_TOKENS))
        peak = self._peak_bytes(dummy, affordable)
        return math.ceil(peak * budget / affordable), records

    def _time_decodes(self, runner: Runner, plan: MemoryPlan) -> list[StepRecord]:
        """Time a GPU's decodes as they will run: by the graphs of the runner that serves. Launched
        one operation after the other, they take as long as a chunk, and the first cap may be 1."""
        dummy = _Dummy(runner, min(self.max_model_len, plan.kv_tokens))
        steps = self._profile_steps(dummy, plan.ceiling, self.max_model_len)
        return [dummy.quicker(works) for works in steps if _only_decodes(works)]

    def _rehearse(self, runner: Runner, plan: MemoryPlan) -> None:
        """Run prefills of many sizes, the largest first. At each new size torch takes memory and
        the driver loads kernels. In traffic these hiccups would leave prefill no room beside
        decodes for two minutes."""
        dummy = _Dummy(runner, min(self.max_model_len, plan.kv_tokens))
        deadline = time.monotonic() + PREPARE_S
        for size in reversed(graph_sizes(self.config.max_num_batched_tokens)):
            dummy.run(dummy.prefill(size))
            if time.monotonic() > deadline:
                break

    def _profile_steps(
        self, dummy: "_Dummy", ceiling: int, largest: int
    ) -> Iterator[list[StepWork]]:
        short, long = min(32, self.max_model_len), min(FIRST_CONTEXT, self.max_model_len)
        on_cpu = self.kind == "cpu"
        yield dummy.prefill(min(32, largest))
        yield dummy.decodes(1, short)
        yield dummy.decodes(min(8, ceiling), short)
        yield dummy.decodes(min(8, ceiling), long)
        if on_cpu:  # a GPU reads that context by so few programs that it tells nothing of batches
            yield dummy.last_chunk(min(32, largest))
        yield dummy.prefill(min(128, largest))
        yield dummy.decodes(min(32, ceiling), short)
        yield dummy.decodes(1, long)
        if on_cpu:
            yield dummy.last_chunk(min(128, largest))
        else:  # where reading the weights hides what so few tokens cost
            yield dummy.prefill(min(1024, largest))
            yield dummy.decodes(min(32, ceiling), min(1024, self.max_model_len))

    def _peak_bytes(self, dummy: "_Dummy", num_tokens: int) -> int:
        works = dummy.prefill(num_tokens)
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            dummy.run(works)
            return int(torch.cuda.max_memory_allocated(self.device) - before)
        if not self.resources.reset_peak():
            return 0
        before = self.resources.resident_bytes(os.getpid())
        dummy.run(works)
        return max(self.resources.peak_bytes() - before, 0)

    # Limits

    def _predicted_cap(self, times: StepTimes, ceiling: int) -> int:
        if self.config.itl_ms is None or times.model is None:
            return ceiling
        return predicted_cap(
            times.model,
            times.model.resid_q,
            itl_ms=self.config.itl_ms,
            kv_per_seq=min(self.max_model_len / 2, FIRST_CONTEXT),
            ceiling=ceiling,
        )

    def _limits(self, ceiling: int, predicted: int) -> EngineLimits:
        config = self.config
        return EngineLimits(
            epoch=config.epoch,
            cap=min(config.initial_num_seqs or predicted, ceiling),
            max_num_batched_tokens=config.max_num_batched_tokens,
            itl_ms=config.itl_ms,
            ttft_ms=config.ttft_ms,
            policy=policy_in_force(config.scheduling_policy, config.ttft_ms),
            hold_share=config.hold_share,
        )

    def _scheduler(self, plan: MemoryPlan, limits: EngineLimits) -> Scheduler:
        caching = self.config.enable_prefix_caching
        return Scheduler(
            BlockPool(plan.num_blocks, self.block_size, prefix_caching=caching),
            limits,
            max_model_len=self.max_model_len,
            vocab_size=self.decoder.shape.vocab_size,
            eos_token_ids=self.eos,
            static=self._static(plan.ceiling),
            speculation=self.config.speculative_config,
            num_ahead=1 if self.kernels.name == "triton" else 0,
            scored_logits=SCORED_LOGITS if self.device.type == "cpu" else GPU_SCORED_LOGITS,
            ceiling=plan.ceiling,
        )

    def _static(self, ceiling: int) -> StaticBatching | None:
        """Static batches, of no more sequences than the memory holds: more would never be full."""
        config = self.config
        if config.batching_mode != "static" or config.static_batch_size is None:
            return None
        size = min(config.static_batch_size, ceiling)
        return StaticBatching(size, config.static_batch_timeout_ms / 1000)

    def _ready(
        self,
        plan: MemoryPlan,
        predicted: int,
        limits: EngineLimits,
        memory: MemoryReport,
        times: StepTimes,
    ) -> Ready:
        return Ready(
            ceiling=plan.ceiling,
            predicted_cap=predicted,
            cap=limits.cap,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=plan.num_blocks,
            kv_tokens=plan.kv_tokens,
            memory=memory,
            step_model=times.model,
            kernels=self.kernels.name,
        )


class _Dummy:
    """Steps of dummy sequences with arbitrary block contents: only their cost matters. Decodes have
    blocks of their own as far as possible: a CPU cache would hold shared ones."""

    def __init__(self, runner: Runner, max_model_len: int) -> None:
        self._runner = runner
        self._max_model_len = max_model_len

    def prefill(self, num_tokens: int) -> list[StepWork]:
        """Whole prompts, together `num_tokens`."""
        works = []
        while num_tokens > 0:
            count = min(num_tokens, self._max_model_len)
            works.append(StepWork(self._sequence(count), 0, count, samples=True))
            num_tokens -= count
        return works

    def last_chunk(self, num_tokens: int) -> list[StepWork]:
        """The end of the longest prompt: a chunk costs most with all its context before it."""
        sequence = self._sequence(self._max_model_len)
        return [StepWork(sequence, self._max_model_len - num_tokens, num_tokens, samples=True)]

    def decodes(self, count: int, context: int) -> list[StepWork]:
        """One token each for `count` sequences of `context` tokens."""
        sequences = [self._sequence(context, place) for place in range(count)]
        return [StepWork(sequence, context - 1, 1, samples=True) for sequence in sequences]

    def run(self, works: list[StepWork]) -> StepRecord:
        started = time.monotonic()
        self._runner.execute(works)
        ended = time.monotonic()
        return StepRecord(
            at_s=ended,
            num_decodes=sum(1 for work in works if work.num_tokens == 1),
            num_kv_tokens=sum(work.start + work.num_tokens for work in works),
            num_prefill_tokens=sum(work.num_tokens for work in works if work.num_tokens > 1),
            step_ms=1000 * (ended - started),
        )

    def quicker(self, works: list[StepWork]) -> StepRecord:
        """Run `works` twice, and return the quicker run."""
        return min((self.run(works) for _ in range(2)), key=lambda record: record.step_ms)

    def _sequence(self, num_tokens: int, place: int = 0) -> Sequence:
        request = Submit("", packed([0] * num_tokens), 1, 0.0, 0, False, [], 0, 0.0)
        sequence = Sequence(request, seed=0, token_ids=request.prompt_token_ids)
        size = self._runner.block_size
        needed, num_blocks = blocks_for(num_tokens, size), blocks_for(self._max_model_len, size)
        sequence.block_ids = [(place * needed + i) % num_blocks for i in range(needed)]
        return sequence


def _only_decodes(works: list[StepWork]) -> bool:
    return all(work.num_tokens == 1 for work in works)


def _prepare(runner: Runner) -> None:
    """Do work now that would wait for idle time: a worker under constant load has none."""
    deadline = time.monotonic() + PREPARE_S
    while time.monotonic() < deadline and runner.use_idle_time():
        pass


def _run_dtype(asked: str, decoder: DecoderConfig, kind: str) -> str:
    try:
        return resolve_dtype(asked, decoder.shape, on_cpu=kind == "cpu")
    except SizingError as error:
        raise UnsupportedModel(str(error)) from error


def _refuse_unless_fits(plan: MemoryPlan, decoder: DecoderConfig) -> None:
    if not plan.fits:
        raise DoesNotFit(f"{plan.explain()} {advice(plan, decoder.shape)}")


def refuse_unless_free(plan: MemoryPlan, free_bytes: int, total_bytes: int) -> None:
    """DoesNotFit if less GPU memory is free than planned, mostly because others share the GPU (time
    slices, MPS). The query itself created this process's context, so that is not free any more."""
    needed = plan.fixed_bytes - plan.reserve_bytes - CONTEXT_BYTES
    needed += plan.kv_tokens * plan.kv_bytes_per_token
    if needed <= free_bytes:
        return
    is_shared = total_bytes - free_bytes > 2 * CONTEXT_BYTES
    why = "something else uses it" if is_shared else "the rest is CUDA's own"
    raise DoesNotFit(
        f"{needed / 2**30:.1f} GiB of the GPU are planned, and {free_bytes / 2**30:.1f} of its "
        f"{total_bytes / 2**30:.1f} GiB are free: {why}. A lower --gpu-memory-utilization "
        "(spec.batching.memoryUtilization) plans less."
    )
