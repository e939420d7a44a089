"""The directory of fetched files, laid out as by huggingface_hub, so both share it.

    models--ORG--NAME/blobs/ETAG             content, named by its hash
    models--ORG--NAME/snapshots/COMMIT/NAME  links into blobs
    models--ORG--NAME/refs/REVISION          the commit that a branch or tag stood for
    .locks/models--ORG--NAME/ETAG.lock       held by the writer of that blob

A link is made when its blob is whole and verified, so every linked file is correct.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice_core.errors import DownloadError
from sluice_core.hub.listing import REQUIRED, RemoteFile
from sluice_core.hub.reference import HubModel
from sluice_core.model.files import Directory, cause
from sluice_core.model.stored import INDEX, WEIGHTS, Weights

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without symbolic links."""

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.2


class Stopped(Exception):
    """The worker is leaving, or another file failed; received parts stay for the next start."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One model's part of a cache directory."""

    root: Path
    repo: str

    @property
    def _folder(self) -> str:
        return "models--" + self.repo.replace("/", "--")

    def blob(self, file: RemoteFile) -> Path:
        """The place of the content of `file`."""
        return self.root / self._folder / "blobs" / file.etag

    def partial(self, file: RemoteFile) -> Path:
        """The path of the part received so far."""
        return self.blob(file).with_name(f"{file.etag}.incomplete")

    def snapshot(self, commit: str) -> Path:
        return self.root / self._folder / "snapshots" / commit

    def is_there(self, file: RemoteFile) -> bool:
        """True if the whole content is there."""
        try:
            size = self.blob(file).stat().st_size
        except OSError:
            return False
        return file.size is None or size == file.size

    def num_bytes(self, file: RemoteFile) -> int:
        """Received bytes of `file`, whichever process fetched them."""
        for path in (self.blob(file), self.partial(file)):
            try:
                return min(path.stat().st_size, file.size or 0)
            except OSError:
                continue
        return 0

    def prepare(self, commit: str) -> None:
        """Make the directories; DownloadError if that is not possible."""
        paths = (self.root / self._folder / "blobs", self._locks, self.snapshot(commit))
        try:
            for path in paths:
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DownloadError(
                f"{self.root} cannot be written ({cause(error)}): name a directory that can "
                "with --download-dir."
            ) from error

    def link(self, commit: str, file: RemoteFile) -> None:
        """Show the blob of `file` in the snapshot, under its own name."""
        pointer = self.snapshot(commit) / file.name
        pointer.parent.mkdir(exist_ok=True)
        target = os.path.relpath(self.blob(file), pointer.parent)
        with contextlib.suppress(OSError):
            if os.readlink(pointer) == target:
                return
        beside = pointer.with_name(f".{pointer.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        try:
            beside.symlink_to(target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            beside.hardlink_to(self.blob(file))
        beside.replace(pointer)

    def remember(self, model: HubModel, commit: str) -> None:
        """Note the commit of the revision, for starts without the hub."""
        if model.commit is not None:
            return
        path = self.root / self._folder / "refs" / model.revision
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # each pod's process is the 1st
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(commit)
            beside.replace(path)
        except OSError as error:  # the model is whole without it
            log.warning("revision not remembered", extra={"reason": str(error)})

    def complete(self, model: HubModel, *, weights: bool) -> Path | None:
        """The snapshot of `model` as last seen, if every file that a worker needs is in it."""
        commit = model.commit or self._remembered(model)
        if commit is None:
            return None
        directory = self.snapshot(commit)
        if not all(_is_there(directory / name) for name in REQUIRED):
            return None
        names = _weights(directory) if weights else ()
        return directory if all(_is_there(directory / name) for name in names) else None

    def _remembered(self, model: HubModel) -> str | None:
        path = self.root / self._folder / "refs" / model.revision
        if not _is_there(path):
            return None
        try:
            text = path.read_text(encoding="ascii", errors="replace").strip()
        except OSError as error:
            raise DownloadError(f"{path} cannot be read: {cause(error)}.") from error
        return HubModel(self.repo, text).commit

    @property
    def _locks(self) -> Path:
        return self.root / ".locks" / self._folder

    @contextlib.contextmanager
    def writing(self, file: RemoteFile, stop: threading.Event) -> Iterator[None]:
        """Hold the lock of the blob of `file`, among all processes and pods; waits, or raises
        Stopped. The kernel releases the lock when its holder dies.
        """
        with (self._locks / f"{file.etag}.lock").open("ab") as lock:
            while not _locked(lock.fileno(), self.root):
                if stop.wait(LOCK_POLL_S):
                    raise Stopped
            yield


def _weights(directory: Path) -> tuple[str, ...]:
    """The safetensors files that must be in `directory`; CheckpointError."""
    source = Directory(directory)
    names = {name for name in source.names() if _is_there(directory / name)}
    return Weights.of(source, names).files if INDEX in names else (WEIGHTS,)


def _is_there(path: Path) -> bool:
    """True if there is such a file, readable or not; DownloadError if that cannot be checked."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DownloadError(f"{path} cannot be read: {cause(error)}.") from error
    return True


def _locked(fd: int, root: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise DownloadError(
            f"{root} is on a file system without locks ({cause(error)}): name another directory "
            "with --download-dir."
        ) from error
    return True
