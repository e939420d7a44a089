"""From a configuration to an engine that makes vectors: weights, memory, profile."""

import time
from collections.abc import Callable, Sequence

import torch
from sluice_core.contract import MemoryReport
from sluice_core.errors import DoesNotFit, UnsupportedModel
from sluice_core.heap import release_freed
from sluice_core.model.architecture import DTYPE_BYTES, SizingError
from sluice_core.model.encoders import EncoderShape
from sluice_core.model.files import Directory, checkpoint_dir
from sluice_core.model.sentence import Sentence
from sluice_core.model.sizing import MIB
from sluice_core.model.stored import Weights, read_config, with_stored_dtype
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord, StepTimes
from sluice_core.wire import Ready
from sluice_kernels.interface import Kernels

from ..base.config import EngineConfig
from ..base.resources import Resources
from ..execution.encoders.encoder import Encoder
from ..execution.encoders.files import EncoderFiles
from ..execution.encoders.pooling import Pooler
from ..execution.encoders.texts import FlatTexts
from ..execution.weights import random_weights
from ..scheduling.texts import TextQueue, WaitingText
from .encoding import EncodingEngine, record_of
from .machine import Machine

Progress = Callable[[str, int], None]
"""(phase, percent) of the start."""
PROFILED = ((8,), (8,) * 8, (64,) * 4, (128,) * 4, (16,) * 32)
"""Lengths of the texts of each dummy step."""
PROFILE_S = 1.0


class VectorModel:
    """The model of an `EncodingEngine`: encoder and pooling on one device."""

    def __init__(self, encoder: Encoder, pooler: Pooler, device: torch.device) -> None:
        self._encoder, self._pooler, self._device = encoder, pooler, device

    @torch.inference_mode()
    def vectors(self, texts: Sequence[WaitingText]) -> list[bytes | None]:
        """Packed float32 of each text, or None if it is not finite."""
        batch = FlatTexts.of(
            [text.token_ids for text in texts],
            self._device,
            skipped=[text.num_skipped for text in texts],
        )
        found = self._pooler(self._encoder.hidden(batch), batch).cpu()
        is_finite = found.isfinite().all(dim=-1).tolist()
        rows = found.numpy()
        return [row.tobytes() if fine else None for row, fine in zip(rows, is_finite, strict=True)]


def start(config: EngineConfig, progress: Progress) -> tuple[EncodingEngine, Ready]:
    """Load the model and measure it. Raises StartupError with one sentence."""
    machine, source = Machine(config, Resources()), Directory(checkpoint_dir(config.model))
    shape = _shape(source, config)
    sentence = Sentence.read(source, shape.hidden_size)
    dtype = config.dtype if config.dtype != "auto" else _own_dtype(shape.dtype, machine.kind)
    max_len = min(shape.max_position, sentence.max_seq_length or shape.max_position)
    max_len = min(max_len, config.max_model_len or max_len)
    base_bytes = machine.base_bytes()
    planned = _plan(shape, machine, config, dtype, base_bytes, max_len)
    progress("weights", 0)
    kernels = machine.kernels(dtype)
    model = _load(config, source, shape, sentence, kernels, getattr(torch, dtype), machine.device)
    release_freed()
    progress("profile", 60)
    times = StepTimes()
    times.set_profile(_profile(model, max_len))
    ceiling = config.max_num_seqs or config.max_num_batched_tokens
    cap = min(config.initial_num_seqs or ceiling, ceiling)
    limits = EngineLimits(config.epoch, cap, config.max_num_batched_tokens)
    ready = Ready(
        ceiling=ceiling,
        predicted_cap=ceiling,
        cap=cap,
        max_model_len=max_len,
        memory=MemoryReport(planned, planned | {"kv_cache_bytes": 0}, 0),
        step_model=times.model,
        kernels=kernels.name,
    )
    return EncodingEngine(TextQueue(limits), model, times, max_len), ready


def _shape(source: Directory, config: EngineConfig) -> EncoderShape:
    config_json = read_config(source)
    if config.load_format != "dummy":
        config_json = with_stored_dtype(config_json, Weights.of(source))
    try:
        return EncoderShape.from_config(config_json)
    except SizingError as error:
        raise UnsupportedModel(str(error)) from error


def _load(
    config: EngineConfig,
    source: Directory,
    shape: EncoderShape,
    sentence: Sentence,
    kernels: Kernels,
    dtype: torch.dtype,
    device: torch.device,
) -> VectorModel:
    if config.load_format == "dummy":
        read = random_weights(config.seed or 0, dtype, device)
        pooler = Pooler(sentence, lambda folder: read)
        return VectorModel(Encoder(shape, read, kernels), pooler, device)
    files = EncoderFiles(source.path, dtype, device, shape.family)
    found = VectorModel(Encoder(shape, files.read, kernels), Pooler(sentence, files.folder), device)
    files.finish()
    return found


def _own_dtype(stored: str, kind: str) -> str:
    """The checkpoint's; float16 becomes float32 on a CPU, where few have products for it."""
    return "float32" if stored == "float16" and kind == "cpu" else stored


def _plan(
    shape: EncoderShape,
    machine: Machine,
    config: EngineConfig,
    dtype: str,
    base_bytes: int,
    max_len: int,
) -> dict[str, int]:
    """Bytes of each part; raises DoesNotFit."""
    size, total = DTYPE_BYTES[dtype], machine.total_bytes()
    longest = max(config.max_num_batched_tokens, max_len)
    plan = {
        "total_bytes": total,
        "weights_bytes": shape.weights_bytes(size),
        "activation_bytes": shape.activation_bytes(longest, size),
        "reserve_bytes": base_bytes,
    }
    needed = sum(plan.values()) - total
    if needed > config.memory_utilization * total:
        raise DoesNotFit(
            f"weights, a step of {longest} tokens and the processes take {needed // MIB} MiB, and "
            f"{config.memory_utilization:.0%} of {total // MIB} MiB may be used; a smaller "
            "--max-num-batched-tokens takes less."
        )
    return plan


def _profile(model: VectorModel, max_len: int) -> list[StepRecord]:
    """Time a few steps of dummy texts, each the quicker of two runs."""
    records, deadline = [], time.monotonic() + PROFILE_S
    for lengths in PROFILED:
        cut = [min(length, max_len) for length in lengths]
        texts = [
            WaitingText(str(number), [0] * length, 0, 0.0) for number, length in enumerate(cut)
        ]
        runs = []
        for _ in range(2):
            started = time.monotonic()
            model.vectors(texts)
            runs.append(time.monotonic() - started)
        records.append(record_of(cut, time.monotonic(), min(runs)))
        if time.monotonic() > deadline:
            break
    return records
