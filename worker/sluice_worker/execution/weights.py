"""Tensors of a checkpoint, from safetensors files only, or random ones from the config alone."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from sluice_core.errors import CheckpointError
from sluice_core.model.architecture import EMBEDDINGS, HEAD, ModelShape
from sluice_core.model.files import Directory, cause
from sluice_core.model.stored import Header, Weights, asked_bytes
from torch import Tensor

from .models.linear import ReadTensor

_ROWS = 4096
"""Rows compared at once."""
_ASKED_BYTES = 128 << 10
"""Bytes of one posix_fadvise call: Linux follows no more of it than a device reads at once."""
_ASKED_BYTES_AT_MOST = 256 << 20
"""Most bytes read ahead for one tensor: pages take the pod's memory until they are needed. Most
tensors are smaller; a large embedding gets a head start."""


class Checkpoint:
    """The safetensors files of a directory: one, or shards with an index."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._directory = Directory(directory)
        self._files: dict[str, _SafeFile] = {}
        self._tensors: dict[str, str] = {}
        self._places: dict[str, _Place] = {}
        for name, header in Weights.of(self._directory).headers():
            self._files[name] = self._open(name)
            self._tensors.update(dict.fromkeys(header, name))
            self._places.update(_places(self._directory.locate(name), header))
        self._read: set[str] = set()

    def holds(self, name: str) -> bool:
        """True if a file has the tensor `name`."""
        return name in self._tensors

    @property
    def unread(self) -> set[str]:
        """Tensors that nobody has read."""
        return self._tensors.keys() - self._read

    def num_elements(self, shape: ModelShape) -> int:
        """Elements of all tensors that a model of `shape` has, by the files' headers."""
        return sum(
            prod(self._files[file].get_slice(name).get_shape())
            for name, file in self._tensors.items()
            if shape.holds(name)
        )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`; CheckpointError if it is missing or of another shape or kind."""
        file_name = self._tensors.get(name)
        if file_name is None:
            raise CheckpointError(f"{', '.join(sorted(self._files))}: tensor {name} is missing.")
        self._read.add(name)
        _ask_for(self._places[name])
        try:
            tensor: Tensor = self._files[file_name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{file_name}: tensor {name} cannot be read ({error})."
            ) from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file_name}: tensor {name} has shape {list(tensor.shape)}, but config.json asks "
                f"for {list(shape)}."
            )
        if not tensor.is_floating_point():
            raise CheckpointError(f"{file_name}: tensor {name} is not of a floating dtype.")
        # A copy always: a view would keep the whole file mapped.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def finish(self, shape: ModelShape) -> None:
        """Refuse tensors that the model did not read: without them its output would be wrong."""
        left = set(filter(shape.holds, self.unread))
        if HEAD in self._tensors and shape.tie_word_embeddings and not self._is_tied():
            raise CheckpointError(
                f"{self._tensors[HEAD]}: {HEAD} is not the embeddings that tie_word_embeddings of "
                "config.json says it is: set that to false."
            )
        if left:
            name = min(left)
            raise CheckpointError(
                f"{self._tensors[name]}: tensor {name} has no place in the model."
            )

    def _open(self, name: str) -> "_SafeFile":
        path = self._directory.locate(name)
        try:
            return cast(_SafeFile, safe_open(str(path), framework="pt"))
        except OSError as error:
            raise CheckpointError(f"{name}: {cause(error)}.") from error
        except SafetensorError as error:
            there, asked = path.stat().st_size, asked_bytes(self._directory, name)
            if there < asked:
                sizes = f"{there:,} bytes are there, and its header asks for {asked:,}"
                raise CheckpointError(f"{name}: truncated: {sizes}.") from error
            raise CheckpointError(f"{name}: not a safetensors file ({error}).") from error

    def _is_tied(self) -> bool:
        """True if the stored head equals the embeddings, as most stored heads do."""
        ours, head = (
            self._files[self._tensors[name]].get_slice(name) for name in (EMBEDDINGS, HEAD)
        )
        if ours.get_shape() != head.get_shape():
            return False
        starts = range(0, ours.get_shape()[0], _ROWS)
        return all(torch.equal(ours[at : at + _ROWS], head[at : at + _ROWS]) for at in starts)


def random_weights(seed: int, dtype: torch.dtype, device: torch.device) -> ReadTensor:
    """Reads seeded random weights (`--load-format dummy`): ones for norms, zeros for biases. Others
    are uniform with variance 1/in, so that activations stay of order 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.lower().endswith("norm.weight"):
            return tensor.fill_(1.0)
        if name.endswith(".bias"):
            return tensor.zero_()
        bound = float((3.0 / shape[-1]) ** 0.5)
        return tensor.uniform_(-bound, bound, generator=generator)

    return read


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class _SafeFile(Protocol):
    """The methods used of an open safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Bytes [begin, end) of a file."""

    path: Path
    begin: int
    end: int


def _places(path: Path, header: Header) -> dict[str, _Place]:
    """The byte ranges of a file's tensors, from its header, which safetensors has checked."""
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    entries = cast(Mapping[str, Mapping[str, list[int]]], header)
    return {
        name: _Place(path, *(start + at for at in entry["data_offsets"]))
        for name, entry in entries.items()
    }


def _ask_for(place: _Place) -> None:
    """Ask the system to read the whole tensor now. The file is mapped, so a copy would wait for
    each 128 KiB separately. Measured on a disk: half the time."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    end = min(place.end, place.begin + _ASKED_BYTES_AT_MOST)
    with contextlib.suppress(OSError), place.path.open("rb", buffering=0) as file:  # only advice
        for at in range(place.begin, end, _ASKED_BYTES):
            os.posix_fadvise(file.fileno(), at, _ASKED_BYTES, os.POSIX_FADV_WILLNEED)
