"""Names made from content: unchanged things are not built again. Pure but for reading files."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

IGNORED = ("__pycache__", ".pyc", ".DS_Store")


def key_of(*parts: str | bytes) -> str:
    """Sixteen hex digits that differ when any part, or its boundary, differs."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()[:16]


def files_under(root: Path, inputs: Iterable[str]) -> list[Path]:
    """Every file of `inputs` (files, folders or globs below `root`), sorted, without caches."""
    found: set[Path] = set()
    for pattern in inputs:
        for path in root.glob(pattern):
            found.update(path.rglob("*") if path.is_dir() else [path])
    return sorted(p for p in found if p.is_file() and not _ignored(p.relative_to(root)))


def _ignored(path: Path) -> bool:
    return any(part.endswith(IGNORED) for part in path.parts)


def key_of_files(root: Path, inputs: Iterable[str], *more: str) -> str:
    """The key of names and contents of `inputs`, and of `more`."""
    parts: list[str | bytes] = list(more)
    for path in files_under(root, inputs):
        parts += [path.relative_to(root).as_posix(), path.read_bytes()]
    return key_of(*parts)
