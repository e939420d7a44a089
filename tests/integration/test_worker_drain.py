"""A worker that leaves: whoever still reaches it is answered, and told to connect elsewhere."""

import json
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from integration.worker_process import Worker, running_worker

FLAGS = ("--max-num-seqs", "8", "--num-gpu-blocks-override", "1024", "--shutdown-timeout", "60")
SHORT: dict[str, Any] = {"prompt": "def", "max_tokens": 4, "ignore_eos": True}
STREAM = {**SHORT, "max_tokens": 600, "stream": True}
NUM_CLIENTS = 8
Connect = Callable[[Worker], HTTPConnection]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """One that serves."""
    with running_worker(tmp_path, *FLAGS) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Gives a connection that never retries, nor connects again; closed at the test's end."""
    with ExitStack() as stack:

        def connect(worker: Worker) -> HTTPConnection:
            parts = urlsplit(worker.url)
            connection = HTTPConnection(parts.hostname or "", parts.port, timeout=60)
            stack.enter_context(closing(connection))
            connection.connect()
            connection.auto_open = 0
            return connection

        yield connect


def send(connection: HTTPConnection, body: dict[str, Any]) -> HTTPResponse:
    """Send a request; its answer's head."""
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection.getresponse()


def ask(connection: HTTPConnection, body: dict[str, Any] = SHORT) -> tuple[int, str]:
    """Status and Connection of a whole answer."""
    answer = send(connection, body)
    answer.read()
    return answer.status, answer.headers.get("connection", "")


def leave(worker: Worker) -> None:
    """Send SIGTERM, and wait until the worker has taken notice."""
    worker.terminate()
    while not any(event["event"] == "draining" for event in worker.events()):
        assert worker.process.poll() is None
        time.sleep(0.01)


def test_who_asks_while_a_stream_runs_is_answered_and_told_to_connect_elsewhere(
    worker: Worker, connect: Connect
) -> None:
    kept, streaming = connect(worker), connect(worker)
    assert ask(kept) == (200, "")
    stream = send(streaming, STREAM)
    leave(worker)
    assert ask(kept) == (200, "close")
    assert ask(connect(worker)) == (200, "close")
    assert ask(connect(worker), {**SHORT, "stream": True}) == (200, "close")
    assert stream.read().endswith(b"data: [DONE]\n\n")
    assert worker.process.wait(20) == 0


def test_who_asks_again_after_the_last_stream_is_answered(worker: Worker, connect: Connect) -> None:
    """The stream's status line went out before anything told the worker to leave."""
    kept = connect(worker)
    stream = send(kept, STREAM)
    leave(worker)
    assert stream.read().endswith(b"data: [DONE]\n\n")
    assert stream.headers.get("connection") is None
    assert ask(kept) == (200, "close")
    assert worker.process.wait(20) == 0


def test_a_request_whose_headers_have_begun_is_answered(worker: Worker, connect: Connect) -> None:
    kept, body = connect(worker), json.dumps(SHORT)
    assert ask(kept) == (200, "")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    kept.sock.sendall(head[:20].encode())
    leave(worker)
    assert not select.select([kept.sock], [], [], 2.5)[0], "the worker has hung up"
    kept.sock.sendall((head[20:] + body).encode())
    assert kept.sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_request_that_comes_as_the_worker_is_about_to_hang_up_is_answered(
    worker: Worker, connect: Connect
) -> None:
    """The worker stands still until its drain is over, and wakes with the request unread."""
    kept = connect(worker)
    assert ask(kept) == (200, "")
    leave(worker)
    os.kill(worker.process.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, kept)
        time.sleep(2.0)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert answer.result() == (200, "close")
    assert worker.process.wait(20) == 0


def test_none_of_many_clients_on_kept_connections_is_lost(worker: Worker, connect: Connect) -> None:
    results: Counter[tuple[int, str]] = Counter()
    under_way = threading.Barrier(NUM_CLIENTS + 1)

    def run(number: int) -> None:
        """Ask with this client's own pauses until told to connect elsewhere, or lost."""
        connection, num_asked, seen = connect(worker), 0, (200, "")
        while seen == (200, ""):
            try:
                seen = ask(connection, {**SHORT, "stream": number % 2 == 0})
            except OSError as error:
                seen = (0, repr(error))
            results[seen] += 1
            if (num_asked := num_asked + 1) == 5:
                under_way.wait(60)
            time.sleep(0.003 * number)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        runs = [pool.submit(run, number) for number in range(NUM_CLIENTS)]
        under_way.wait(60)
        worker.terminate()
        for one in runs:
            one.result()
    assert worker.process.wait(20) == 0
    assert set(results) == {(200, ""), (200, "close")}, results
    assert results[200, "close"] == NUM_CLIENTS


def test_for_the_delay_a_worker_serves_all_who_do_not_know_yet(
    tmp_path: Path, connect: Connect
) -> None:
    with running_worker(tmp_path, *FLAGS, "--shutdown-delay", "3") as worker:
        leave(worker)
        began_s = time.monotonic()
        while time.monotonic() < began_s + 2.5:
            assert ask(connect(worker)) == (200, "close")
        assert worker.process.wait(20) == 0
        assert time.monotonic() - began_s > 2.9


def test_a_connection_that_a_client_keeps_for_longer_than_the_delay_is_waited_for(
    tmp_path: Path, connect: Connect
) -> None:
    with running_worker(tmp_path, *FLAGS, "--shutdown-delay", "1") as worker:
        kept = connect(worker)
        assert ask(kept) == (200, "")
        leave(worker)
        assert not select.select([kept.sock], [], [], 5)[0], "the worker has hung up"
        assert ask(kept) == (200, "close")
        assert worker.process.wait(5) == 0, "and for nobody else"


def test_a_worker_without_connections_leaves_at_once(worker: Worker) -> None:
    began_s = time.monotonic()
    leave(worker)
    assert worker.process.wait(20) == 0
    assert time.monotonic() - began_s < 5


def test_who_keeps_a_connection_and_says_nothing_holds_nobody_up(
    worker: Worker, connect: Connect
) -> None:
    kept = connect(worker)
    assert ask(kept) == (200, "")
    leave(worker)
    assert kept.sock.recv(1) == b"", "closed in order, and not reset"
    assert worker.process.wait(20) == 0
