"""A real gate in front of a made-up engine that fails: evidence and metrics tell how."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import httpx
import pytest
from integration.worker_process import Worker, gate_of
from sluice_cluster.shell import wait_until
from sluice_core.contract import Evidence, Tick, decode

Respond = Callable[[BufferedIOBase], None]
"""Answers one POST; the connection is closed after it."""
MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 2048}]}).encode()
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
LAST = b"0\r\n\r\n"


def plain(status: int, body: bytes, length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: "
    return (
        head.encode() + str(len(body) if length is None else length).encode() + b"\r\n\r\n" + body
    )


def chunk(event: object) -> bytes:
    data = b"data: %s\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode())
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "a", "finish_reason": finish_reason}]}


def answers(*parts: bytes) -> Respond:
    """Writes `parts` a moment apart, so that tokens do not come at once."""

    def respond(writer: BufferedIOBase) -> None:
        for part in parts:
            writer.write(part)
            time.sleep(0.002)

    return respond


TOKENS = [chunk(token())] * 5
WHOLE = answers(CHUNKED, *TOKENS, chunk(token("stop")), chunk(b"[DONE]"), LAST)


class _Engine(ThreadingTCPServer):
    """Answers GET as a sound engine would, and a POST by `respond`."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        super().__init__(("127.0.0.1", 0), _Connection)


class _Connection(StreamRequestHandler):
    server: _Engine

    def handle(self) -> None:
        with suppress(ConnectionError):
            head = b"".join(iter(self.rfile.readline, b"\r\n"))
            if head.startswith(b"GET"):
                self.wfile.write(plain(200, MODELS))
            elif head:
                length = head.lower().partition(b"content-length:")[2].split()[0]
                self.rfile.read(int(length))
                self.server.respond(self.wfile)


@contextmanager
def engine(respond: Respond) -> Iterator[str]:
    """Its address. All its connections have ended on leaving."""
    with _Engine(respond) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def gate(upstream: str, folder: Path) -> AbstractContextManager[Worker]:
    """A ready `sluice-gate` with a first-token target that no busy machine misses."""
    flags = ("--engine", "custom", "--max-num-seqs", "4", "--slo-ttft-ms", "20000")
    return gate_of(upstream, folder, *flags)


def asked(running: Worker, num: int, *, stream: bool = True) -> list[int]:
    """Statuses of `num` requests, each read to its end."""
    body = {"model": "m", "prompt": "Once", "max_tokens": 16, "stream": stream}
    url, statuses = running.url + "/v1/completions", []
    with httpx.Client(timeout=60, trust_env=False) as client:
        for _ in range(num):
            with client.stream("POST", url, json=body) as answer:
                statuses.append(answer.status_code)
                with suppress(httpx.RemoteProtocolError):
                    answer.read()
    return statuses


def evidence_of(running: Worker, num: int) -> dict[str, Any]:
    """Sums over the ticks, once `num` requests have ended in them."""
    ticks: list[Tick] = []

    def have_ended() -> bool:
        nonlocal ticks
        page = httpx.get(running.admin_url + "/v1/evidence", timeout=60, trust_env=False)
        ticks = decode(page.content, Evidence).ticks
        return sum(tick.finished + sum(tick.failed.values()) for tick in ticks) >= num

    wait_until("the requests' ticks", have_ended, 60.0)
    failed = Counter[str]()
    for tick in ticks:
        failed.update(tick.failed)
    return {
        "failed": dict(failed),
        "finished": sum(tick.finished for tick in ticks),
        "judged": sum(tick.ttft.n for tick in ticks),
        "over": sum(tick.ttft.over for tick in ticks),
        "good": sum(tick.good for tick in ticks),
    }


def metrics_of(running: Worker) -> str:
    return httpx.get(running.admin_url + "/metrics", timeout=60, trust_env=False).text


NUM = 12
CASES: dict[str, tuple[Respond, int, str | None, bool, bool]] = {
    "500 to all": (answers(plain(500, b"{}")), 500, "500", True, False),
    "503 of its own": (answers(plain(503, b"{}")), 503, "503", True, False),
    "429 of its own": (answers(plain(429, b"{}")), 429, "429", True, False),
    "400 to all": (answers(plain(400, b"{}")), 400, None, True, False),
    "cut after 5 tokens": (answers(CHUNKED, *TOKENS), 200, "cut", True, True),
    "ended after 5 tokens": (answers(CHUNKED, *TOKENS, LAST), 200, "cut", True, True),
    "empty stream": (answers(CHUNKED, LAST), 200, "cut", True, False),
    "error in the stream": (
        answers(CHUNKED, chunk({"error": {"message": "m", "code": 500}}), chunk(b"[DONE]"), LAST),
        200, "500", True, False,
    ),
    "error after tokens": (
        answers(CHUNKED, *TOKENS, chunk({"error": {"message": "m"}}), chunk(b"[DONE]"), LAST),
        200, "cut", True, True,
    ),
    "no answer": (answers(), 503, "died", True, False),
    "half a body": (answers(plain(200, b'{"usage":', 900)), 200, "cut", False, False),
}  # fmt: skip
"""Answers, what the client gets, how it is counted, whether it asks for a stream, and whether first
tokens came."""


@pytest.mark.parametrize("name", CASES)
def test_an_engine_that_fails_is_told_so_and_not_as_slow(name: str, tmp_path: Path) -> None:
    respond, status, kind, is_stream, has_tokens = CASES[name]
    with engine(respond) as upstream, gate(upstream, tmp_path) as running:
        assert asked(running, NUM, stream=is_stream) == [status] * NUM
        if kind is not None:
            judged = NUM if has_tokens else 0
            wanted = {"failed": {kind: NUM}, "finished": 0, "judged": judged, "over": 0, "good": 0}
            assert evidence_of(running, NUM) == wanted
            assert f'kind="{kind}"' in metrics_of(running)
        num_failed = NUM if kind is not None else 0
        assert running.metric("sluice_requests_failed_total") == num_failed


def test_an_engine_that_ends_its_answers_fails_none(tmp_path: Path) -> None:
    with engine(WHOLE) as upstream, gate(upstream, tmp_path) as running:
        assert asked(running, NUM) == [200] * NUM
        told = evidence_of(running, NUM)
        assert (told["failed"], told["finished"], told["judged"]) == ({}, NUM, NUM)
        assert running.metric("sluice_requests_failed_total") == 0


def test_an_engine_that_dies_in_the_middle_of_answers_has_cut_them(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=60)

    def die(writer: BufferedIOBase) -> None:
        writer.write(CHUNKED + b"".join(TOKENS))
        together.wait()

    with engine(die) as upstream, gate(upstream, tmp_path) as running:
        with ThreadPoolExecutor(4) as clients:
            asks = [clients.submit(asked, running, 1) for _ in range(4)]
        assert [ask.result() for ask in asks] == [[200]] * 4
        told = evidence_of(running, 4)
        assert (told["failed"], told["finished"], told["over"]) == ({"cut": 4}, 0, 0)


@pytest.mark.parametrize(
    ("name", "result"),
    [("cut after 5 tokens", "failed"), ("ended after 5 tokens", "cut"), ("500 to all", "failed")],
)
def test_sluice_load_tells_answers_without_an_end(name: str, result: str, tmp_path: Path) -> None:
    """Behind a gate a broken connection is an error event: a typed error, not a cut."""
    with engine(CASES[name][0]) as upstream, gate(upstream, tmp_path) as running:
        line = ("-m", "sluice", "load", "--url", running.url, "--model", "m", "--words")
        phases = ("--phases", "one:closed:1:0.5")
        ended = subprocess.run(
            [sys.executable, *line, *phases], capture_output=True, check=False, timeout=120
        )
    lines = [json.loads(each) for each in ended.stdout.splitlines()]
    (phase,) = [each for each in lines if "phase" in each]
    assert phase["results"] == {result: phase["sent"]}
    assert phase["sent"] > 0
    assert (phase["requests_per_s"], phase["p99_ttft_ms"]) == (0.0, None)
    assert ended.returncode == 1
