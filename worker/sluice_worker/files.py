"""Files of a checkpoint directory: regular ones, inside it, and nothing else. No torch."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from .errors import CheckpointError

GENERATION_CONFIG = "generation_config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MAX_JSON_BYTES = 64 << 20
"""A tokenizer of 256 k entries takes about 20 MiB; an index of a thousand shards less."""
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")


def checkpoint_dir(model: str) -> Path:
    """The checkpoint directory, absolute; CheckpointError if there is none."""
    path = Path(model.removeprefix("file://")).resolve()
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory with a checkpoint.")
    return path


def inside(directory: Path, name: str) -> Path:
    """`name` as a regular file under `directory`, links followed; CheckpointError otherwise.

    In a hub's cache a snapshot's files are links to the blobs beside it, which belong to it.
    """
    own = directory.resolve()
    try:
        path = (directory / name).resolve()
    except (OSError, RuntimeError) as error:  # a link in a circle
        raise CheckpointError(f"{name}: cannot be followed ({error}).") from error
    roots = [own, own.parents[1] / "blobs"] if own.parent.name == "snapshots" else [own]
    if not any(path.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{name}: leads outside the checkpoint directory.")
    if not path.exists():
        raise CheckpointError(f"{name}: missing in {directory}.")
    if not path.is_file():
        raise CheckpointError(f"{name}: not a regular file.")
    return path


def read_json(directory: Path, name: str) -> Mapping[str, object]:
    """The JSON object in a file of the checkpoint; CheckpointError naming the file."""
    path = inside(directory, name)
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{name}: larger than {MAX_JSON_BYTES >> 20} MiB.")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: not a JSON object.")
    return value


def shard_names(index: Mapping[str, object]) -> list[str]:
    """The files that an index names; CheckpointError if one is no safetensors file beside it."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{INDEX}: weight_map is missing.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not _SHARD.fullmatch(name):
            raise CheckpointError(f"{INDEX}: {name[:128]} is not a safetensors file beside it.")
    return names
