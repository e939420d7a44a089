"""A model of the hub as a local directory.

Small files come first, so that what cannot be served is refused before its weights are fetched.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from ..errors import DownloadError
from ..files import INDEX, read_json
from .cache import Cache
from .listing import Listing, RemoteFile, small_files, total_bytes, weight_files
from .reference import Access, HubModel
from .site import Site, Transient
from .transfer import Patience, Transfer

log = logging.getLogger(__name__)

MAX_PARALLEL = 8
"""Files at a time, as huggingface_hub's."""
POLL_S = 0.2

Progress = Callable[[int, int], None]
"""(bytes that are there, bytes of all)."""


def download(
    model: HubModel,
    access: Access,
    *,
    weights: bool,
    check: Callable[[Path], None],
    progress: Progress,
    stop: threading.Event,
) -> Path:
    """The directory that holds `model`, fetched as far as it is not there.

    `weights` False leaves them out. `check` is given the directory when all but the weights is
    there, and may refuse it. Raises StartupError with one sentence, or Stopped once `stop` is set.
    """
    cache = Cache(access.cache, model.repo)
    known = cache.complete(model, weights=weights)
    if known is not None and (access.offline or model.commit is not None):
        return known
    if access.offline:
        raise DownloadError(f"HF_HUB_OFFLINE is set, and {access.cache} has no whole {model}.")
    with Site(access, model) as site:
        patience = Patience(access.retry_s, stop)
        try:
            listing = patience.attempt(site.listing)
        except DownloadError as error:
            if known is None or not isinstance(error.__cause__, Transient):
                raise
            log.warning("the hub is away", extra={"reason": error.message, "kept": str(known)})
            return known
        cache.prepare(listing.commit)
        transfer = Transfer(site, cache, listing.commit, access.retry_s, stop)
        _Batch(site, cache, listing, transfer, access, stop).run(model, weights, check, progress)
        cache.remember(model, listing.commit)
    return cache.snapshot(listing.commit)


class _Batch:
    """The files of one commit; the attributes are what both rounds need."""

    def __init__(
        self,
        site: Site,
        cache: Cache,
        listing: Listing,
        transfer: Transfer,
        access: Access,
        stop: threading.Event,
    ) -> None:
        self._site, self._cache, self._listing = site, cache, listing
        self._transfer, self._access, self._stop = transfer, access, stop

    def run(
        self, model: HubModel, weights: bool, check: Callable[[Path], None], progress: Progress
    ) -> None:
        small = self._described(small_files(model.repo, self._listing, weights=weights))
        self._fetch(small, lambda done, total: None)
        directory = self._cache.snapshot(self._listing.commit)
        check(directory)
        if not weights:
            return
        has_index = INDEX in self._listing.files
        index = read_json(directory, INDEX) if has_index else None
        large = self._described(weight_files(model.repo, self._listing, index))
        self._refuse_without_room(large)
        self._fetch(large, progress)

    def _described(self, files: Iterable[RemoteFile]) -> list[RemoteFile]:
        """`files` with size and etag: a mirror's listing may lack them."""
        patience = Patience(self._access.retry_s, self._stop)
        commit = self._listing.commit

        def ask(file: RemoteFile) -> RemoteFile:
            return patience.attempt(lambda: self._site.described(commit, file))

        return [file if file.etag and file.size is not None else ask(file) for file in files]

    def _refuse_without_room(self, files: list[RemoteFile]) -> None:
        needed = total_bytes(files) - self._num_bytes(files)
        free = shutil.disk_usage(self._cache.root).free
        if needed > free:
            raise DownloadError(
                f"{self._cache.repo} needs {needed / 2**30:.1f} GiB more in {self._cache.root}, "
                f"where {free / 2**30:.1f} GiB are free."
            )

    def _num_bytes(self, files: list[RemoteFile]) -> int:
        return sum(self._cache.num_bytes(file) for file in files)

    def _fetch(self, files: list[RemoteFile], progress: Progress) -> None:
        """All of `files`; the first failure stops the others."""
        total = total_bytes(files)
        with ThreadPoolExecutor(MAX_PARALLEL, "hub") as pool:
            pending = {pool.submit(self._transfer.fetch, file) for file in files}
            try:
                while pending:
                    progress(self._num_bytes(files), total)
                    done, pending = wait(pending, POLL_S, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        progress(total, total)
