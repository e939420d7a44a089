"""*Rim*: processes of peers: their CPU time from /proc, and their end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.peers.results import CpuTime

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOP_S = 15.0


def _stat(pid: int) -> tuple[int, float] | None:
    """A process's parent and its CPU-seconds with its reaped children's; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # man 5 proc: the third field comes first here
    return int(fields[1]), sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S


def _command(pid: int) -> str:
    """Command line and name; some rename themselves."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return line + Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


def tree(root: int) -> dict[int, float]:
    """CPU-seconds of `root` and each process below it, by process id."""
    seen = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    members, grown = {root}, True
    while grown:
        below = {pid for pid, stat in seen.items() if stat and stat[0] in members}
        grown = not below <= members
        members |= below
    return {pid: stat[1] for pid in members if (stat := seen.get(pid))}


def cpu_seconds(root: int) -> float:
    """CPU-seconds of `root` and all below it."""
    return sum(tree(root).values())


def cpu_time(root: int, engine_mark: str) -> CpuTime:
    """CPU time below `root`; the engine's processes have `engine_mark` in their command."""
    seconds = tree(root)
    engine = sum(s for pid, s in seconds.items() if engine_mark in _command(pid))
    return CpuTime(sum(seconds.values()), engine)


def unwind_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does, so that what it started is stopped too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and what it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
