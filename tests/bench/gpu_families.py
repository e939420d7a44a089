"""One small random model of each family on this GPU against transformers, for `bench.gpu`."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from bench.gpu_kernels import DEVICE, DTYPE, REHEARSED, num_processors
from sluice_core.model.files import read_json
from sluice_core.steptime import StepTimes
from sluice_core.wire import Submit
from sluice_kernels.triton.kernels import TritonKernels
from sluice_worker.engine.loop import Engine
from sluice_worker.execution.gpu.runner import GpuRunner
from sluice_worker.execution.models.config import DecoderConfig
from sluice_worker.execution.models.decoder import Decoder
from sluice_worker.execution.weights import Checkpoint
from sluice_worker.scheduling.scheduler import Scheduler
from sluice_worker.scheduling.sequence import Sequence
from sluice_worker.scheduling.step import StepWork
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from unit.worker.engine.factories import create_request, create_requests, create_scheduler, run_all
from unit.worker.execution.test_families_equal_transformers import MODELS, save_random

FAMILIES: tuple[str, ...] = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
FAMILIES += ("llama-yarn", "mixtral", "qwen3_moe")
LENGTHS, STEPS = ((17, 30), 2) if REHEARSED else ((17, 30, 40, 70), 20)
TOO_FAR = 1.2
"""Times as far from float32 as transformers is: as much is let off on a CPU."""


def family_checks() -> Iterator[tuple[str, Callable[[], float]]]:
    """For each: the share of greedy tokens that are not those of transformers, in float32; and by
    how much further it strays in 16 bit than `TOO_FAR` times as far as transformers."""
    for name in FAMILIES:
        yield f"{name}: tokens", partial(other_tokens, name)
    for name in ("mistral", "qwen3", "gemma2", "gemma3_text"):
        yield f"{name}: 16 bit", partial(strays_further, name)


def other_tokens(name: str) -> float:
    """Requests in chunks and batches, preempted too."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = save_random(Path(folder), name.partition("-")[0], MODELS[name]).to(DEVICE)
        ours = load(Path(folder), torch.float32)
    requests = create_requests(LENGTHS, max_tokens=STEPS)
    schedulers = (create_scheduler(budget=19), create_scheduler(num_blocks=7, max_model_len=96))
    outputs = [outputs_of(ours, scheduler, requests) for scheduler in schedulers]
    wrong = 0
    for request in requests:
        for found in outputs:
            tokens = found[request.request_id]
            logits = logits_of(theirs, request.prompt_token_ids + tokens)
            best = logits.argmax(dim=-1)[-1 - STEPS : -1].tolist()
            wrong += sum(a != b for a, b in zip(best, tokens, strict=True))
    return wrong / (STEPS * len(outputs) * len(requests))


def outputs_of(
    model: Decoder, scheduler: Scheduler, requests: list[Submit]
) -> dict[str, list[int]]:
    """Of an engine as a GPU has it."""
    scheduler.cache.num_ahead = 1
    pool = scheduler.pool
    runner = GpuRunner(
        model, pool.num_total, pool.block_size, scheduler.eos_token_ids, ceiling=4,
        max_model_len=scheduler.max_model_len, activation_bytes=1 << 20,
    )  # fmt: skip
    return run_all(Engine(scheduler, runner, StepTimes()), requests)


def strays_further(name: str) -> float:
    """Of the medians of all places' distances from the same logits in float32."""
    changes, family = {**MODELS[name], "initializer_range": 0.08}, name.partition("-")[0]
    prompt = create_request("logits", 60).prompt_token_ids
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        theirs = save_random(path, family, changes).to(DEVICE)
        exact = logits_of(theirs, prompt)
        theirs.to(DTYPE).save_pretrained(path / "half")
        given = {"dtype": DTYPE, "attn_implementation": "eager"}
        theirs = AutoModelForCausalLM.from_pretrained(path / "half", **given).to(DEVICE)
        ours = load(path / "half", DTYPE)
    far, allowed = (
        (logits - exact).norm(dim=1).median().item()
        for logits in (our_logits(ours, prompt), logits_of(theirs, prompt))
    )
    return float(max(0.0, far / allowed - TOO_FAR))


def load(path: Path, dtype: torch.dtype) -> Decoder:
    """The checkpoint of a directory on Triton's kernels."""
    config = DecoderConfig.from_json(read_json(path, "config.json"), 512)
    source = Checkpoint(path, dtype, DEVICE)
    group = config.shape.num_heads // config.shape.num_kv_heads
    model = Decoder(config, source.read, TritonKernels(group, num_processors()))
    source.finish(config.shape)
    return model


def logits_of(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Of each place, float32 [num_tokens, vocab_size]."""
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([tokens], device=DEVICE)).logits[0].float()
    return found


def our_logits(model: Decoder, prompt: list[int]) -> Tensor:
    """The same, as one prefill over pages in no order."""
    runner = GpuRunner(
        model, 16, 16, frozenset(), ceiling=1, max_model_len=256, activation_bytes=1 << 20
    )
    sequence = Sequence(create_request("r", prompt), seed=0, token_ids=prompt)
    sequence.block_ids = [7, 2, 9, 0, 12, 5]
    step = runner.build([StepWork(sequence, 0, len(prompt), samples=True)])
    with torch.inference_mode():
        return model.logits(model.hidden(step, runner.caches)).float()
