"""Claims on a hub that takes its time: nobody waits for it beyond a deadline."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from sluice_operator.cluster.client import Cluster
from sluice_operator.model import reader
from sluice_operator.model.checkpoint import Unread
from sluice_operator.model.hub import HubSource, read
from sluice_operator.model.reader import ModelReader
from unit.operator.observations import SETTINGS, create_service
from unit.worker.hub.hub_server import REPO

Answer = Callable[[socket.socket], None]
GIVEN_S, ENOUGH_S = 0.4, 5.0
"""How long a reading may take here, and what would be far too long."""


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """A server that does `answer` with each connection, until it is closed; its URL."""
    is_over, opened = threading.Event(), list[socket.socket]()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                answer(connection)

        def accept() -> None:
            while not is_over.is_set():
                with suppress(OSError):
                    connection, _ = listening.accept()
                    opened.append(connection)
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        is_over.set()
        for connection in opened:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _drip(connection: socket.socket, text: bytes) -> None:
    """Each byte well within the time of a read, and no end."""
    connection.sendall(text)
    for _ in range(2000):
        connection.sendall(b"a")
        time.sleep(0.01)


def _header(connection: socket.socket) -> None:
    _drip(connection, b"HTTP/1.1 200 OK\r\nX-Slow: ")


def _body(connection: socket.socket) -> None:
    _drip(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")


def _body_without_length(connection: socket.socket) -> None:
    _drip(connection, b"HTTP/1.1 200 OK\r\n\r\n")


def _nothing(connection: socket.socket) -> None:
    time.sleep(20)


def _unread(url: str, ends_s: float) -> str:
    found = read(HubSource(url, REPO, "main", ends_s=ends_s), "auto", on_cpu=True)
    assert isinstance(found, Unread)
    return found.message


def test_a_hub_that_is_silent_is_given_up_in_time() -> None:
    with served(_nothing) as url:
        began_s = time.monotonic()
        assert "it took over 60 s" in _unread(url, began_s + GIVEN_S)
        assert time.monotonic() - began_s < ENOUGH_S


@pytest.mark.parametrize("answer", [_header, _body, _body_without_length])
async def test_a_hub_that_drips_is_given_up_in_time(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read is in time, and the whole never ends: the thread goes on, and nobody waits."""
    monkeypatch.setattr(reader, "_DEADLINE_S", GIVEN_S)
    asked = create_service(model__uri=f"hf://{REPO}")
    with served(answer) as url:
        began_s = time.monotonic()
        by = ModelReader(Cluster.__new__(Cluster), replace(SETTINGS, hub_endpoint=url))
        found = await by.look(asked, None, began_s)
        assert time.monotonic() - began_s < ENOUGH_S
    assert isinstance(found, Unread)
    assert "is not read after 0.4 s" in found.message


def test_a_hub_that_redirects_for_ever_is_given_up_in_time() -> None:
    """Each answer is in time, and leads to another request."""
    numbers = itertools.count()

    def redirect(connection: socket.socket) -> None:
        connection.recv(65536)
        time.sleep(0.1)
        place = b"Location: /%d\r\n" % next(numbers)
        connection.sendall(b"HTTP/1.1 302 Found\r\nConnection: close\r\n" + place + b"\r\n")

    with served(redirect) as url:
        assert "it took over 60 s" in _unread(url, time.monotonic() + GIVEN_S)
    assert next(numbers) < 10


def test_nothing_is_asked_once_it_is_over() -> None:
    asked = list[bytes]()
    with served(lambda connection: asked.append(connection.recv(1))) as url:
        assert "it took over 60 s" in _unread(url, time.monotonic())
    assert asked == []
