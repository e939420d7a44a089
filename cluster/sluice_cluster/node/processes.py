"""Programs that outlive the shell that started them, known by pid *and* start time."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sluice_cluster.settings import LocalClusterError
from sluice_cluster.shell import Word, wait_until, write_whole


@dataclass(frozen=True, slots=True)
class Process:
    """A pid may be given to another program: the start time (in clock ticks) tells them apart."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return started_at(self.pid) == self.started


def started_at(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


def spawn(name: str, command: Sequence[Word], logs: Path, env: Mapping[str, str]) -> Process:
    """Start `command` in a session of its own, its output in logs/name.log."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [str(part) for part in command],
            env=dict(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    child.returncode = 0  # it is meant to outlive us: no warning when the handle goes
    return Process(child.pid, started_at(child.pid) or 0)


def stop(process: Process, seconds: float = 10.0) -> None:
    """SIGTERM, then SIGKILL to processes left after `seconds`; returns when all are gone."""
    if not process.alive:
        return
    _signal(process, signal.SIGTERM)
    try:
        wait_until("stop", lambda: _reaped(process), seconds)
    except LocalClusterError:
        _signal(process, signal.SIGKILL)
        wait_until(f"process {process.pid} to end", lambda: _reaped(process), 20.0)


def _reaped(process: Process) -> bool:
    with contextlib.suppress(ChildProcessError):  # not our child: init reaps it
        os.waitpid(process.pid, os.WNOHANG)
    return not process.alive


def _signal(process: Process, number: int) -> None:
    if process.alive:
        os.kill(process.pid, number)


@dataclass(frozen=True, slots=True)
class Register:
    """The file that remembers which processes are ours, in the order of their start."""

    file: Path

    def read(self) -> dict[str, Process]:
        if not self.file.exists():
            return {}
        entries = json.loads(self.file.read_text())
        return {name: Process(**entry) for name, entry in entries.items()}

    def add(self, name: str, process: Process) -> None:
        entries = self.read() | {name: process}
        plain = {name: asdict(process) for name, process in entries.items()}
        write_whole(self.file, json.dumps(plain, indent=1))
