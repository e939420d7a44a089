"""From a configuration to an engine that makes vectors: weights, memory, profile."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from sluice_core.contract import MemoryReport
from sluice_core.errors import DoesNotFit
from sluice_core.heap import release_freed
from sluice_core.model.architecture import DTYPE_BYTES, HEAD, ModelShape, weights_bytes
from sluice_core.model.classes import Classes
from sluice_core.model.encoders import EncoderShape
from sluice_core.model.files import Directory, checkpoint_dir
from sluice_core.model.sentence import Sentence, TokenScore
from sluice_core.model.sizing import (
    DEFAULT_BLOCK_SIZE,
    MIB,
    activation_bytes,
    kv_bytes_per_token,
)
from sluice_core.model.stored import Weights, read_config, with_stored_dtype
from sluice_core.model.tasks import read_sentence, task_of, text_shape, without_head
from sluice_core.port import EngineLimits
from sluice_core.steptime import StepRecord, StepTimes
from sluice_core.wire import Ready
from sluice_kernels.interface import Kernels
from torch import Tensor

from ..base.config import EngineConfig
from ..base.resources import Resources
from ..execution.encoders.classifier import DecoderHead, EncoderHead, TokenHead
from ..execution.encoders.decoded import DecodedTexts
from ..execution.encoders.encoder import Encoder
from ..execution.encoders.files import VectorFiles, of_decoder, of_encoder
from ..execution.encoders.pooling import Pooler
from ..execution.encoders.texts import FlatTexts
from ..execution.models.config import DecoderConfig
from ..execution.models.decoder import DecoderBody
from ..execution.models.linear import ReadTensor
from ..execution.weights import random_weights
from ..scheduling.texts import TextQueue, WaitingText
from .encoding import EncodingEngine, record_of
from .machine import Machine

Progress = Callable[[str, int], None]
"""(phase, percent) of the start."""
Ending = Callable[[Tensor, FlatTexts], Tensor]
"""(rows [num_rows, hidden_size], texts) -> float32 [num_texts, width]."""
PROFILED = ((8,), (8,) * 8, (64,) * 4, (128,) * 4, (16,) * 32)
"""Lengths of the texts of each dummy step."""
PROFILE_S = 1.0


class TextRows(Protocol):
    """A model that reads texts."""

    def hidden(self, texts: FlatTexts) -> Tensor:
        """The last layer's output, [num_rows, hidden_size]."""


class VectorModel:
    """The model of an `EncodingEngine` on one device: it reads texts, and `ending` makes a vector
    of the rows of each, or the numbers of its classes."""

    def __init__(self, rows: TextRows, ending: Ending, device: torch.device) -> None:
        self._rows, self._ending, self._device = rows, ending, device

    @torch.inference_mode()
    def vectors(self, texts: Sequence[WaitingText]) -> list[bytes | None]:
        """Packed float32 of each text, or None if it is not finite."""
        batch = FlatTexts.of(
            [text.token_ids for text in texts],
            self._device,
            skipped=[text.num_skipped for text in texts],
            seconds=[text.num_second for text in texts],
        )
        found = self._ending(self._rows.hidden(batch), batch).cpu()
        is_finite = found.isfinite().all(dim=-1).tolist()
        rows = found.numpy()
        return [row.tobytes() if fine else None for row, fine in zip(rows, is_finite, strict=True)]


def start(config: EngineConfig, progress: Progress) -> tuple[EncodingEngine, Ready]:
    """Load the model and measure it. Raises StartupError with one sentence."""
    machine, source = Machine(config, Resources()), Directory(checkpoint_dir(config.model))
    asked = _asked(source, config, machine.kind)
    base_bytes = machine.base_bytes()
    planned = _plan(asked, machine, config, base_bytes)
    progress("weights", 0)
    kernels = _kernels(asked, machine)
    model = _load(config, source, asked, machine, kernels)
    release_freed()
    progress("profile", 60)
    times = StepTimes()
    times.set_profile(_profile(model, asked.max_len))
    ceiling = config.max_num_seqs or config.max_num_batched_tokens
    cap = min(config.initial_num_seqs or ceiling, ceiling)
    limits = EngineLimits(config.epoch, cap, config.max_num_batched_tokens)
    ready = Ready(
        ceiling=ceiling,
        predicted_cap=ceiling,
        cap=cap,
        max_model_len=asked.max_len,
        memory=MemoryReport(planned, planned | {"kv_cache_bytes": 0}, 0),
        step_model=times.model,
        kernels=kernels.name,
    )
    return EncodingEngine(TextQueue(limits), model, times, asked.max_len), ready


class _Asked(NamedTuple):
    """What is to be loaded. `dtype`: its name; `max_len`: tokens of the longest text; `classes`:
    of a classifier."""

    classes: Classes | None
    config_json: Mapping[str, object]
    shape: EncoderShape | ModelShape
    sentence: Sentence
    dtype: str
    max_len: int


def _asked(source: Directory, config: EngineConfig, kind: str) -> _Asked:
    config_json = read_config(source)
    if config.load_format != "dummy":
        config_json = with_stored_dtype(config_json, Weights.of(source))
    shape = text_shape(config_json)
    task = task_of(source, config_json)
    sentence = read_sentence(task, source, shape.hidden_size)
    dtype = config.dtype if config.dtype != "auto" else _own_dtype(shape.dtype, kind)
    most = shape.max_position if isinstance(shape, EncoderShape) else shape.default_len
    limits = (most, sentence.max_seq_length or most, config.max_model_len or most)
    classes = Classes.read(source, config_json) if task == "classify" else None
    return _Asked(classes, config_json, shape, sentence, dtype, min(limits))


def _own_dtype(stored: str, kind: str) -> str:
    """The checkpoint's; float16 becomes float32 on a CPU, where few have products for it."""
    return "float32" if stored == "float16" and kind == "cpu" else stored


def _load(
    config: EngineConfig, source: Directory, asked: _Asked, machine: Machine, kernels: Kernels
) -> VectorModel:
    dtype, device, shape = getattr(torch, asked.dtype), machine.device, asked.shape
    spellings = of_encoder(shape.family) if isinstance(shape, EncoderShape) else of_decoder
    files = None
    if config.load_format != "dummy":
        files = VectorFiles(source.path, dtype, device, spellings)
    read = files.read if files else random_weights(config.seed or 0, dtype, device)
    block_size = config.block_size or DEFAULT_BLOCK_SIZE[machine.kind]
    rows = _rows(asked, read, kernels, block_size)
    ending = _token_head(source, asked, read, rows) or _ending(asked, read, files)
    if files:
        files.finish()
    return VectorModel(rows, ending, device)


def _rows(asked: _Asked, read: ReadTensor, kernels: Kernels, block_size: int) -> TextRows:
    if isinstance(asked.shape, EncoderShape):
        return Encoder(asked.shape, read, kernels)
    config = DecoderConfig.from_json(without_head(asked.config_json), asked.max_len)
    return DecodedTexts(DecoderBody(config, read, kernels), block_size)


def _ending(asked: _Asked, read: ReadTensor, files: VectorFiles | None) -> Ending:
    if asked.classes is None:
        return Pooler(asked.sentence, files.folder if files else lambda folder: read)
    num_classes = len(asked.classes.labels)
    if isinstance(asked.shape, EncoderShape):
        return EncoderHead(asked.shape, num_classes, read)
    return DecoderHead(asked.shape, num_classes, read)


def _token_head(
    source: Directory, asked: _Asked, read: ReadTensor, rows: TextRows
) -> Ending | None:
    """The head of a reranker that writes; None for another model."""
    score = TokenScore.read(source, asked.shape.vocab_size) if asked.classes else None
    if score is None or not isinstance(rows, DecodedTexts):
        return None
    shape = ModelShape.from_config(asked.config_json)
    head = rows.model.embedding
    if not shape.tie_word_embeddings:
        head = read(HEAD, (shape.vocab_size, shape.hidden_size))
    return TokenHead(head, rows.model, score.true_id, score.false_id)


def _kernels(asked: _Asked, machine: Machine) -> Kernels:
    shape = asked.shape
    group = 1 if isinstance(shape, EncoderShape) else shape.num_heads // shape.num_kv_heads
    return machine.kernels(asked.dtype, group)


def _plan(asked: _Asked, machine: Machine, config: EngineConfig, base_bytes: int) -> dict[str, int]:
    """Bytes of each part; raises DoesNotFit."""
    total, longest = machine.total_bytes(), max(config.max_num_batched_tokens, asked.max_len)
    weights, activation = _sizes(asked.shape, longest, DTYPE_BYTES[asked.dtype])
    plan = {
        "total_bytes": total,
        "weights_bytes": weights,
        "activation_bytes": activation,
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


def _sizes(shape: EncoderShape | ModelShape, num_tokens: int, dtype_bytes: int) -> tuple[int, int]:
    """Bytes of the weights, and of a step of `num_tokens`: a decoder's has a layer's keys too."""
    if isinstance(shape, EncoderShape):
        return shape.weights_bytes(dtype_bytes), shape.activation_bytes(num_tokens, dtype_bytes)
    keys = num_tokens * kv_bytes_per_token(shape, dtype_bytes) // shape.num_layers
    step = activation_bytes(shape, num_tokens, 0, dtype_bytes)
    return weights_bytes(shape, dtype_bytes), step + keys


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
