"""Decides if the model fits, before any pod exists. Pure: its numbers against the memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from sluice_core.bounded import count
from sluice_core.engines import FOREIGN
from sluice_core.engines.engine import ForeignEngine
from sluice_core.model.architecture import IS_QUANTISED
from sluice_core.model.gguf import GgufShape
from sluice_core.model.images import ImageShape
from sluice_core.model.parallel import ONE_GPU, Layout
from sluice_core.model.sizing import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_BLOCK_SIZE,
    DTYPE_BYTES,
    HOST_BYTES,
    LOADED_BITS,
    Indivisible,
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

_TENSOR = ("tensor-parallel-size", "tp", "tp-size", "num-shard")
_PIPELINE = ("pipeline-parallel-size", "pp", "pp-size")
"""Flags of vLLM, SGLang and TGI."""
_OTHER_PLACES = {
    *("ngl", "gpu-layers", "n-gpu-layers", "ot", "override-tensor", "cmoe", "cpu-moe", "ncmoe"),
    *("n-cpu-moe", "nkvo", "no-kv-offload", "hff", "hf-file", "hfr", "hf-repo", "m", "model"),
}
"""Flags of llama.cpp that keep weights off the GPU, or name another file."""
UNREAD_CAP = 4
"""The assumed ceiling of a model that cannot be read, until a pod has reported its own."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer for one object. `memory` and `checkpoint` are None if nothing could be read;
    `is_pending`: it is not known yet. `disk_bytes`: of the node's disk, for a hub's model; 0 where
    that is not known. `num_gpus`: GPUs of a pod, 1 on a CPU."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str
    memory: MemoryPlan | None = None
    checkpoint: ModelFacts | None = None
    is_pending: bool = False
    disk_bytes: int = 0
    num_gpus: int = 1


def judge(spec: Spec, found: ModelFacts | Unread | Refused) -> Fit:
    """Memory and disk for one pod."""
    disk_bytes, num_gpus = with_spare(_fetched_bytes(spec, found)), spec.hardware.num_gpus
    return replace(_judge(spec, found), disk_bytes=disk_bytes, num_gpus=max(num_gpus, 1))


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
    if engine and not isinstance(found, Unread) and not _is_sized(spec, engine, found):
        return _left_to_the_engine(f"{spec.engine.name} sizes itself")
    if engine and isinstance(found, Refused):
        return _left_to_the_engine(f"{found.message} {spec.engine.name} decides")
    if isinstance(found, Unread):
        return _unread(found, spec.engine.name)
    if isinstance(found, Refused):
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, found.message)
    if not engine and found.is_quantised:
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, IS_QUANTISED)
    if engine and found.task != "generate":
        return _left_to_the_engine(f"{spec.engine.name} sizes itself for {spec.model.task}")
    if not engine and spec.model.task not in (possible := _tasks(found)):
        message = f"spec.model.task is {spec.model.task}, and the checkpoint is for "
        return Fit("False", Reason.UNSUPPORTED_CHECKPOINT, f"{message}{' or '.join(possible)}.")
    try:
        asked = _request(spec, found)
        memory = found.plan(asked)
    except SizingError as e:
        if engine and not isinstance(e, Indivisible):
            return _left_to_the_engine(f"{e} {spec.engine.name} decides")
        return Fit("False", Reason.IMPOSSIBLE_SIZE, str(e), None, found)
    if memory.fits:
        return Fit("True", Reason.FITS, memory.explain(), memory, found)
    message = f"{memory.explain()} {found.advice(memory, asked if engine else None)}"
    return Fit("False", Reason.INSUFFICIENT_MEMORY, message, memory, found)


def _is_sized(spec: Spec, engine: ForeignEngine, found: ModelFacts | Refused) -> bool:
    """True if our arithmetic is about what the engine loads, or says why it cannot be."""
    if isinstance(found, Refused) or not isinstance(found.shape, GgufShape):
        is_refused = isinstance(found, Refused) and engine.slot_tokens is not None
        return engine.has_our_arithmetic or is_refused
    return engine.slot_tokens is not None and not _OTHER_PLACES & _given(spec).keys()


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
    is_told = _asked_num_seqs(spec) is not None or spec.engine.name in FOREIGN
    return most_num_seqs(spec) if is_told else None


def most_num_seqs(spec: Spec) -> int:
    """The most sequences that the user allows, also by default, whatever the memory."""
    engine = FOREIGN.get(spec.engine.name)
    default = engine.capacity if engine else None
    return most_sequences(_asked_num_seqs(spec) or default, _budget(spec))


def _asked_num_seqs(spec: Spec) -> int | None:
    return spec.batching.fixed_cap or spec.batching.max_num_seqs


def _budget(spec: Spec) -> int:
    return spec.batching.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS


def loading_bytes(fit: Fit) -> int:
    """Host memory in which a pod with a GPU loads the model."""
    found = fit.checkpoint
    return found.host_bytes(fit.num_gpus) if found else HOST_BYTES * fit.num_gpus


def _request(spec: Spec, found: ModelFacts) -> MemoryRequest:
    device: Literal["cuda", "cpu"] = "cuda" if spec.hardware.has_devices else "cpu"
    given, default = _given(spec), None
    if isinstance(found.shape, GgufShape):  # each slot takes its memory at start
        default = FOREIGN[spec.engine.name].capacity
    return MemoryRequest(
        total_bytes=spec.hardware.memory_bytes,
        utilization=spec.batching.memory_utilization,
        weights_bytes=found.weights_bytes - found.bytes_saved(_quantization(spec, found)),
        max_num_batched_tokens=_budget(spec),
        max_model_len=spec.model.max_model_len or found.shape.default_len,
        block_size=_number(given, "block-size") or DEFAULT_BLOCK_SIZE[device],
        dtype_bytes=DTYPE_BYTES[found.dtype],
        max_num_seqs=_asked_num_seqs(spec) or default,
        device=device,
        num_blocks=_number(given, "num-gpu-blocks-override"),
        layout=layout_of(spec),
        kv_dtype_bytes=1 if given.get("kv-cache-dtype", "").startswith("fp8") else None,
    )


def layout_of(spec: Spec) -> Layout:
    """The GPUs that run one copy of the model: by the engine's arguments where they name any of
    the three parallelisms, else by the hardware."""
    given, hardware, engine = _given(spec), spec.hardware, FOREIGN.get(spec.engine.name)
    if not engine or not hardware.has_devices:
        return ONE_GPU
    if engine.takes_gguf:
        return Layout(pipeline=max(hardware.num_gpus, 1))  # llama.cpp divides the layers
    tensor, pipeline = _number(given, *_TENSOR) or 1, _number(given, *_PIPELINE) or 1
    if not engine.splits(spec.engine.args):
        tensor, pipeline = max(hardware.num_gpus, 1), hardware.nodes
    return Layout(tensor=tensor, pipeline=pipeline, rest_last=engine.name == "sglang")


def _quantization(spec: Spec, found: ModelFacts) -> str | None:
    """How the weights become smaller as they are loaded."""
    given = _given(spec)
    named = given.get("quantization") or given.get("q")
    if spec.engine.name not in FOREIGN:
        return named
    return named if named in LOADED_BITS and not found.is_quantised else None


def _given(spec: Spec) -> Mapping[str, str]:
    """The flags in `spec.engine.args` without their dashes, and the value of each: behind `=`, or
    the next argument."""
    args, given = spec.engine.args, {}
    for arg, after in zip(args, (*args[1:], "-"), strict=False):
        if arg.startswith("-"):
            name, joined, value = arg.lstrip("-").partition("=")
            given[name.replace("_", "-")] = value if joined or after[:1] == "-" else after
    return given


def _number(given: Mapping[str, str], *names: str) -> int | None:
    numbers = (count(given[name]) for name in names if name in given)
    return next(numbers, None) or None
