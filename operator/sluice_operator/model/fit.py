"""Decides if the model fits, before any pod exists. Pure: its numbers against the memory."""

from dataclasses import dataclass
from typing import Literal

from sluice_core.model.sizing import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_BLOCK_SIZE,
    DTYPE_BYTES,
    HOST_BYTES,
    MemoryPlan,
    SizingError,
    advice,
    bytes_saved,
    host_memory_bytes,
    most_sequences,
    plan_memory,
)

from ..reasons import Reason
from ..spec.service import Spec
from .checkpoint import ModelFacts, Unread

UNREAD_CAP = 4
"""The assumed ceiling of a model that cannot be read, until a pod has reported its own."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The checkpoint is there and cannot be served; the message says why."""

    message: str


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for one object. `memory` and `checkpoint` are None if nothing could be read;
    `is_pending`: it is not known yet."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str
    memory: MemoryPlan | None = None
    checkpoint: ModelFacts | None = None
    is_pending: bool = False


def judge(spec: Spec, found: ModelFacts | Unread | Refused) -> Fit:
    """The memory arithmetic of the design, section 5, for one pod."""
    if isinstance(found, Unread):
        why = Reason.HEADERS_UNAVAILABLE
        return Fit("Unknown", why, found.message, is_pending=found.is_pending)
    if isinstance(found, Refused):
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, found.message)
    try:
        memory = _plan(spec, found)
    except SizingError as e:
        return Fit("False", Reason.IMPOSSIBLE_SIZE, str(e), None, found)
    if memory.fits:
        return Fit("True", Reason.FITS, memory.explain(), memory, found)
    message = f"{memory.explain()} {advice(memory, found.shape)}"
    return Fit("False", Reason.INSUFFICIENT_MEMORY, message, memory, found)


def ceiling_of(spec: Spec, fit: Fit) -> int | None:
    """`--max-num-seqs` that memory and the user allow; None: the worker sizes itself."""
    if fit.memory:
        return fit.memory.ceiling
    return None if spec.batching.max_num_seqs is None else most_num_seqs(spec)


def most_num_seqs(spec: Spec) -> int:
    """The most sequences that the user allows, also by default, whatever the memory."""
    return most_sequences(spec.batching.max_num_seqs, _budget(spec))


def _budget(spec: Spec) -> int:
    return spec.batching.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS


def loading_bytes(fit: Fit) -> int:
    """Host memory in which a pod with a GPU loads the model."""
    found = fit.checkpoint
    return host_memory_bytes(found.shape, DTYPE_BYTES[found.dtype]) if found else HOST_BYTES


def _plan(spec: Spec, found: ModelFacts) -> MemoryPlan:
    device: Literal["cuda", "cpu"] = "cuda" if spec.hardware.accelerator == "nvidia" else "cpu"
    saved = bytes_saved(found.shape, found.dtype, _argument(spec, "quantization"))
    return plan_memory(
        found.shape,
        total_bytes=spec.hardware.memory_bytes,
        utilization=spec.batching.memory_utilization,
        weights_bytes=found.weights_bytes - saved,
        max_num_batched_tokens=_budget(spec),
        max_model_len=spec.model.max_model_len or found.shape.default_len,
        block_size=_number(spec, "block-size") or DEFAULT_BLOCK_SIZE[device],
        dtype_bytes=DTYPE_BYTES[found.dtype],
        max_num_seqs=spec.batching.max_num_seqs,
        device=device,
        num_blocks=_number(spec, "num-gpu-blocks-override"),
    )


def _argument(spec: Spec, flag: str) -> str | None:
    """The value of a flag in `spec.engine.args`."""
    given = dict(arg.removeprefix("--").split("=", 1) for arg in spec.engine.args)
    return given.get(flag)


def _number(spec: Spec, flag: str) -> int | None:
    given = _argument(spec, flag)
    return int(given) if given else None
