"""The disk that a hub's model takes in a pod that keeps it on its node. Pure."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sluice_core.hub.listing import RemoteFile
from sluice_core.model.gguf import SUFFIX, model_name

_TORCH = (".bin", ".pt", ".pth")
_NO_MODEL = ("mmproj", "imatrix")
"""Beginnings of the names of GGUF files beside a model's own."""
_GIB = 2**30
_SPARE_BYTES = _GIB
"""For tokenizer and configuration, logs, and what an engine compiles into /tmp."""


@dataclass(frozen=True, slots=True)
class Download:
    """Bytes of weights that an engine fetches; 0 where they are not known. `gguf`: by an engine
    that takes one GGUF file, or one that is in parts; `tensors`: by others."""

    tensors: int = 0
    gguf: int = 0


def download_of(files: Collection[RemoteFile]) -> Download:
    """The download of a model with these `files`. A mirror's listing may lack their sizes."""
    for suffixes in ((".safetensors",), _TORCH):
        if sizes := [file.size or 0 for file in files if file.name.endswith(suffixes)]:
            return Download(sum(sizes), _gguf_bytes(files))
    return Download(0, _gguf_bytes(files))


def _gguf_bytes(files: Collection[RemoteFile]) -> int:
    return sum(file.size or 0 for file in gguf_files(files))


def gguf_files(files: Collection[RemoteFile]) -> Sequence[RemoteFile]:
    """The files of the model that llama.cpp and Ollama get from the hub, in order; none without.

    Of many quantisations it is the one called Q4_K_M. Without it, the smallest: a request that is
    too large would keep the pod from every node."""
    models: defaultdict[str, list[RemoteFile]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.name):
        name = file.name.rpartition("/")[2].lower()
        if name.endswith(SUFFIX) and not name.startswith(_NO_MODEL):
            models[model_name(file.name)].append(file)
    usual = [parts for name, parts in models.items() if "q4_k_m" in name.lower()]
    sizes = usual or models.values()
    return min(sizes, key=lambda parts: sum(part.size or 0 for part in parts), default=[])


def with_spare(num_bytes: int) -> int:
    """Whole GiB of disk for a download of `num_bytes`: file systems take their share; 0 for 0."""
    return -(-(num_bytes + num_bytes // 20 + _SPARE_BYTES) // _GIB) * _GIB if num_bytes else 0
