"""Facts from a checkpoint itself: config.json and safetensors headers, never a tensor.

Rim, but only for reading under one root directory; `hub` reads the same from a hub.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice_core.errors import CheckpointError
from sluice_core.model.files import Directory, Source
from sluice_core.model.gguf import GgufShape, model_name, plan_gguf, read_gguf
from sluice_core.model.images import Pixels
from sluice_core.model.sizing import (
    DTYPE_BYTES,
    HEAD,
    HOST_BYTES,
    MOST_BYTES,
    MemoryPlan,
    MemoryRequest,
    ModelShape,
    SizingError,
    advice,
    bytes_saved,
    fewest_gpus,
    host_memory_bytes,
    names_dtype,
    plan_memory,
    safetensors_header_bytes,
    weights_bytes,
)
from sluice_core.model.stored import INDEX, Weights, read_config, with_stored_dtype
from sluice_core.model.tasks import Shape, Task, image_part, task_of, vector_shape
from sluice_core.model.vectors import host_bytes, plan_vectors, runs_as

from .disk import Download

ROOT_URI = "file:///models/"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model before any pod. `weights_bytes`: in `dtype`, as it would run; quantised
    tensors as they are stored. `is_quantised`: by its config.json, so not for our own engine.

    `commit`: the commit of a hub model's revision; "" elsewhere. `download`: of a hub's model.
    `pixel_bytes`: of an image, for a model that reads them.
    """

    shape: Shape | GgufShape
    dtype: str
    weights_bytes: int
    num_parameters: int
    commit: str = ""
    download: Download = Download()
    task: Task = "generate"
    pixel_bytes: int = 0
    is_quantised: bool = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights in the checkpoint's files."""
        if self.is_quantised or isinstance(self.shape, GgufShape):
            return self.weights_bytes
        return self.num_parameters * DTYPE_BYTES[self.shape.dtype]

    @property
    def _with_cache(self) -> ModelShape | None:
        """The shape of a model with a KV cache."""
        shape = self.shape if self.task == "generate" else None
        return shape if isinstance(shape, ModelShape) else None

    def host_bytes(self, num_gpus: int) -> int:
        """Memory of the host that loading onto the GPUs of a pod takes."""
        dtype_bytes, shape = DTYPE_BYTES[self.dtype], self._with_cache
        if isinstance(self.shape, GgufShape):
            return HOST_BYTES  # one process for all GPUs, which maps the file
        if shape is None:
            return host_bytes(self.shape, dtype_bytes)
        return host_memory_bytes(shape, dtype_bytes, num_gpus)

    def bytes_saved(self, quantization: str | None) -> int:
        """Bytes of the weights that quantisation saves, as far as it is known."""
        shape = self._with_cache
        return bytes_saved(shape, self.dtype, quantization) if shape else 0

    def plan(self, asked: MemoryRequest) -> MemoryPlan:
        """The memory of one pod; raises SizingError."""
        shape = self._with_cache
        if isinstance(self.shape, GgufShape):
            return plan_gguf(self.shape, asked)
        if shape is not None:
            return plan_memory(shape, asked)
        if asked.layout.num_gpus > 1:
            raise SizingError("a model of vectors or classes runs on one GPU.")
        return plan_vectors(self.shape, asked, self.pixel_bytes)

    def advice(self, plan: MemoryPlan, asked: MemoryRequest | None = None) -> str:
        """What would make `plan` fit. `asked`: its request, where an engine may take more GPUs."""
        shape = self._with_cache
        return advice(plan, shape, fewest_gpus(shape, asked) if shape and asked else None)


@dataclass(frozen=True, slots=True)
class Refused:
    """The checkpoint is there and cannot be served; the message says why. `is_final`: by no engine,
    for its Secret may not be used."""

    message: str
    is_final: bool = False
    download: Download = Download()


@dataclass(frozen=True, slots=True)
class Unread:
    """Nothing is known of the model, and why: this process cannot reach it.

    `is_pending`: not yet. Until then the serving pods stay as they are, whatever is asked for.
    """

    message: str
    is_pending: bool = False


def read(
    uri: str, dtype: str, root: Path, *, on_cpu: bool, gguf: bool = False
) -> ModelFacts | Unread:
    """The checkpoint at `uri` under `root`, which stands for `ROOT_URI`.

    `dtype`: the requested one, "auto" for the checkpoint's own. `gguf`: it is a GGUF file. Raises
    CheckpointError, or SizingError from the arithmetic, if it is there and cannot be served.
    """
    if not uri.startswith(ROOT_URI):
        return Unread(f"{uri} is not read by the operator")
    path = _inside(root, uri.removeprefix(ROOT_URI))
    if not (path.is_file() if gguf else path.is_dir()):
        return Unread(f"the operator has no {uri}")
    return examine_gguf_file(path) if gguf else examine(Directory(path), dtype, on_cpu=on_cpu)


def examine_gguf_file(path: Path) -> ModelFacts:
    """The facts in a GGUF file, and in the other parts of its model; raises as `read` does."""
    source, model = Directory(path.parent), model_name(path.name)
    parts = sorted(name for name in source.names() if model_name(name) == model)
    return examine_gguf(source, parts or [path.name])


def examine_gguf(source: Source, names: Sequence[str], commit: str = "") -> ModelFacts:
    """The same in files of `source`."""
    shape = read_gguf(source, names)
    return ModelFacts(shape, shape.dtype, shape.weights_bytes, shape.num_elements, commit)


def examine(source: Source, dtype: str, commit: str = "", *, on_cpu: bool) -> ModelFacts:
    """The facts in the files of `source`; raises as `read` does."""
    config = read_config(source)
    task = task_of(source, config)
    is_quantised = task == "generate" and config.get("quantization_config") is not None
    if is_quantised:  # engines run it in 16 bits where it names no dtype
        dtypes = {"dtype": names_dtype(config) or "bfloat16"}
        config = {**config, "quantization_config": None, **dtypes}
    _shape(task, config)  # an unsupported model is reported before a missing file
    weights = Weights.of(source)
    shape = _shape(task, with_stored_dtype(config, weights))
    runs = runs_as(dtype, shape, on_cpu=on_cpu)
    stored, converted = _num_bytes(weights, shape, DTYPE_BYTES[runs], is_quantised)
    num_parameters = stored // DTYPE_BYTES[shape.dtype]
    if is_quantised and isinstance(shape, ModelShape):
        num_parameters = weights_bytes(shape, 1)
    if max(stored, converted) > MOST_BYTES:
        raise CheckpointError(f"{source.title} claims tensors of over {MOST_BYTES >> 50} PiB.")
    images = image_part(shape)
    return ModelFacts(
        shape,
        runs,
        converted,
        num_parameters,
        commit,
        task=task,
        pixel_bytes=Pixels.read(source, images).num_bytes if images is not None else 0,
        is_quantised=is_quantised,
    )


def _shape(task: Task, config: Mapping[str, object]) -> Shape:
    return ModelShape.from_config(config) if task == "generate" else vector_shape(config)


def _num_bytes(weights: Weights, shape: Shape, wanted: int, is_quantised: bool) -> tuple[int, int]:
    """Bytes of the model's tensors in its own dtype and at `wanted` bytes per element.

    They come from the files' headers if those are there, else from the index's total_size.
    """
    own = DTYPE_BYTES[shape.dtype]
    if not weights.has_headers:
        total = _total_size(weights.index)
        if is_quantised:
            return total, total
        num_elements = total // DTYPE_BYTES.get(weights.dtype or "", own)
        if isinstance(shape, ModelShape) and not shape.holds(HEAD) and HEAD in weights.weight_map:
            num_elements -= shape.vocab_size * shape.hidden_size
        return num_elements * own, num_elements * wanted
    holds = shape.holds if isinstance(shape, ModelShape) else lambda name: True
    totals = [0, 0]
    for file, every in weights.headers():
        header = {name: entry for name, entry in every.items() if holds(name)}
        try:
            totals[0] += safetensors_header_bytes(header, own, quantised=is_quantised)
            totals[1] += safetensors_header_bytes(header, wanted, quantised=is_quantised)
        except SizingError as error:
            raise SizingError(f"{file}: {error}") from error
    return totals[0], totals[1]


def _total_size(index: Mapping[str, object]) -> int:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise CheckpointError(f"{INDEX}: no metadata.total_size, and its files are absent.")
    return total


def _inside(root: Path, relative: str) -> Path:
    """`relative` resolved under `root`; CheckpointError if a link or `..` leads out of it."""
    try:
        resolved = (root / relative).resolve()
    except RuntimeError as e:  # links that lead to each other
        raise CheckpointError(f"{relative[:128]} leads nowhere.") from e
    if not resolved.is_relative_to(root.resolve()):
        raise CheckpointError(f"{relative[:128]} leads outside of the models' directory.")
    return resolved
