"""A way to the real API server that can fail as load balancers and etcd do."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from integration.apiserver import ApiServer

NO_LEADER = {
    "type": "ERROR",
    "object": {"kind": "Status", "code": 500, "message": "etcdserver: no leader"},
}

_OUR_OWN = ("host", "connection", "accept-encoding")
"""Headers of a request that are not handed on: answers come as they are."""


class Gateway(ThreadingHTTPServer):
    """Hands all requests on; while `fails`, a watch gets an ERROR event, as without a leader."""

    daemon_threads = True

    def __init__(self, server: ApiServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urlsplit(server.url)
        self.tls = ssl.create_default_context(cafile=server.certificate_authority)
        self.tls.load_cert_chain(server.client_certificate, server.client_key)
        self.fails = False
        self._watches: set[socket.socket] = set()

    @contextlib.contextmanager
    def watched(self, connection: socket.socket) -> Iterator[None]:
        """While a watch lasts."""
        self._watches.add(connection)
        try:
            yield
        finally:
            self._watches.discard(connection)

    def fail(self) -> None:
        """End all watches; new ones fail from now on."""
        self.fails = True
        for connection in list(self._watches):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def _forward(self) -> None:
        is_watch = "watch=true" in self.path
        if is_watch and self.server.fails:
            return self._answer(200, json.dumps(NO_LEADER).encode() + b"\n")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _OUR_OWN}
        host, port = self.server.upstream.hostname or "", self.server.upstream.port
        upstream = http.client.HTTPSConnection(host, port, context=self.server.tls)
        with contextlib.closing(upstream), contextlib.suppress(OSError):
            upstream.request(self.command, self.path, body, kept)
            answer = upstream.getresponse()
            if not is_watch:
                return self._answer(answer.status, answer.read())
            self._head(answer.status, "Transfer-Encoding", "chunked")
            with self.server.watched(self.connection):
                while part := answer.read1(1 << 16):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                self.wfile.write(b"0\r\n\r\n")
        return None

    def _answer(self, status: int, body: bytes) -> None:
        self._head(status, "Content-Length", str(len(body)))
        self.wfile.write(body)

    def _head(self, status: int, name: str, value: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header(name, value)
        self.end_headers()

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _forward

    def log_message(self, *_: Any) -> None:
        """The API server has its own log."""


@contextlib.contextmanager
def gateway(server: ApiServer, folder: Path) -> Iterator[tuple[Gateway, ApiServer]]:
    """A gateway, and the server as it is seen through it."""
    with Gateway(server) as made:
        url = f"http://127.0.0.1:{made.server_port}"
        config = json.loads(server.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": url}
        path = folder / "through-gateway"
        path.write_text(json.dumps(config))
        threading.Thread(target=made.serve_forever, daemon=True).start()
        try:
            yield made, replace(server, url=url, kubeconfig=path)
        finally:
            made.shutdown()
