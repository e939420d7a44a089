"""The one way to read a file of a checkpoint, for worker, operator and `sluice plan`. No torch.

Rim. Files are hostile input: only regular files inside the directory are read, and sizes are
capped. Each problem is one sentence that names the file and its cause.
"""

import errno
import json
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from ..errors import CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
JINJA = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
"""The folder of a checkpoint's further chat templates, NAME.jinja each."""
MAX_JSON_BYTES = 64 << 20
"""A tokenizer of 256 k entries takes about 20 MiB."""
_PARSING = threading.Lock()
"""Parse one text at a time: it takes several times its size, and an operator has many readers."""
_POINTER = b"version https://git-lfs.github.com/spec/"


class Source(Protocol):
    """The files of one checkpoint; each method raises CheckpointError with a file's name."""

    @property
    def title(self) -> str:
        """Its name in an error's sentence."""

    @property
    def max_headers(self) -> int:
        """Most files whose headers are read; with more files, the index tells the size."""

    def names(self) -> Collection[str]:
        """The files that are there, links that lead nowhere among them."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes of a file from `start` on."""


class Directory:
    """A checkpoint's directory, as a `Source`.

    In a hub's cache a snapshot's files are links to the blobs beside it, which belong to it.
    """

    max_headers = 1000

    def __init__(self, path: Path) -> None:
        self.path = path
        own = path.resolve()
        self._roots = [own]
        for parent in own.parents[:2]:  # a snapshot, or a folder of one
            if parent.name == "snapshots":
                self._roots.append(parent.parent / "blobs")

    @property
    def title(self) -> str:
        return self.path.name

    def names(self) -> Collection[str]:
        try:
            return {path.name for path in self.path.iterdir()}
        except OSError as error:
            raise CheckpointError(f"{self.path}: {cause(error)}.") from error

    def read(self, name: str, start: int, length: int) -> bytes:
        with self.open(name) as file:
            file.seek(start)
            return file.read(length)

    def locate(self, name: str) -> Path:
        """The path of a file that can be read, for libraries that open it themselves."""
        with self.open(name):
            return self._inside(name)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """The regular file `name`, open; what fails inside the block is told as of that file."""
        try:
            with open(self._inside(name), "rb", opener=_open_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise CheckpointError(f"{name}: not a regular file.")
                yield file
        except FileNotFoundError as error:
            if os.path.islink(link := self.path / name):
                why = f"a link to {os.readlink(link)[:256]}, which is not there"
                raise CheckpointError(f"{name}: {why}.") from error
            raise CheckpointError(f"{name}: missing in {self.path}.") from error
        except OSError as error:
            raise CheckpointError(f"{name}: {cause(error)}.") from error

    def _inside(self, name: str) -> Path:
        try:
            path = (self.path / name).resolve()
        except RuntimeError as error:  # links in a circle, for Python before 3.13
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from error
        if not any(path.is_relative_to(root) for root in self._roots):
            raise CheckpointError(f"{name[:128]}: leads outside the checkpoint directory.")
        return path


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # for a pipe it would wait for ever


def cause(error: OSError) -> str:
    """Why a file cannot be read; for a missing permission, whose."""
    if isinstance(error, PermissionError):
        return f"permission denied for user {os.geteuid()}"
    return error.strerror or type(error).__name__


def checkpoint_dir(model: str) -> Path:
    """The checkpoint directory, absolute; CheckpointError if there is none."""
    named = Path(model.removeprefix("file://"))
    try:
        path = named.resolve()
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except RuntimeError as error:  # Python before 3.13; later ones leave such a link as it is
        raise CheckpointError(f"{named} is a link that leads to itself.") from error
    except (FileNotFoundError, NotADirectoryError):
        is_directory = False
    except OSError as error:
        raise CheckpointError(f"{named}: {cause(error)}.") from error
    if not is_directory:
        raise CheckpointError(f"{path} is not a directory with a checkpoint.")
    return path


def is_there(directory: Path, name: str) -> bool:
    """True if an optional file of a checkpoint exists, readable or not."""
    return os.path.lexists(directory / name)


def read_text(directory: Path, name: str, most: int) -> str:
    """A file of UTF-8 text of at most `most` bytes; CheckpointError naming the file."""
    try:
        return read_bytes(Directory(directory), name, most).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name}: not UTF-8 text.") from error


def read_json(directory: Path, name: str) -> Mapping[str, object]:
    """The JSON object in a file of the checkpoint; CheckpointError naming the file."""
    return json_object(read_bytes(Directory(directory), name, MAX_JSON_BYTES), name)


def read_bytes(source: Source, name: str, most: int) -> bytes:
    """All of a file of at most `most` bytes."""
    data = source.read(name, 0, most + 1)
    if len(data) > most:
        raise CheckpointError(f"{name}: larger than {most >> 20} MiB.")
    refuse_pointer(data, name)
    return data


def refuse_pointer(data: bytes, name: str) -> None:
    """CheckpointError if `data` begins as what git leaves of a file that git-lfs keeps."""
    if data.startswith(_POINTER):
        raise CheckpointError(f"{name}: a git-lfs pointer, not the file; run `git lfs pull`.")


def json_object(data: bytes, name: str, max_values: int | None = None) -> Mapping[str, object]:
    """`data` as a JSON object; CheckpointError naming the file."""
    if not data:
        raise CheckpointError(f"{name}: empty.")
    if max_values is not None and sum(map(data.count, (b"{", b"[", b","))) > max_values:
        raise CheckpointError(f"{name}: more than {max_values:,} values.")
    try:
        with _PARSING:
            value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON ({_told(error)}).") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: not a JSON object.")
    return value


def _told(error: ValueError | RecursionError) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:128]
