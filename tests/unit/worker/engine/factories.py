"""Schedulers, requests, checkpoints and engines for the tests of this folder."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from sluice_core.contract import SchedulingPolicy
from sluice_core.model.files import read_json
from sluice_core.model.sizing import MAX_GATHER_BYTES, MAX_SCORES_BYTES
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepTimes
from sluice_core.wire import Finished, Submit, packed
from sluice_core.work import Sampling
from sluice_kernels.choose import choose
from sluice_kernels.interface import Kernels
from sluice_kernels.plain import PlainKernels
from sluice_worker.base.config import NgramSpeculation
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.gpu.runner import GpuRunner
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.runner import Runner
from sluice_worker.execution.weights import Checkpoint
from sluice_worker.scheduling.blocks import BlockPool
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.static_batch import StaticBatching
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 199
PLAIN = PlainKernels(MAX_GATHER_BYTES, MAX_SCORES_BYTES)


def create_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    cap: int = 4,
    budget: int = 48,
    itl_ms: float | None = None,
    max_model_len: int = 512,
    prefix_caching: bool = True,
    eos: Iterable[int] = (),
    static: StaticBatching | None = None,
    speculation: NgramSpeculation | None = None,
    scored_at_once: int = 128,
    num_ahead: int = 0,
    ttft_ms: float | None = None,
    policy: SchedulingPolicy = "deadline",
    ceiling: int = 0,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks, block_size, prefix_caching=prefix_caching),
        EngineLimits(0, cap, budget, itl_ms, ttft_ms, policy),
        max_model_len=max_model_len,
        vocab_size=VOCAB,
        eos_token_ids=frozenset(eos),
        static=static,
        speculation=speculation,
        scored_logits=scored_at_once * VOCAB,
        num_ahead=num_ahead,
        ceiling=ceiling,
    )


def create_request(
    request_id: str,
    prompt: int | list[int],
    *,
    max_tokens: int = 8,
    temperature: float = 0.0,
    seed: int | None = None,
    min_tokens: int = 0,
    stop_token_ids: Iterable[int] = (),
    ignore_eos: bool = False,
    submitted_s: float = 0.0,
    salt: str = "",
    sampling: Sampling | None = None,
    ttft_ms: float | None = None,
    priority: int = 0,
    is_another: bool = False,
    is_background: bool = False,
) -> Submit:
    """A request; a prompt given as a length is made of tokens that no other request shares."""
    if isinstance(prompt, int):
        start = sum(request_id.encode())
        prompt = [(start * 31 + 7 * i * i + i) % VOCAB for i in range(prompt)]
    return Submit(
        request_id=request_id,
        prompt=packed(prompt),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        stop_token_ids=list(stop_token_ids),
        min_tokens=min_tokens,
        submitted_s=submitted_s,
        cache_salt=salt,
        sampling=sampling or Sampling(),
        arrived_s=submitted_s,
        ttft_ms=ttft_ms,
        priority=priority,
        is_another=is_another,
        is_background=is_background,
    )


def create_requests(lengths: Iterable[int], *, max_tokens: int = 8) -> list[Submit]:
    return [create_request(f"r{n}", n, max_tokens=max_tokens) for n in lengths]


def small_config(changes: Mapping[str, object]) -> dict[str, object]:
    """Of a model small enough to run in a test, as transformers names what it is made of."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.15,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        **changes,
    }


def save_llama(path: Path, **changes: object) -> LlamaForCausalLM:
    """A small random Llama with grouped heads, saved by transformers; returned for reference."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**small_config(changes))).eval()
    model.save_pretrained(path, max_shard_size="100KB" if changes.get("sharded") else "5GB")
    return model


def load_decoder(
    path: Path,
    max_model_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    kernels: Kernels = PLAIN,
) -> Decoder:
    config = DecoderConfig.from_json(read_json(path, "config.json"), max_model_len)
    source = Checkpoint(path, dtype, torch.device("cpu"))
    model = Decoder(config, source.read, kernels)
    source.finish(config.shape)
    return model


def best_kernels(dtype: torch.dtype = torch.float32) -> Kernels:
    """What a worker would choose on this machine."""
    return choose(
        torch.device("cpu"),
        dtype,
        None,
        os.environ,
        max_gather_bytes=MAX_GATHER_BYTES,
        max_scores_bytes=MAX_SCORES_BYTES,
    )


def create_engine(path: Path, scheduler: Scheduler) -> Engine:
    return create_engine_of(load_decoder(path), scheduler)


def create_engine_of(model: Decoder, scheduler: Scheduler) -> Engine:
    pool = scheduler.pool
    runner = Runner(model, pool.num_total, pool.block_size, scheduler.eos_token_ids)
    return Engine(scheduler, runner, StepTimes())


def create_gpu_engine_of(model: Decoder, scheduler: Scheduler) -> Engine:
    """The engine of a GPU, here on a CPU: its kernels' references, and no CUDA graphs."""
    pool, longest = scheduler.pool, scheduler.max_model_len
    scheduler.cache.num_ahead = 1
    runner = GpuRunner(
        model, pool.num_total, pool.block_size, scheduler.eos_token_ids, ceiling=16,
        max_model_len=longest, activation_bytes=1 << 20,
    )  # fmt: skip
    return Engine(scheduler, runner, StepTimes())


def run_all(engine: Engine, requests: Iterable[Submit]) -> dict[str, list[int]]:
    """Submit everything at once and step until idle; each request's output."""
    outputs: dict[str, list[int]] = {}
    for request in requests:
        outputs[request.request_id] = []
        assert engine.submit(request, 0.0) is None
    while engine.has_work:
        collect(engine, outputs)
    assert engine.scheduler.check_integrity() is None
    assert engine.scheduler.pool.num_used == 0
    return outputs


def collect(engine: Engine, outputs: dict[str, list[int]]) -> list[Finished]:
    """One step; its tokens are appended to `outputs`."""
    report, failed = engine.step()
    assert report is not None
    for token in report.tokens:
        outputs[token.request_id].append(token.token_id)
    return failed


class Sliced(list[int]):
    """A list that counts what is cut out of it."""

    num_slices = 0

    def __getitem__(self, at: Any) -> Any:
        self.num_slices += isinstance(at, slice)
        return super().__getitem__(at)
