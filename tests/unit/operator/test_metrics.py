"""The operator's metrics port, and those who hold it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from sluice_operator.metrics import MAX_SCRAPES, Handler, Metrics, MetricsServer


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer("127.0.0.1", 0, Metrics().registry) as server:
        server.start()
        yield server
        server.shutdown()


def scrape(server: MetricsServer) -> str:
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    return httpx.get(url, timeout=10, trust_env=False).text


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=10)


def test_unfinished_requests_hold_a_few_threads_and_no_scrape(server: MetricsServer) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        for number in range(192):
            client = stack.enter_context(connect(server))
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            if number % 32 == 31:
                assert "sluice_operator_objects 0.0" in scrape(server)
        end_s = time.monotonic() + 10
        while (more := threading.active_count() - before) > MAX_SCRAPES:
            assert time.monotonic() < end_s, f"{more} threads"
            time.sleep(0.01)


def test_who_sends_no_more_of_a_request_is_let_go(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Handler, "timeout", 0.2)
    with connect(server) as client:
        client.sendall(b"GET /metr")
        assert client.recv(1) == b""
