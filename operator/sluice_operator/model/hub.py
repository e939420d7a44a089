"""Headers of a hub's model over HTTP: config.json and the beginnings of its files, no tensor.

Rim. All that arrives is hostile input: the connection is closed as soon as enough was read, even if
the server ignores Range. All requests of one reading share a deadline.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial

import httpx
from sluice_core.errors import StartupError
from sluice_core.hub import reference
from sluice_core.hub.listing import Listing
from sluice_core.hub.site import TIMEOUT_S, NoCertificates, Site, Transient, beginning
from sluice_core.model.sizing import SizingError

from .checkpoint import ModelFacts, Refused, Unread, examine, examine_gguf
from .disk import Download, download_of, gguf_files

MAX_FILES = 32
"""Headers of more files would take minutes; the index then tells the size."""
_DEADLINE_S = 60.0
"""Seconds for a whole model: TIMEOUT_S covers only each read of a socket."""
_ADVICE = "name in spec.model.secretRef a Secret whose key `token` holds a token that may read it"


@dataclass(frozen=True, slots=True)
class HubSource:
    """ORG/NAME of `endpoint` at a branch, a tag or a commit. `proxy`: on the way there; `ends_s`:
    when to give up."""

    endpoint: str
    repo: str
    revision: str
    token: str | None = field(default=None, repr=False)
    proxy: str | None = None
    ends_s: float = field(default_factory=lambda: time.monotonic() + _DEADLINE_S, repr=False)


def read(
    model: HubSource, dtype: str, *, on_cpu: bool, gguf: bool = False
) -> ModelFacts | Unread | Refused:
    """Facts from `model`'s headers; `gguf`: of its GGUF files. Refused, with the size of its files
    if they are listed, if it is not there, may not be read or cannot be served."""
    named, download = reference.HubModel(model.repo, model.revision), Download()
    try:
        with Site(
            model.endpoint, named, model.token,
            advice=_ADVICE, proxy=model.proxy, watch=partial(_watch, model.ends_s),
        ) as site:  # fmt: skip
            files = _Files(site, model, site.listing())
            download = download_of(files.listing.files.values())
            commit = files.listing.commit
            if gguf:
                parts = gguf_files(files.listing.files.values())
                facts = examine_gguf(files, [part.name for part in parts], commit)
            else:
                facts = examine(files, dtype, commit, on_cpu=on_cpu)
            return replace(facts, download=download)
    except (Transient, StartupError, SizingError) as e:
        if time.monotonic() >= model.ends_s:  # whatever caused the silence
            late = f"it took over {_DEADLINE_S:g} s"
            return Unread(f"{model.repo} cannot be read from {model.endpoint}: {late}")
        if isinstance(e, Transient | NoCertificates):
            return Unread(f"{model.repo} cannot be read: {e.message}")
        return Refused(str(e), download=download)


def _watch(ends_s: float, request: httpx.Request) -> None:
    """Called by httpx before it sends `request`: no silence may outlast the deadline."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise Transient("it is too late")
    request.extensions["timeout"] = httpx.Timeout(min(TIMEOUT_S, left_s)).as_dict()


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one commit, as a `files.Source`."""

    _site: Site
    _model: HubSource
    listing: Listing

    @property
    def title(self) -> str:
        return self._model.repo

    @property
    def max_headers(self) -> int:
        return MAX_FILES

    def names(self) -> Collection[str]:
        """Names of the files at the top."""
        return {name for name in self.listing.files if "/" not in name}

    def read(self, name: str, start: int, length: int) -> bytes:
        end = start + length
        with self._site.content(self.listing.commit, name, start, end) as response:
            skipped = 0 if response.status_code == 206 else start
            return beginning(response, skipped + length)[skipped:]
