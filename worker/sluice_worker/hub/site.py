"""The hub over HTTP: one request each, and its refusals as sentences."""

import contextlib
import json
from collections.abc import Iterator
from urllib.parse import quote

import httpx

from ..errors import DownloadError
from ..files import cause
from ..redirects import RedirectRefused, Redirects
from .listing import Listing, RemoteFile, clean_etag, parse_listing
from .reference import Access, HubModel

MAX_LISTING_BYTES = 64 << 20
_RETRYABLE = frozenset({408, 425, 429, 500, 502, 503, 504})


class Transient(Exception):
    """Worth another attempt: a broken or slow connection, a busy server."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message, self.retry_after_s = message, retry_after_s


class Site:
    """One hub. A token goes to its own host only: redirects to a CDN carry none (httpx)."""

    def __init__(self, access: Access, model: HubModel) -> None:
        self._access, self._model = access, model
        bearer = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        # Compressed content could neither be resumed nor be compared with its hash.
        headers = {"Accept-Encoding": "identity", "User-Agent": "sluice", **bearer}
        try:
            self._client = httpx.Client(headers=headers, timeout=access.timeout_s)
        except OSError as error:
            raise DownloadError(
                f"the certificates that SSL_CERT_FILE names cannot be read: {cause(error)}."
            ) from error
        self._redirects = Redirects(self._client, access.endpoint)

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def listing(self) -> Listing:
        """Commit and files of the model's revision; Transient, or DownloadError."""
        path = f"api/models/{self._model.repo}/revision/{quote(self._model.revision, safe='')}"
        with self._answer("GET", path, params={"blobs": "true"}) as response:
            body = _read(response, MAX_LISTING_BYTES)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise DownloadError(
                f"{self._access.endpoint} is not a hub: no JSON at {path}."
            ) from error
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
        if not etag or size is None or not size.isdigit():
            raise DownloadError(f"{self._access.endpoint} tells no size and etag of {file.name}.")
        return RemoteFile(file.name, int(size), etag)

    @contextlib.contextmanager
    def content(self, commit: str, file: RemoteFile, start: int) -> Iterator[httpx.Response]:
        """The content from byte `start` on (206), or the whole if the server cannot (200).

        The path names a commit, whose files never change: no If-Range is needed.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._answer("GET", self._path(commit, file.name), headers=headers) as response:
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
        url = f"{self._access.endpoint}/{path}"
        request = self._client.build_request(method, url, headers=headers, params=params)
        try:
            if follow_redirects:
                response = self._redirects.send(request)
            else:
                response = self._client.send(request, stream=True)
        except RedirectRefused as error:
            raise DownloadError(str(error)) from error
        except httpx.HTTPError as error:
            raise Transient(f"{self._access.endpoint} cannot be reached: {_said(error)}") from error
        try:
            self._check(response)
            yield response
        except httpx.HTTPError as error:
            raise Transient(f"{response.url.host} broke off: {_said(error)}") from error
        finally:
            response.close()

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.is_success or response.is_redirect:
            return
        own = httpx.URL(self._access.endpoint).netloc
        if status in _RETRYABLE or response.url.netloc != own:  # a CDN's signed link runs out
            wait = response.headers.get("retry-after", "")
            message = f"{response.url.host} answered {status}"
            raise Transient(message, float(wait) if wait.isdigit() else 0.0)
        raise DownloadError(self._refusal(status, response.headers.get("x-error-code", "")))

    def _refusal(self, status: int, code: str) -> str:
        """Why the hub does not give the model. It answers 401 for what does not exist, too."""
        endpoint, repo = self._access.endpoint, self._model.repo
        token = "the token of HF_TOKEN may not read it" if self._access.token else "set HF_TOKEN"
        if code == "GatedRepo":
            return f"{repo} is gated: accept its terms at {endpoint}/{repo}, and {token}."
        if code == "RevisionNotFound":
            return f"{repo} has no revision {self._model.revision} on {endpoint}."
        if code == "RepoNotFound" or status == 404:
            return f"{repo} does not exist on {endpoint}, or is private: {token}."
        if status in (401, 403):
            return f"{endpoint} gives no access to {repo} ({status}): {token}."
        return f"{endpoint} answered {status} for {repo}."


def _said(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _read(response: httpx.Response, most: int) -> bytes:
    body = bytearray()
    for part in response.iter_bytes():
        body += part
        if len(body) > most:
            raise DownloadError(f"{response.url.host} sent more than {most >> 20} MiB of listing.")
    return bytes(body)
