"""An HTTP proxy on loopback that forwards what it is asked for, and remembers it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


@dataclass
class Proxy:
    """`asked`: the URLs that came by."""

    url: str
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.proxy.asked.append(self.path)
        with httpx.Client(trust_env=False) as client:
            answer = client.get(self.path, headers=dict(self.headers))
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name not in ("connection", "content-length"):
                self.send_header(name, value)
        self.send_header("content-length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)


@contextmanager
def running_proxy() -> Iterator[Proxy]:
    """Serves until the block ends."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.proxy = Proxy(f"http://127.0.0.1:{server.server_port}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield handler.proxy  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
