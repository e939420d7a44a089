"""One file of the hub into its blob: resumed where it was cut, and verified before it counts."""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import BinaryIO, TypeVar

import httpx
from sluice_core.bounded import count
from sluice_core.errors import DownloadError
from sluice_core.hub.listing import RemoteFile
from sluice_core.hub.site import Site, Transient
from sluice_core.model.files import cause

from .cache import Cache, Stopped

ATTEMPTS = 6
"""Attempts in a row without a byte: with a first wait of 0.5 s, a quarter of a minute."""
MAX_WAIT_S = 60.0
READ_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
T = TypeVar("T")


class TransferPatience:
    """Waits between attempts, and gives up after too many without progress."""

    def __init__(self, first_s: float, stop: threading.Event) -> None:
        self._first_s, self._stop = first_s, stop
        self._num_failures = 0

    def progress(self) -> None:
        """Bytes came: the server works again."""
        self._num_failures = 0

    def wait(self, failure: Transient) -> None:
        """Wait for the next attempt; DownloadError after the last, Stopped if the worker leaves."""
        self._num_failures += 1
        if self._num_failures >= ATTEMPTS:
            raise DownloadError(f"{failure.message} ({ATTEMPTS} attempts).") from failure
        wait_s = max(self._first_s * 2.0 ** (self._num_failures - 1), failure.retry_after_s)
        if self._stop.wait(min(wait_s, MAX_WAIT_S)):
            raise Stopped from failure

    def attempt(self, call: Callable[[], T]) -> T:
        """`call`, again and again while it fails with Transient."""
        while True:
            try:
                return call()
            except Transient as failure:
                self.wait(failure)


class Transfer:
    """Brings files of one commit into a cache. `fetch` may run in several threads."""

    def __init__(
        self, site: Site, cache: Cache, commit: str, retry_s: float, stop: threading.Event
    ) -> None:
        self._site, self.cache, self._commit = site, cache, commit
        self._retry_s, self.stop = retry_s, stop

    def described(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        """`files` with size and etag: a mirror's listing may lack them."""
        patience = TransferPatience(self._retry_s, self.stop)

        def ask(file: RemoteFile) -> RemoteFile:
            return patience.attempt(lambda: self._site.described(self._commit, file))

        return [file if file.etag and file.size is not None else ask(file) for file in files]

    def fetch(self, file: RemoteFile) -> None:
        """Fetch `file` whole, verified, into the snapshot. Raises DownloadError or Stopped."""
        try:
            with self.cache.writing(file, self.stop):
                if not self.cache.is_there(file):
                    self._bring(file)
                self.cache.link(self._commit, file)
        except OSError as error:
            where = self.cache.root
            if error.errno in _FULL:
                raise DownloadError(f"{where} is full; {file.name} does not fit in.") from error
            raise DownloadError(f"{where}: {file.name}: {cause(error)}.") from error

    def _bring(self, file: RemoteFile) -> None:
        path, patience = self.cache.partial(file), TransferPatience(self._retry_s, self.stop)
        while True:
            with path.open("ab+") as output:
                partial = _Partial(output, file)
                was_resumed = partial.num_bytes > 0
                while partial.num_bytes != file.size:
                    self._receive(partial, patience)
                output.flush()
                os.fsync(output.fileno())
                if os.fstat(output.fileno()).st_size != file.size:
                    raise DownloadError(
                        f"{file.name} was written by another pod at the same time: its volume has "
                        "no locks between nodes; give each node one of its own."
                    )
            # If the etag is no known hash, only the size is checked.
            if not _HASH.fullmatch(file.etag) or partial.digest.hexdigest() == file.etag:
                path.replace(self.cache.blob(file))
                return
            path.unlink()
            if not was_resumed:
                raise DownloadError(
                    f"{file.name} is not what the hub lists: its checksum is "
                    f"{partial.digest.hexdigest()[:12]}…, not {file.etag[:12]}…."
                )
            # An earlier process may have left bad bytes (a node that lost power): try again.

    def _receive(self, partial: "_Partial", patience: TransferPatience) -> None:
        """Read one connection's bytes. There may be none, and it may break off."""
        file, start = partial.file, partial.num_bytes
        try:
            with self._site.content(self._commit, file.name, start) as response:
                if start and not _continues(response, start):
                    partial.restart()
                for part in response.iter_bytes():  # as it comes: a cut loses none
                    if self.stop.is_set():
                        raise Stopped
                    if partial.add(part):
                        patience.progress()
            if partial.num_bytes < (file.size or 0):
                raise Transient(f"the connection ended in the middle of {file.name}")
        except Transient as failure:
            patience.wait(failure)


class _Partial:
    """The received part of one file, with its digest. The rest is appended."""

    def __init__(self, output: BinaryIO, file: RemoteFile) -> None:
        self.file, self._output = file, output
        self.digest = _digest(file)
        self.num_bytes = self._furthest = 0
        if output.seek(0, os.SEEK_END) > (file.size or 0):
            self.restart()
        output.seek(0)
        while part := output.read(READ_BYTES):
            self.digest.update(part)
            self.num_bytes += len(part)

    def restart(self) -> None:
        """Throw it away: the server sends from the beginning."""
        self._output.truncate(0)
        self.digest, self.num_bytes = _digest(self.file), 0

    def add(self, part: bytes) -> bool:
        """Append; True if the file is longer than ever before. DownloadError if it is too long.

        So a server without Range that always breaks off at the same byte makes no progress.
        """
        self.num_bytes += len(part)
        if self.num_bytes > (self.file.size or 0):
            raise DownloadError(
                f"{self.file.name} is longer than the {self.file.size} bytes listed."
            )
        self._output.write(part)
        self.digest.update(part)
        is_further = self.num_bytes > self._furthest
        self._furthest = max(self._furthest, self.num_bytes)
        return is_further


def _continues(response: httpx.Response, start: int) -> bool:
    """True if the server sends from byte `start` on, as asked."""
    said = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    return response.status_code == 206 and said is not None and count(said[1]) == start


def _digest(file: RemoteFile) -> "hashlib._Hash":
    """SHA-256 of a large file; of a small one git's blob id, SHA-1 over a header and the content.

    SHA-1 only finds damage here; git itself names the file by it.
    """
    if len(file.etag) == 40:
        return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    return hashlib.sha256()
