"""Reads what a checkpoint says of itself: config.json and safetensors headers, never a tensor.

Rim, but only for reading under one root directory; `hub` brings the same from a hub. Files are
hostile input: sizes are capped, links that lead outside, pipes and devices are refused, and every
problem is one typed sentence.
"""

import json
import os
import stat
import struct
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sluice_worker.sizing import (
    DTYPE_BYTES,
    HEAD,
    MOST_BYTES,
    ModelShape,
    resolve_dtype,
    safetensors_header_bytes,
)

MAX_JSON_BYTES = 16 << 20
"""Of an index or a hub's list of files: a thousand shards' names."""
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 8 << 20
"""Of one file. The format allows 100 MB, which as objects would take more memory than the operator
has, for everybody's objects."""
_FIRST_BYTES = 64 << 10
"""Holds most headers: one of 300 tensors has about 30 kB."""
_MAX_VALUES = 400_000
"""Of one JSON document: nine of each of 44,000 tensors in a header, one of each in an index, where
the largest models have 140,000. As objects, millions would take all of the memory."""
_PARSING = threading.Lock()
"""One text at a time: each takes up to 64 MiB beside its objects."""
_MAX_SHARDS = 1000
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
ROOT_URI = "file:///models/"
_PICKLES = (".bin", ".pt", ".pkl")


class CheckpointError(Exception):
    """The checkpoint is there and cannot be served; the message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a model before any pod. `weights_bytes` in `dtype`, as it would run.

    `commit`: what the revision of a hub's model stood for; "" elsewhere.
    """

    shape: ModelShape
    dtype: str
    weights_bytes: int
    num_parameters: int
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Unread:
    """Nothing is known of the model, and why: it is not within this process's reach.

    `is_pending`: not yet; what serves stays as it is until then, whatever was asked for since.
    """

    message: str
    is_pending: bool = False


class Source(Protocol):
    """The files of one checkpoint; each method raises CheckpointError with a file's name."""

    @property
    def title(self) -> str:
        """What it is called in a sentence."""

    def names(self) -> Collection[str]:
        """The files that are there."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes of a file from `start` on."""


def read(uri: str, dtype: str, root: Path, *, on_cpu: bool) -> Checkpoint | Unread:
    """The checkpoint at `uri` under `root`, which stands for `ROOT_URI`.

    `dtype`: the one asked for, "auto" for the checkpoint's own. Raises CheckpointError, or
    SizingError from the arithmetic, where the checkpoint is there and cannot be served.
    """
    if not uri.startswith(ROOT_URI):
        return Unread(f"{uri} is not read by the operator: the worker sizes itself")
    directory = _inside(root, uri.removeprefix(ROOT_URI))
    if not directory.is_dir():
        return Unread(f"the operator has no {uri}: the worker sizes itself")
    return examine(_Directory(root, directory), dtype, on_cpu=on_cpu)


def examine(source: Source, dtype: str, commit: str = "", *, on_cpu: bool) -> Checkpoint:
    """What the files of `source` say; raises as `read`."""
    shape = ModelShape.from_config(_read_json(source, "config.json", MAX_CONFIG_BYTES))
    runs_as = resolve_dtype(dtype, shape, on_cpu=on_cpu)
    stored, converted = _weights(source, shape, DTYPE_BYTES[shape.dtype], DTYPE_BYTES[runs_as])
    if max(stored, converted) > MOST_BYTES:
        raise CheckpointError(f"{source.title} claims tensors of over {MOST_BYTES >> 50} PiB.")
    return Checkpoint(shape, runs_as, converted, stored // DTYPE_BYTES[shape.dtype], commit)


def _weights(source: Source, shape: ModelShape, stored: int, wanted: int) -> tuple[int, int]:
    """Bytes of the model's tensors at `stored` and at `wanted` bytes per element.

    From the headers of the files where they are there, else from the index's total_size. As a
    worker does, which loads the files of the index, or else the one of the usual name.
    """
    present = source.names()
    if INDEX in present:
        index = _read_json(source, INDEX, MAX_JSON_BYTES)
        files = _shards(index)
        if not set(files) <= set(present):
            total = _total_size(index)
            if shape.tie_word_embeddings and HEAD in _weight_map(index):
                total -= shape.vocab_size * shape.hidden_size * stored
            return total, total * wanted // stored
    else:
        files = (WEIGHTS,) if WEIGHTS in present else ()
    if not files:
        others = sorted(name for name in present if name.endswith(_PICKLES))
        found = f"; {others[0]} is a pickle and is never opened" if others else ""
        raise CheckpointError(f"{source.title} holds no {WEIGHTS}, and no index of others{found}.")
    totals = [0, 0]
    for every in (_read_header(source, name) for name in files):
        header = {name: entry for name, entry in every.items() if shape.holds(name)}
        totals[0] += safetensors_header_bytes(header, stored)
        totals[1] += safetensors_header_bytes(header, wanted)
    return totals[0], totals[1]


def _shards(index: Mapping[str, object]) -> tuple[str, ...]:
    names = sorted({str(name) for name in _weight_map(index).values()})
    if len(names) > _MAX_SHARDS:
        raise CheckpointError(f"{INDEX} names {len(names)} files; at most {_MAX_SHARDS}.")
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} points to {name[:128]}, outside its directory.")
    return tuple(names) or (WEIGHTS,)


def _weight_map(index: Mapping[str, object]) -> Mapping[str, object]:
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{INDEX}: weight_map is not an object.")
    return weight_map


def _total_size(index: Mapping[str, object]) -> int:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, bool) or not isinstance(total, int) or total < 1:
        raise CheckpointError(f"{INDEX} has no metadata.total_size, and its files are absent.")
    return total


def _read_json(source: Source, name: str, most: int) -> Mapping[str, object]:
    """A file of JSON, of at most so many bytes."""
    data = source.read(name, 0, most + 1)
    if len(data) > most:
        raise CheckpointError(f"{name} is larger than {most >> 20} MiB.")
    return json_object(data, name)


def _read_header(source: Source, name: str) -> Mapping[str, object]:
    """The JSON header of a safetensors file: 8 bytes of length, then that many of JSON."""
    data = source.read(name, 0, _FIRST_BYTES)
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\xff"))
    if len(data) == _FIRST_BYTES < length + 8:
        if length > MAX_HEADER_BYTES:
            most = f"{MAX_HEADER_BYTES >> 20} MiB"
            raise CheckpointError(
                f"{name} has a header of over {most}, or is not a safetensors file."
            )
        data += source.read(name, _FIRST_BYTES, length + 8 - _FIRST_BYTES)
    if length + 8 > len(data):
        raise CheckpointError(f"{name} is truncated or not a safetensors file.")
    return json_object(data[8 : length + 8], name)


def json_object(data: bytes, name: str) -> Mapping[str, object]:
    """`data` as a JSON object; CheckpointError naming the file."""
    if sum(map(data.count, (b"{", b"[", b","))) > _MAX_VALUES:
        raise CheckpointError(f"{name} holds more than {_MAX_VALUES:,} values.")
    try:
        with _PARSING:
            value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{name} is not JSON: {type(e).__name__}.") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} does not hold a JSON object.")
    return value


@dataclass(frozen=True, slots=True)
class _Directory:
    """A checkpoint in `directory`, under `root`."""

    root: Path
    directory: Path

    @property
    def title(self) -> str:
        return self.directory.name

    def names(self) -> Collection[str]:
        return {path.name for path in self.directory.iterdir() if path.exists()}

    def read(self, name: str, start: int, length: int) -> bytes:
        inside = _inside(self.root, os.path.relpath(self.directory / name, self.root))
        try:
            # Without O_NONBLOCK a pipe would block for ever.
            fd = os.open(inside, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            raise CheckpointError(f"{name} cannot be read: {e.strerror}.") from e
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise CheckpointError(f"{name} is not a regular file.")
            with open(fd, "rb", closefd=False) as file:
                file.seek(start)
                return file.read(length)
        finally:
            os.close(fd)


def _inside(root: Path, relative: str) -> Path:
    """`relative` resolved under `root`; CheckpointError if a link or `..` leads out of it."""
    try:
        resolved = (root / relative).resolve()
    except RuntimeError as e:  # links that lead to each other
        raise CheckpointError(f"{relative[:128]} leads nowhere.") from e
    if not resolved.is_relative_to(root.resolve()):
        raise CheckpointError(f"{relative[:128]} leads outside of the models' directory.")
    return resolved
