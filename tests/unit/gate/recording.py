"""*Rim*: a made-up engine that records what reaches it, and a client that sends any bytes."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode()
ANSWER = json.dumps(
    {"choices": [{"index": 0, "text": "a"}], "usage": {"prompt_tokens": 1}}
).encode()


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it reached the engine; names of `headers` are lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Engine:
    """What was received, but for the gate's own looks; `more`: headers of each answer."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    more: dict[str, str] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        looks = ("/v1/models", "/metrics", "/health", "/api/version", "/api/ps")
        headers = {name.lower(): value for name, value in self.headers.items()}
        if self.path not in looks and not (self.path == "/api/generate" and b"-1}" in body):
            self.engine.received.append(Received(self.command, self.path, headers, body))
        answer = MODELS if self.path == "/v1/models" else ANSWER
        if self.path == "/api/ps":
            answer = b'{"models": [{"name": "m:latest", "model": "m:latest"}]}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        for name, value in self.engine.more.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@contextmanager
def engine() -> Iterator[Engine]:
    """A made-up engine on a free port of loopback."""
    made = Engine()
    handler = type("Handler", (_Handler,), {"engine": made})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield made
        finally:
            server.shutdown()
            thread.join()


def exchange(url: str, head: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send these bytes on a connection of their own; the answer's status and all of its bytes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode("latin-1") + body)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer.split(b" ", 2)[1]), answer
