"""*Rim*: watches a server from a process of its own: its loop, its memory, its descriptors.

    PYTHONPATH=tests .venv/bin/python -m strangers.watch HOST:PORT PID

Each 20 ms it asks GET /healthz on a new connection, as a kubelet does. When its standard input ends
it prints a `Sight`. A machine that others use delays the answer as well: `held` counts only the CPU
time that the server took meanwhile, which is what its loop was held for.
"""

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

PERIOD_S = 0.02
LIMIT_S = 5.0
"""After so many seconds an answer is given up, and counts as so long."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Sight(Struct):
    """What was seen. Milliseconds: of the wall, and of the server's CPU while one waited."""

    num_asked: int = 0
    num_failed: int = 0
    worst_ms: float = 0.0
    p99_ms: float = 0.0
    held_worst_ms: float = 0.0
    held_p99_ms: float = 0.0
    most_mib: float = 0.0
    most_files: int = 0
    cpu_s: float = 0.0


def cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time (clock_getcpuclockid of the C library)."""
    return (~pid << 3) | 2


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far; 0 once it is gone."""
    with suppress(OSError):
        return time.clock_gettime(cpu_clock(pid))
    return 0.0


def resident_mib(pid: int) -> float:
    """Memory of a process, MiB; 0 once it is gone."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / (1 << 20)
    return 0.0


def num_files(pid: int) -> int:
    """Descriptors of a process; 0 once it is gone."""
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def ask(address: tuple[str, int], path: str = "/healthz") -> int:
    """The status of a GET on a new connection; 0 if none came in time."""
    head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    with (
        suppress(OSError, ValueError, IndexError),
        socket.create_connection(address, LIMIT_S) as connection,
    ):
        connection.sendall(head)
        return int(connection.recv(1 << 12).split(b" ", 2)[1])
    return 0


def watch(address: tuple[str, int], pid: int, stop: threading.Event) -> Sight:
    """Ask until `stop`."""
    walls, helds, sight, first_s = list[float](), list[float](), Sight(), cpu_s(pid)
    while not stop.is_set():
        before_s, before_cpu_s = time.monotonic(), cpu_s(pid)
        sight.num_failed += ask(address) != 200
        took_s, took_cpu_s = time.monotonic() - before_s, cpu_s(pid) - before_cpu_s
        walls.append(1e3 * took_s)
        helds.append(1e3 * max(0.0, min(took_s, took_cpu_s)))
        sight.most_mib = max(sight.most_mib, resident_mib(pid))
        sight.most_files = max(sight.most_files, num_files(pid))
        sight.num_asked += 1
        sight.cpu_s = max(sight.cpu_s, cpu_s(pid) - first_s)
        stop.wait(max(0.0, PERIOD_S - took_s))
    sight.worst_ms, sight.p99_ms = _high(walls)
    sight.held_worst_ms, sight.held_p99_ms = _high(helds)
    return sight


def _high(values: list[float]) -> tuple[float, float]:
    """The worst, and the 99th percentile."""
    ordered = sorted(values) or [0.0]
    return round(ordered[-1], 1), round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 1)


def main(argv: list[str]) -> None:
    """Watch until the standard input ends."""
    host, _, port = argv[0].rpartition(":")
    stop = threading.Event()

    def until_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=until_end, daemon=True).start()
    print("watching", flush=True)
    print(msgspec.json.encode(watch((host, int(port)), int(argv[1]), stop)).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
