"""Which file of a checkpoint holds which tensor, and of which type: config.json, index and headers.

It reads no tensor. Pure but for the `Source` it reads; shared by worker, operator and `sluice
plan`. Files that disagree are resolved as in transformers 5.23 (`_get_resolved_checkpoint_files`,
`_get_dtype` of modeling_utils), but the index decides which file a tensor is read from.
"""

import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..errors import CheckpointError
from .architecture import DTYPE_BYTES, may_lack, names_dtype
from .files import CONFIG, Source, json_object, read_bytes, refuse_pointer

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_INDEX_BYTES = 16 << 20
"""A thousand shards' names, for each tensor."""
MAX_HEADER_BYTES = 8 << 20
"""Most bytes of one file's header. The format allows 100 MB; as Python objects that would take
more memory than the operator has."""
MAX_VALUES = 400_000
"""Most values of one JSON document. A header has nine per tensor (44,000 tensors), an index one;
the largest models have 140,000. Millions of objects would take all of an operator's memory."""
_FIRST_BYTES = 64 << 10
"""Holds most headers: one of 300 tensors has about 30 kB."""
_MAX_SHARDS = 1000
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_PACKED = {"F64": "<d", "F32": "<f", "F16": "<e"}
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Header = Mapping[str, object]
"""By tensor name: `dtype`, `shape` and `data_offsets`, unchecked."""


@dataclass(frozen=True)
class Weights:
    """The safetensors files of a checkpoint. `index`: the index, where it decides; else empty."""

    source: Source
    files: tuple[str, ...]
    index: Mapping[str, object]

    @staticmethod
    def of(source: Source, present: Collection[str] | None = None) -> "Weights":
        """The files that the index names, or model.safetensors, which wins over an index of others.

        `present`: the files that exist, if `source` does not have all of them yet.
        CheckpointError if there are no weights.
        """
        present = source.names() if present is None else present
        if INDEX in present:
            data = read_bytes(source, INDEX, MAX_INDEX_BYTES)
            index = json_object(data, INDEX, MAX_VALUES)
            files = shard_names(index)
            if WEIGHTS in files or WEIGHTS not in present:
                return Weights(source, files, index)
        if WEIGHTS in present:
            return Weights(source, (WEIGHTS,), {})
        pickles = sorted(name for name in present if name.endswith(_PICKLES))
        if pickles:
            raise CheckpointError(
                f"{pickles[0]}: only safetensors are read; convert the checkpoint."
            )
        raise CheckpointError(f"{source.title} holds no {WEIGHTS}, and no index of others.")

    @property
    def weight_map(self) -> Mapping[str, str]:
        """The file of each tensor that the index names."""
        weight_map = self.index.get("weight_map")
        return weight_map if isinstance(weight_map, dict) else {}

    @cached_property
    def has_headers(self) -> bool:
        """True if every header can be read: all files exist, and there are not too many."""
        is_few = len(self.files) <= self.source.max_headers
        return is_few and set(self.files) <= set(self.source.names())

    @cached_property
    def first_header(self) -> Header | None:
        """The header of the first file by name; None if that file does not exist."""
        name = self.files[0]
        return _read_header(self.source, name) if name in self.source.names() else None

    @property
    def dtype(self) -> str | None:
        """Type of the first tensor by name in the first file. A floating tensor goes before others.
        None if it is not known."""
        header = self.first_header
        if not header:
            return None
        types = [_dtype(header, name) for name in sorted(header)]
        first = next((one for one in types if one in _FLOATS), types[0])
        return _FLOATS.get(first, first)

    def headers(self) -> Iterator[tuple[str, Header]]:
        """Each file, with the tensors that are read from it: those that the index gives it, and
        those that the index gives to none.

        Raises CheckpointError if the file of a tensor does not hold it, or if two files hold one
        that the index gives to none.
        """
        weight_map, unnamed = self.weight_map, set[str]()
        num_named = Counter(weight_map.values())
        for file in self.files:
            is_first = file == self.files[0] and self.first_header is not None
            header = self.first_header if is_first else _read_header(self.source, file)
            assert header is not None
            own = {name: entry for name, entry in header.items() if weight_map.get(name) == file}
            if len(own) < num_named[file]:
                _refuse_missing(file, weight_map, own)
            for name in header.keys() - weight_map.keys():
                if name in unnamed:
                    raise CheckpointError(f"{file}: tensor {name[:128]} is in another file too.")
                unnamed.add(name)
                own[name] = header[name]
            if len(unnamed) > MAX_VALUES:
                raise CheckpointError(f"{INDEX}: names none of over {MAX_VALUES:,} tensors.")
            yield file, own


def read_config(source: Source) -> Mapping[str, object]:
    """config.json; CheckpointError."""
    return json_object(read_bytes(source, CONFIG, MAX_CONFIG_BYTES), CONFIG, MAX_VALUES)


def with_stored_dtype(config: Mapping[str, object], weights: Weights) -> Mapping[str, object]:
    """`config`; where it names no dtype, with that of the stored tensors. CheckpointError for one
    that nothing here runs in."""
    if names_dtype(config) or weights.dtype is None:
        return config
    if weights.dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{weights.files[0]}: tensors of {weights.dtype[:32]}, and {CONFIG} names no dtype."
        )
    return {**config, "dtype": weights.dtype}


def shard_names(index: Mapping[str, object]) -> tuple[str, ...]:
    """The files that an index names, or the usual one; CheckpointError if one is no safetensors
    file beside it."""
    weight_map = index.get("weight_map", {})
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{INDEX}: weight_map is not an object.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not _SHARD.fullmatch(name):
            raise CheckpointError(f"{INDEX}: {name[:128]} is not a safetensors file beside it.")
    if len(names) > _MAX_SHARDS:
        raise CheckpointError(f"{INDEX}: names {len(names)} files; at most {_MAX_SHARDS}.")
    return tuple(names) or (WEIGHTS,)


def _read_header(source: Source, name: str) -> Header:
    """The JSON header of a safetensors file: 8 bytes of length, then that many of JSON."""
    data = source.read(name, 0, _FIRST_BYTES)
    refuse_pointer(data, name)
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\xff"))
    if len(data) == _FIRST_BYTES < length + 8:
        if length > MAX_HEADER_BYTES:
            most = f"{MAX_HEADER_BYTES >> 20} MiB"
            raise CheckpointError(f"{name}: a header of over {most}, or not a safetensors file.")
        data += source.read(name, _FIRST_BYTES, length + 8 - _FIRST_BYTES)
    if not data:
        raise CheckpointError(f"{name}: empty.")
    if length + 8 > len(data):
        raise CheckpointError(
            f"{name}: truncated, or not a safetensors file: {len(data):,} bytes are there, and its "
            f"header alone asks for {length + 8:,}."
        )
    header = dict(json_object(data[8 : length + 8], name, MAX_VALUES))
    header.pop("__metadata__", None)
    return header


def asked_bytes(source: Source, name: str) -> int:
    """Bytes that a safetensors file has by its header; CheckpointError."""
    header = _read_header(source, name)
    (length,) = struct.unpack("<Q", source.read(name, 0, 8))
    entries = [entry for entry in header.values() if isinstance(entry, Mapping)]
    places = [place for entry in entries if isinstance(place := entry.get("data_offsets"), list)]
    ends = [end for place in places for end in place if isinstance(end, int)]
    return 8 + int(length) + max(ends, default=0)


def read_number(weights: Weights, name: str) -> float:
    """The one number of a tensor of one element, in any floating type; CheckpointError."""
    for file, header in weights.headers():
        entry = header.get(name)
        if isinstance(entry, Mapping):
            start, end = _place(weights.source, file, entry)
            data = weights.source.read(file, start, end - start)
            kind = str(entry.get("dtype"))
            if kind == "BF16":
                kind, data = "F32", b"\0\0" + data  # its first half
            if kind in _PACKED and len(data) == struct.calcsize(_PACKED[kind]):
                return float(struct.unpack(_PACKED[kind], data)[0])
            raise CheckpointError(f"{file}: tensor {name} is not one floating number.")
    raise CheckpointError(f"{weights.source.title}: tensor {name} is missing.")


def _place(source: Source, file: str, entry: Mapping[str, object]) -> tuple[int, int]:
    """First byte of a tensor in its file, and the one behind it; at most eight are taken."""
    (length,) = struct.unpack("<Q", source.read(file, 0, 8))
    offsets = entry.get("data_offsets")
    start, end = offsets if isinstance(offsets, list) and len(offsets) == 2 else (0, 0)
    if not (isinstance(start, int) and isinstance(end, int) and 0 <= start < end <= start + 8):
        raise CheckpointError(f"{file}: a tensor of one number has no place.")
    return 8 + int(length) + start, 8 + int(length) + end


def _dtype(header: Header, name: str) -> str:
    entry = header[name]
    return str(entry.get("dtype")) if isinstance(entry, Mapping) else ""


def _refuse_missing(file: str, weight_map: Mapping[str, str], own: Header) -> None:
    for name, named in weight_map.items():
        if named == file and name not in own and not may_lack(name):
            raise CheckpointError(
                f"{file}: tensor {name[:128]} is missing, and {INDEX} says it is there."
            )
