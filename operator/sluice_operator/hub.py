"""Headers of a hub's model over HTTP: config.json and the beginnings of its files, no tensor.

Rim. What comes is hostile input: sizes are capped, and the connection is closed as soon as enough
was read, whether or not the server honours Range.
"""

import re
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
from sluice_worker.errors import CheckpointError
from sluice_worker.files import cause, json_object
from sluice_worker.redirects import RedirectRefused, Redirects
from sluice_worker.stored import MAX_INDEX_BYTES, MAX_VALUES

from .checkpoint import Checkpoint, Unread, examine

MAX_FILES = 32
"""Headers of more would take minutes; the index then tells the size."""
_TIMEOUT_S = 10.0
_DEADLINE_S = 60.0
"""For all of a model: the time above is for each read of a socket."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class _Unavailable(Exception):
    """The hub cannot be asked now; the message says why."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """ORG/NAME of `endpoint` at a branch, a tag or a commit. `proxy`: on the way there; `ends_s`:
    when to give up."""

    endpoint: str
    repo: str
    revision: str
    token: str | None = field(default=None, repr=False)
    proxy: str | None = None
    ends_s: float = field(default_factory=lambda: time.monotonic() + _DEADLINE_S, repr=False)


def read(model: HubModel, dtype: str, *, on_cpu: bool) -> Checkpoint | Unread:
    """What the headers of `model` say. Raises CheckpointError and SizingError, as the checkpoint's.

    CheckpointError also where the hub says that the model is not there or may not be read.
    """
    bearer = {"Authorization": f"Bearer {model.token}"} if model.token else {}
    headers = {"Accept-Encoding": "identity", "User-Agent": "sluice-operator", **bearer}
    try:
        with _Deadline(model.ends_s) as deadline:
            hooks = {"request": [deadline.watch]}
            with httpx.Client(headers=headers, proxy=model.proxy, event_hooks=hooks) as client:
                files = _Files.listed(Redirects(client, model.endpoint), model)
                return examine(files, dtype, files.commit, on_cpu=on_cpu)
    except (_Unavailable, httpx.HTTPError) as e:
        is_late = time.monotonic() >= model.ends_s  # whatever a connection that is shut looks like
        said = str(_late()) if is_late else str(e) or type(e).__name__
    except OSError as e:  # of a connection, httpx makes errors of its own
        said = f"the certificates that SSL_CERT_FILE names cannot be read: {cause(e)}"
    return Unread(f"{model.repo} cannot be read from {model.endpoint}: {said}")


class _Deadline:
    """Ends all that one reading has open, in time: of a hub that drips its headers or a body, each
    read is in time, and the whole never ends."""

    def __init__(self, ends_s: float) -> None:
        self._ends_s, self._sockets = ends_s, list[socket.socket]()
        self._timer = threading.Timer(max(0.0, ends_s - time.monotonic()), self._shut)
        self._timer.daemon = True

    def __enter__(self) -> "_Deadline":
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, request: httpx.Request) -> None:
        """Called by httpx before it sends `request`, which may open another connection."""
        left_s = self._ends_s - time.monotonic()
        if left_s <= 0:
            raise _late()
        request.extensions["timeout"] = httpx.Timeout(min(_TIMEOUT_S, left_s)).as_dict()
        others = request.extensions["trace"]

        def trace(event: str, info: Any) -> None:
            others(event, info)
            if event.endswith(("connect_tcp.complete", "start_tls.complete")):
                self._sockets.append(info["return_value"].get_extra_info("socket"))
                if time.monotonic() >= self._ends_s:  # too late for the timer
                    self._shut()

        request.extensions["trace"] = trace

    def _shut(self) -> None:
        for opened in list(self._sockets):
            with suppress(OSError):  # closed already
                # Not the method of a TLS socket, which another thread reads from.
                socket.socket.shutdown(opened, socket.SHUT_RDWR)


def _late() -> _Unavailable:
    return _Unavailable(f"it took over {_DEADLINE_S:g} s")


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one commit, as a `checkpoint.Source`."""

    _hub: Redirects
    _model: HubModel
    commit: str
    _names: Collection[str]

    @classmethod
    def listed(cls, hub: Redirects, model: HubModel) -> "_Files":
        """Ask the hub what there is."""
        path = f"api/models/{model.repo}/revision/{quote(model.revision, safe='')}"
        with _answer(hub, model, path) as response:
            body = _beginning(response, MAX_INDEX_BYTES + 1, model.ends_s)
        try:
            answer: Any = json_object(body, path, MAX_VALUES)
            commit = str(answer["sha"])
            names = {str(sibling["rfilename"]) for sibling in answer["siblings"]}
        except (CheckpointError, KeyError, TypeError) as e:
            raise _Unavailable("its answer lists no files; is it a Hugging Face hub?") from e
        if not _COMMIT.fullmatch(commit):
            raise _Unavailable("it names no commit")
        return cls(hub, model, commit, names)

    @property
    def title(self) -> str:
        return self._model.repo

    @property
    def max_headers(self) -> int:
        return MAX_FILES

    def names(self) -> Collection[str]:
        """Those at the top."""
        return {name for name in self._names if "/" not in name}

    def read(self, name: str, start: int, length: int) -> bytes:
        path = f"{self._model.repo}/resolve/{self.commit}/{quote(name, safe='')}"
        span = {"Range": f"bytes={start}-{start + length - 1}"}
        with _answer(self._hub, self._model, path, span) as response:
            skipped = 0 if response.status_code == 206 else start
            return _beginning(response, skipped + length, self._model.ends_s)[skipped:]


@contextmanager
def _answer(
    hub: Redirects, model: HubModel, path: str, headers: Mapping[str, str] | None = None
) -> Iterator[httpx.Response]:
    request = hub.client.build_request("GET", f"{model.endpoint}/{path}", headers=headers)
    try:
        response = hub.send(request)
    except RedirectRefused as e:
        raise CheckpointError(str(e)) from e
    with closing(response):
        if response.status_code == 416:
            raise CheckpointError(f"{path.rpartition('/')[2]} is empty.")
        if not response.is_success:
            code = response.headers.get("x-error-code", "")
            raise _refusal(model, path, response.status_code, code)
        yield response


def _refusal(model: HubModel, path: str, status: int, code: str) -> Exception:
    """What a person must put right, or else that it cannot be asked now.

    A hub answers 401 for what does not exist, too. A 403 without its code may be a proxy's.
    """
    named = "in spec.model.secretRef a Secret whose key `token` holds a token that may read it"
    if code == "GatedRepo":
        return CheckpointError(f"{model.repo} is gated: name {named}.")
    if code == "RevisionNotFound":
        return CheckpointError(f"{model.repo} has no revision {model.revision}.")
    if code == "EntryNotFound":
        return CheckpointError(f"{model.repo} has no {path.rpartition('/')[2]}.")
    if code == "RepoNotFound" or status in (401, 404):
        where = f"does not exist on {model.endpoint}, or is private"
        return CheckpointError(f"{model.repo} {where}: name {named}.")
    return _Unavailable(f"it answered {status}")


def _beginning(response: httpx.Response, most: int, ends_s: float) -> bytes:
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) >= most:
            break
    if time.monotonic() >= ends_s:  # a connection that is shut may look like the end of a body
        raise _late()
    return bytes(body[:most])
