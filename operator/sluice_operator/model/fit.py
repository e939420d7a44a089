"""Decides if the model fits, before any pod exists. Pure: its numbers against the memory."""

from dataclasses import dataclass, replace
from typing import Literal

from sluice_core.bounded import count
from sluice_core.engines import FOREIGN
from sluice_core.model.images import ImageShape
from sluice_core.model.sizing import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_BLOCK_SIZE,
    DTYPE_BYTES,
    HOST_BYTES,
    MemoryPlan,
    MemoryRequest,
    SizingError,
    most_sequences,
)
from sluice_core.model.tasks import image_part

from ..reasons import Reason
from ..spec.service import EngineName, Spec, Task
from .checkpoint import ModelFacts, Refused, Unread
from .disk import with_spare

UNREAD_CAP = 4
"""The assumed ceiling of a model that cannot be read, until a pod has reported its own."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for one object. `memory` and `checkpoint` are None if nothing could be read;
    `is_pending`: it is not known yet. `disk_bytes`: of the node's disk, for a hub's model; 0 where
    that is not known."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str
    memory: MemoryPlan | None = None
    checkpoint: ModelFacts | None = None
    is_pending: bool = False
    disk_bytes: int = 0


def judge(spec: Spec, found: ModelFacts | Unread | Refused) -> Fit:
    """Memory and disk for one pod."""
    return replace(_judge(spec, found), disk_bytes=with_spare(_fetched_bytes(spec, found)))


def _fetched_bytes(spec: Spec, found: ModelFacts | Unread | Refused) -> int:
    """Bytes of weights that the pod fetches. Our worker takes only the files that the headers are
    of; others take every safetensors file."""
    if spec.model.repo is None or isinstance(found, Unread):
        return 0
    engine = FOREIGN.get(spec.engine.name)
    if engine and engine.takes_gguf:
        return found.download.gguf
    stored = found.stored_bytes if isinstance(found, ModelFacts) else 0
    return max(stored, found.download.tensors) if engine else stored


def _judge(spec: Spec, found: ModelFacts | Unread | Refused) -> Fit:
    """Judge one pod by the memory arithmetic. Another engine may serve what we
    cannot read or compute: then it decides."""
    engine = FOREIGN.get(spec.engine.name)
    if isinstance(found, Refused) and found.is_final:
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, found.message)
    if engine and not engine.has_our_arithmetic and not isinstance(found, Unread):
        return _left_to_the_engine(f"{spec.engine.name} sizes itself")
    if engine and isinstance(found, Refused):
        return _left_to_the_engine(f"{found.message} {spec.engine.name} decides")
    if isinstance(found, Unread):
        return _unread(found, spec.engine.name)
    if isinstance(found, Refused):
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, found.message)
    if engine and found.task != "generate":
        return _left_to_the_engine(f"{spec.engine.name} sizes itself for {spec.model.task}")
    if not engine and spec.model.task not in (possible := _tasks(found)):
        message = f"spec.model.task is {spec.model.task}, and the checkpoint is for "
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, f"{message}{' or '.join(possible)}.")
    try:
        memory = _plan(spec, found)
    except SizingError as e:
        if engine:
            return _left_to_the_engine(f"{e} {spec.engine.name} decides")
        return Fit("False", Reason.IMPOSSIBLE_SIZE, str(e), None, found)
    if memory.fits:
        return Fit("True", Reason.FITS, memory.explain(), memory, found)
    message = f"{memory.explain()} {found.advice(memory)}"
    return Fit("False", Reason.INSUFFICIENT_MEMORY, message, memory, found)


def _tasks(found: ModelFacts) -> tuple[Task, ...]:
    """The tasks that our engine does with a checkpoint."""
    reads_texts = not isinstance(found.shape, ImageShape)
    reads_images = image_part(found.shape) is not None
    match found.task:
        case "generate":
            return ("Generate",)
        case "classify":
            return ("Classify", "Score") if reads_texts else ("ImageClassify",)
        case "embed" if not reads_images:
            return ("Embed",)
        case "embed":
            return ("Embed", "ImageEmbed", "ImageClassify") if reads_texts else ("ImageEmbed",)


def _unread(found: Unread, engine: EngineName) -> Fit:
    if found.is_pending:
        return Fit("Unknown", Reason.HEADERS_UNAVAILABLE, found.message, is_pending=True)
    if engine in FOREIGN:
        return _left_to_the_engine(f"{found.message}: {engine} sizes itself")
    message = f"{found.message}: the worker sizes itself"
    return Fit("Unknown", Reason.HEADERS_UNAVAILABLE, message)


def _left_to_the_engine(message: str) -> Fit:
    return Fit("Unknown", Reason.LEFT_TO_ENGINE, message)


def ceiling_of(spec: Spec, fit: Fit) -> int | None:
    """`--max-num-seqs` that memory and the user allow; None: the worker sizes itself. Another
    engine has a default, as it must be told its capacity."""
    if fit.memory:
        return fit.memory.ceiling
    is_told = spec.batching.max_num_seqs is not None or spec.engine.name in FOREIGN
    return most_num_seqs(spec) if is_told else None


def most_num_seqs(spec: Spec) -> int:
    """The most sequences that the user allows, also by default, whatever the memory."""
    engine = FOREIGN.get(spec.engine.name)
    default = engine.capacity if engine else None
    return most_sequences(spec.batching.max_num_seqs or default, _budget(spec))


def _budget(spec: Spec) -> int:
    return spec.batching.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS


def loading_bytes(fit: Fit) -> int:
    """Host memory in which a pod with a GPU loads the model."""
    found = fit.checkpoint
    return found.host_bytes if found else HOST_BYTES


def _plan(spec: Spec, found: ModelFacts) -> MemoryPlan:
    device: Literal["cuda", "cpu"] = "cuda" if spec.hardware.has_devices else "cpu"
    is_ours = spec.engine.name == "Sluice"
    quantization = _argument(spec, "quantization") if is_ours else None
    return found.plan(
        MemoryRequest(
            total_bytes=spec.hardware.memory_bytes,
            utilization=spec.batching.memory_utilization,
            weights_bytes=found.weights_bytes - found.bytes_saved(quantization),
            max_num_batched_tokens=_budget(spec),
            max_model_len=spec.model.max_model_len or found.shape.default_len,
            block_size=_number(spec, "block-size") or DEFAULT_BLOCK_SIZE[device],
            dtype_bytes=DTYPE_BYTES[found.dtype],
            max_num_seqs=spec.batching.max_num_seqs,
            device=device,
            num_blocks=_number(spec, "num-gpu-blocks-override"),
        )
    )


def _argument(spec: Spec, flag: str) -> str | None:
    """The value of a flag in `spec.engine.args`."""
    given = (arg.removeprefix("--").partition("=") for arg in spec.engine.args)
    return next((value for name, _, value in given if name == flag), None)


def _number(spec: Spec, flag: str) -> int | None:
    given = _argument(spec, flag)
    return count(given) or None
