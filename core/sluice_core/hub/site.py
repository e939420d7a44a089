"""The hub over HTTP: one request each, and its refusals as sentences. Shared with the operator.

A problem that a person must fix is a DownloadError; one that may pass is Transient.
"""

import contextlib
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx

from ..bounded import count
from ..errors import CheckpointError, DownloadError
from ..model.files import cause, json_object
from ..model.stored import MAX_INDEX_BYTES, MAX_VALUES
from ..words import clean
from .listing import Listing, RemoteFile, clean_etag, parse_listing
from .redirects import RedirectRefused, Redirects
from .reference import HubModel

TIMEOUT_S = 10.0
"""The longest silence of a connection."""


class Transient(Exception):
    """Worth another attempt: a broken or slow connection, a busy server."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        self.message, self.retry_after_s = clean(message), retry_after_s
        super().__init__(self.message)


class NoCertificates(DownloadError):
    """This process cannot check who a hub is, whatever the model."""


class Site:
    """One model of one hub. A token goes to the hub's host only: redirects to a CDN carry none."""

    def __init__(
        self,
        endpoint: str,
        model: HubModel,
        token: str | None = None,
        *,
        advice: str,
        timeout_s: float = TIMEOUT_S,
        proxy: str | None = None,
        watch: Callable[[httpx.Request], None] | None = None,
    ) -> None:
        """`advice`: how a token that may read the model is given, as the end of a sentence.

        `proxy`: on the way, in place of the environment's. `watch` is called before each request.
        """
        self._endpoint, self._model, self._advice = endpoint, model, advice
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        # Compressed content could neither be resumed nor be compared with its hash.
        headers = {"Accept-Encoding": "identity", "User-Agent": "sluice", **bearer}
        hooks = {"request": [watch] if watch else []}
        try:
            self._client = httpx.Client(
                headers=headers, timeout=timeout_s, proxy=proxy, event_hooks=hooks
            )
        except OSError as error:
            raise NoCertificates(
                f"the certificates that SSL_CERT_FILE names cannot be read: {cause(error)}."
            ) from error
        self._redirects = Redirects(self._client, endpoint)

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def listing(self) -> Listing:
        """Commit and files of the model's revision; Transient, or DownloadError."""
        path = f"api/models/{self._model.repo}/revision/{quote(self._model.revision, safe='')}"
        with self._answer("GET", path, params={"blobs": "true"}) as response:
            body = beginning(response, MAX_INDEX_BYTES + 1)
        if len(body) > MAX_INDEX_BYTES:
            raise DownloadError(f"{self._endpoint} sent over {MAX_INDEX_BYTES >> 20} MiB of names.")
        try:
            answer = json_object(body, path, MAX_VALUES)
        except CheckpointError as error:
            raise DownloadError(f"{self._endpoint} is not a hub: {error.message}") from error
        return parse_listing(self._model.repo, answer)

    def described(self, commit: str, file: RemoteFile) -> RemoteFile:
        """`file` with size and etag as its own headers say, where the listing had none."""
        path = self._path(commit, file.name)
        with self._answer("HEAD", path, follow_redirects=False) as response:
            headers = response.headers
            etag = clean_etag(headers.get("x-linked-etag") or headers.get("etag"))
            size = headers.get("x-linked-size")
            if size is None and not response.is_redirect:
                size = headers.get("content-length")
        if not etag or (num_bytes := count(size)) is None:
            raise DownloadError(f"{self._endpoint} tells no size and etag of {file.name}.")
        return RemoteFile(file.name, num_bytes, etag)

    @contextlib.contextmanager
    def content(
        self, commit: str, name: str, start: int, end: int | None = None
    ) -> Iterator[httpx.Response]:
        """Bytes [start, end) of a file (206), or the whole if the server cannot (200).

        The path names a commit, whose files never change: no If-Range is needed.
        """
        last = "" if end is None else end - 1
        headers = {"Range": f"bytes={start}-{last}"} if start or end else {}
        with self._answer("GET", self._path(commit, name), headers=headers) as response:
            yield response

    def _path(self, commit: str, name: str) -> str:
        return f"{self._model.repo}/resolve/{commit}/{quote(name)}"

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        params: dict[str, str] | None = None,
        follow_redirects: bool = True,
    ) -> Iterator[httpx.Response]:
        url = f"{self._endpoint}/{path}"
        request = self._client.build_request(method, url, headers=headers, params=params)
        try:
            if follow_redirects:
                response = self._redirects.send(request)
            else:
                response = self._client.send(request, stream=True)
        except RedirectRefused as error:
            raise DownloadError(str(error)) from error
        except httpx.HTTPError as error:
            raise Transient(f"{self._endpoint} cannot be reached: {_said(error)}") from error
        try:
            if not (response.is_success or response.is_redirect):
                raise self._refusal(response, path.rpartition("/")[2])
            yield response
        except httpx.HTTPError as error:
            raise Transient(f"{response.url.host} broke off: {_said(error)}") from error
        finally:
            response.close()

    def _refusal(self, response: httpx.Response, name: str) -> DownloadError | Transient:
        """The reason of the hub's refusal. A hub also answers 401 for what does not exist.

        A 403 without a code may be a proxy's, and a CDN's signed link runs out: both may pass.
        """
        endpoint, repo, advice = self._endpoint, self._model.repo, self._advice
        code, status = response.headers.get("x-error-code", ""), response.status_code
        if status == 416:
            return DownloadError(f"{name}: empty.")
        if response.url.netloc == httpx.URL(endpoint).netloc:
            if code == "GatedRepo":
                terms = f"accept its terms at {endpoint}/{repo}, and {advice}"
                return DownloadError(f"{repo} is gated: {terms}.")
            if code == "RevisionNotFound":
                revision = self._model.revision
                return DownloadError(f"{repo} has no revision {revision} on {endpoint}.")
            if code == "EntryNotFound":
                return DownloadError(f"{repo} has no {name}.")
            if code == "RepoNotFound" or status in (401, 404):
                where = f"does not exist on {endpoint}, or is private"
                return DownloadError(f"{repo} {where}: {advice}.")
        wait = response.headers.get("retry-after", "")
        message = f"{response.url.host} answered {status}"
        return Transient(message, float(count(wait) or 0))


def beginning(response: httpx.Response, most: int) -> bytes:
    """At most so many bytes of an answer; no more is read than that."""
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) >= most:
            break
    return bytes(body[:most])


def _said(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
