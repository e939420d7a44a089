"""A hub on loopback: the routes that are used of huggingface.co, a CDN, and faults on demand."""

from __future__ import annotations

import hashlib
import json
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from sluice_cluster.node import pki

COMMIT = "c0ffee" + "0" * 34
REPO = "acme/tiny"
TOKEN = "hf_test_canary"
CHUNK_BYTES = 16 << 10


def git_blob_id(content: bytes) -> str:
    """The id that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def safetensors(header: dict[str, Any], num_bytes: int) -> bytes:
    """A file with `header`, which says what it likes, and `num_bytes` behind it."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(i % 251 for i in range(num_bytes))


@dataclass(frozen=True)
class Seen:
    """One request, as the server saw it."""

    method: str
    path: str
    range: str
    authorization: str
    on_cdn: bool


@dataclass
class Hub:
    """What the server holds and how it misbehaves; both may be changed while it runs.

    `cuts`: for a file, after how many bytes each of its next answers breaks off. `answers`: for a
    path's end, statuses and headers of its next answers. `corrupt`: files sent with a wrong byte.
    `gate`: while it is cleared, large files stop half-way; `listing_gate`: no listing is answered.
    """

    files: dict[str, bytes]
    repo: str = REPO
    commit: str = COMMIT
    needs_token: bool = False
    gated: bool = False
    tells_sizes: bool = True
    serves_ranges: bool = True
    cuts: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    corrupt: set[str] = field(default_factory=set)
    seen: list[Seen] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    listing_gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    cdn_url: str = ""

    def __post_init__(self) -> None:
        self.gate.set()
        self.listing_gate.set()

    def fetched(self, name: str) -> list[Seen]:
        """The requests for the content of a file that the last host answered."""
        is_large = self.is_large(name)
        return [
            seen
            for seen in list(self.seen)
            if seen.path.endswith("/" + name) and seen.method == "GET" and seen.on_cdn == is_large
        ]

    def is_large(self, name: str) -> bool:
        """Whether it is kept outside git, behind the CDN."""
        return name.endswith((".safetensors", ".bin"))

    def etag(self, name: str) -> str:
        """SHA-256 of a large file, git's id of a small one."""
        content = self.files[name]
        return hashlib.sha256(content).hexdigest() if self.is_large(name) else git_blob_id(content)

    def listing(self, *, blobs: bool) -> dict[str, Any]:
        """The answer of the API."""
        siblings = [self._sibling(name, blobs=blobs) for name in self.files]
        return {"id": self.repo, "sha": self.commit, "siblings": siblings}

    def _sibling(self, name: str, *, blobs: bool) -> dict[str, Any]:
        if not blobs or not self.tells_sizes:
            return {"rfilename": name}
        size = len(self.files[name])
        large = {"sha256": self.etag(name), "size": size, "pointerSize": 134}
        lfs = {"lfs": large} if self.is_large(name) else {}
        return {"rfilename": name, "size": size, "blobId": "0" * 40, **lfs} | (
            {} if lfs else {"blobId": self.etag(name)}
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    on_cdn: bool

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        hub, parts = self.hub, urlsplit(self.path)
        headers = self.headers
        authorization, span = headers.get("Authorization", ""), headers.get("Range", "")
        hub.seen.append(Seen(self.command, parts.path, span, authorization, self.on_cdn))
        planned = next((key for key in hub.answers if parts.path.endswith(key)), None)
        if planned is not None and hub.answers[planned]:
            status, extra = hub.answers[planned].pop(0)
            self._reply(status, b"", extra)
        elif self.on_cdn:
            self._content(parts.path.removeprefix("/"))
        elif hub.needs_token and authorization != f"Bearer {TOKEN}":
            self._reply(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif parts.path.startswith(f"/api/models/{hub.repo}/revision/"):
            self._listing(parts.path.rpartition("/")[2], "blobs" in parse_qs(parts.query))
        elif parts.path.startswith(f"/{hub.repo}/resolve/"):
            self._resolve(parts.path.split("/", 5)[5], authorization)
        else:
            self._reply(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _listing(self, revision: str, blobs: bool) -> None:
        if revision not in ("main", self.hub.commit):
            self._reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.hub.listing_gate.wait(30)
            self._reply(200, json.dumps(self.hub.listing(blobs=blobs)).encode(), {})

    def _resolve(self, name: str, authorization: str) -> None:
        hub = self.hub
        if hub.gated and authorization != f"Bearer {TOKEN}":
            self._reply(403, b"", {"X-Error-Code": "GatedRepo"})
        elif name not in hub.files:
            self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif hub.is_large(name):
            linked = {"X-Linked-Etag": f'"{hub.etag(name)}"'}
            linked["X-Linked-Size"] = str(len(hub.files[name]))
            linked["X-Repo-Commit"] = hub.commit
            self._reply(302, b"", {"Location": f"{hub.cdn_url}/{name}", **linked})
        else:
            self._content(name)

    def _content(self, name: str) -> None:
        hub = self.hub
        content = hub.files[name]
        if name in hub.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start, end = 0, len(content)
        headers = {"ETag": f'"{hub.etag(name)}"'}
        span = self.headers.get("Range", "")
        is_part = bool(span) and hub.serves_ranges
        if is_part:
            first, _, last = span.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else end, end)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        cuts = hub.cuts.get(name) or []
        sent = content[start : start + cuts.pop(0)] if cuts else content[start:end]
        self._head(206 if is_part else 200, end - start, headers)
        if self.command == "HEAD":
            return
        for at in range(0, len(sent), CHUNK_BYTES):
            if self.on_cdn and at >= len(sent) // 2:
                hub.gate.wait(30)
            self.wfile.write(sent[at : at + CHUNK_BYTES])
        if len(sent) < end - start:
            self.close_connection = True

    def _reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(key, value)
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no news."""


@contextmanager
def running_hub(hub: Hub, tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """Serve `hub` on two free ports, one of them the CDN's; its URLs are filled in."""
    servers = []
    for on_cdn in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "on_cdn": on_cdn})
        server = _Server(("127.0.0.1", 0), handler)
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    scheme = "https" if tls else "http"
    hub.url, hub.cdn_url = (f"{scheme}://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        hub.gate.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def tls_of_own(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """For a hub with an authority of its own, made in `folder`, and that one's certificate."""
    authority = pki.create(folder, [pki.Identity("hub", "hub", addresses=("127.0.0.1",))])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.cert("hub"), authority.key("hub"))
    return context, authority.certificate


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a checkpoint, as a repository's."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
