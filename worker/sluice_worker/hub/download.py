"""A model of the hub as a local directory.

Small files come first, so a model that cannot be served is refused before its weights come.
"""

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from sluice_core.errors import DownloadError
from sluice_core.hub.listing import Listing, RemoteFile, small_files, total_bytes, weight_files
from sluice_core.hub.reference import Access, HubModel
from sluice_core.hub.site import Site, Transient

from .cache import Cache
from .transfer import Transfer, TransferPatience

log = logging.getLogger(__name__)

MAX_PARALLEL = 8
"""Files at a time, as huggingface_hub's."""
POLL_S = 0.2

Progress = Callable[[int, int], None]
"""(bytes received, bytes in total)."""


def download(
    model: HubModel,
    access: Access,
    *,
    weights: bool,
    check: Callable[[Path], None],
    progress: Progress,
    stop: threading.Event,
) -> Path:
    """The directory that holds `model`; missing files are fetched.

    `weights` False leaves them out. `check` gets the directory before the weights come, and may
    refuse it. Raises StartupError with one sentence, or Stopped once `stop` is set.
    """
    cache = Cache(access.cache, model.repo)
    known = cache.complete(model, weights=weights)
    if known is not None and (access.offline or model.commit is not None):
        return known
    if access.offline:
        raise DownloadError(f"HF_HUB_OFFLINE is set, and {access.cache} has no whole {model}.")
    advice = "the token of HF_TOKEN may not read it" if access.token else "set HF_TOKEN"
    timeout_s = access.timeout_s
    with Site(access.endpoint, model, access.token, advice=advice, timeout_s=timeout_s) as site:
        try:
            listing = TransferPatience(access.retry_s, stop).attempt(site.listing)
        except DownloadError as error:
            if known is None or not isinstance(error.__cause__, Transient):
                raise
            log.warning("the hub is away", extra={"reason": error.message, "kept": str(known)})
            return known
        transfer = Transfer(site, cache, listing.commit, access.retry_s, stop)
        directory = _fetch_small(transfer, listing, check, weights=weights)
        if weights:
            large = transfer.described(weight_files(model.repo, listing, directory))
            _refuse_without_room(cache, large)
            _fetch(transfer, large, progress)
        cache.remember(model, listing.commit)
    return directory


def _fetch_small(
    transfer: Transfer, listing: Listing, check: Callable[[Path], None], *, weights: bool
) -> Path:
    """All but the weights, which `check` approves of; the directory."""
    cache = transfer.cache
    cache.prepare(listing.commit)
    small = transfer.described(small_files(cache.repo, listing, weights=weights))
    _fetch(transfer, small, lambda done, total: None)
    directory = cache.snapshot(listing.commit)
    check(directory)
    return directory


def _refuse_without_room(cache: Cache, files: list[RemoteFile]) -> None:
    needed = total_bytes(files) - sum(map(cache.num_bytes, files))
    free = shutil.disk_usage(cache.root).free
    if needed > free:
        raise DownloadError(
            f"{cache.repo} needs {needed / 2**30:.1f} GiB more in {cache.root}, "
            f"where {free / 2**30:.1f} GiB are free."
        )


def _fetch(transfer: Transfer, files: list[RemoteFile], progress: Progress) -> None:
    """Fetch all of `files`; the first failure stops the others."""
    total = total_bytes(files)
    with ThreadPoolExecutor(MAX_PARALLEL, "hub") as pool:
        pending = {pool.submit(transfer.fetch, file) for file in files}
        try:
            while pending:
                progress(sum(map(transfer.cache.num_bytes, files)), total)
                done, pending = wait(pending, POLL_S, FIRST_EXCEPTION)
                for future in done:
                    future.result()
        except BaseException:
            transfer.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    progress(total, total)
