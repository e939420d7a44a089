"""One file of the hub into its blob: resumed where it was cut, and verified before it counts."""

import errno
import hashlib
import os
import re
import threading
from collections.abc import Callable
from typing import BinaryIO, Protocol, TypeVar

import httpx

from ..errors import DownloadError
from .cache import Cache, Stopped
from .listing import RemoteFile
from .site import Site, Transient

ATTEMPTS = 6
"""In a row without a byte: with the first wait of 0.5 s, a quarter of a minute."""
MAX_WAIT_S = 60.0
READ_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
T = TypeVar("T")


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


class _NoDigest:
    """For an etag that is no hash we know: only the size is checked."""

    def __init__(self, etag: str) -> None:
        self._etag = etag

    def update(self, data: bytes, /) -> None:
        """Nothing is computed."""

    def hexdigest(self) -> str:
        """As if it were right."""
        return self._etag


class Patience:
    """Waits between attempts, and gives up after too many without progress."""

    def __init__(self, first_s: float, stop: threading.Event) -> None:
        self._first_s, self._stop = first_s, stop
        self._num_failures = 0

    def progress(self) -> None:
        """Something came: whoever was broken works again."""
        self._num_failures = 0

    def wait(self, failure: Transient) -> None:
        """Until the next attempt; DownloadError after the last, Stopped if the worker leaves."""
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
        self._site, self._cache, self._commit = site, cache, commit
        self._retry_s, self._stop = retry_s, stop

    def fetch(self, file: RemoteFile) -> None:
        """`file` whole, verified and in the snapshot. DownloadError, or Stopped."""
        try:
            with self._cache.writing(file, self._stop):
                if not self._cache.is_there(file):
                    self._bring(file)
                self._cache.link(self._commit, file)
        except OSError as error:
            where = self._cache.root
            if error.errno in _FULL:
                raise DownloadError(f"{where} is full; {file.name} does not fit in.") from error
            raise DownloadError(f"{where}: {file.name}: {error.strerror or error}.") from error

    def _bring(self, file: RemoteFile) -> None:
        partial, patience = self._cache.partial(file), Patience(self._retry_s, self._stop)
        while True:
            with partial.open("ab+") as output:
                digest, was_resumed = _digest(file), self._resume(output, file)
                _feed(digest, output)
                while output.tell() != file.size:
                    digest = self._receive(output, file, digest, patience)
                output.flush()
                os.fsync(output.fileno())
            if digest.hexdigest() == file.etag:
                partial.replace(self._cache.blob(file))
                return
            partial.unlink()
            if not was_resumed:
                raise DownloadError(
                    f"{file.name} is not what the hub lists: its checksum is "
                    f"{digest.hexdigest()[:12]}…, not {file.etag[:12]}…."
                )
            # What an earlier process left may be at fault (a node that lost power): once more.

    def _resume(self, output: BinaryIO, file: RemoteFile) -> bool:
        """Whether `output` holds a beginning of `file`; what is longer than it is dropped."""
        if output.seek(0, os.SEEK_END) > (file.size or 0):
            output.truncate(0)
        return output.seek(0, os.SEEK_END) > 0

    def _receive(
        self, output: BinaryIO, file: RemoteFile, digest: _Digest, patience: Patience
    ) -> _Digest:
        """One connection's worth of bytes; the digest of all that is in `output` then."""
        start = output.tell()
        try:
            with self._site.content(self._commit, file, start) as response:
                if start and not _continues(response, start):
                    output.truncate(0)
                    output.seek(0)
                    digest = _digest(file)
                for part in response.iter_bytes():  # as it comes: a cut loses none
                    if self._stop.is_set():
                        raise Stopped
                    output.write(part)
                    digest.update(part)
                    patience.progress()
            if output.tell() < (file.size or 0):
                raise Transient(f"the connection ended in the middle of {file.name}")
        except Transient as failure:
            output.flush()
            patience.wait(failure)
        if output.tell() > (file.size or 0):
            raise DownloadError(f"{file.name} is longer than the {file.size} bytes listed.")
        return digest


def _continues(response: httpx.Response, start: int) -> bool:
    """Whether the server sends from byte `start` on, as asked."""
    said = re.match(r"bytes (\d+)-", response.headers.get("content-range", ""))
    return response.status_code == 206 and said is not None and int(said[1]) == start


def _digest(file: RemoteFile) -> _Digest:
    """SHA-256 of a large file; of a small one git's blob id, SHA-1 over a header and the content.

    SHA-1 finds damage here, which is all it is asked for: git itself names the file so.
    """
    if re.fullmatch("[0-9a-f]{64}", file.etag):
        return hashlib.sha256()
    if re.fullmatch("[0-9a-f]{40}", file.etag):
        return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    return _NoDigest(file.etag)


def _feed(digest: _Digest, file: BinaryIO) -> None:
    """Add all of `file`, which is then at its end."""
    file.seek(0)
    while part := file.read(READ_BYTES):
        digest.update(part)
