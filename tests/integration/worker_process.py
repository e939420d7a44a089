"""A real worker: both of its processes, on loopback, with a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from unit.worker.api.tiny import write_checkpoint

START_S = 120.0
POLL_S = 0.05
ON_LOOPBACK = ("--host", "127.0.0.1", "--port", "0", "--admin-port", "0")
ENGINE = "sluice_worker.engine.process"


@dataclass(frozen=True)
class Worker:
    """A running worker and where it listens."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    admin_url: str

    def events(self) -> list[dict[str, Any]]:
        """The JSON lines that it has logged."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def engine_pid(self) -> int:
        """The process id of its engine process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in children.split():
            if ENGINE in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        raise AssertionError("the worker has no engine process")

    def until(self, path: str, status: int, limit_s: float = START_S) -> httpx.Response:
        """The first answer of GET `path` that has `status`."""
        end_s, seen = time.monotonic() + limit_s, "nothing"
        while time.monotonic() < end_s:
            assert self.process.poll() is None, self.log.read_text()
            # A worker that leaves closes a connection that it has only just accepted.
            with suppress(httpx.TransportError):
                answer = httpx.get(self.url + path, timeout=10)
                if answer.status_code == status:
                    return answer
                seen = answer.text
            time.sleep(POLL_S)
        raise AssertionError(f"{path} did not answer {status}: {seen}")

    def metric(self, name: str) -> float:
        """The sum of a family's series as the metrics page shows them now."""
        text = httpx.get(self.admin_url + "/metrics", timeout=30).text
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith((name + "{", name + " "))
        ]
        assert values, f"no {name} in the metrics"
        return sum(values)

    def until_metric(self, name: str, value: float, limit_s: float = 20.0) -> None:
        """Wait until a metric has `value`."""
        end_s = time.monotonic() + limit_s
        while (seen := self.metric(name)) != value:
            assert time.monotonic() < end_s, f"{name} stayed at {seen}, not {value}"
            time.sleep(POLL_S)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


def command(
    model: Path | str, *flags: str, load_format: str = "dummy", module: str = "sluice_worker"
) -> list[str]:
    """A worker's command line, on free ports of loopback. `module`: which program it runs."""
    return [
        *(sys.executable, "-m", module, "--model", str(model)),
        *("--load-format", load_format),
        *("--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--device", "cpu"),
        *("--served-model-name", "tiny", "--dtype", "float32", *flags),
    ]


@contextmanager
def running_worker(
    directory: Path,
    *flags: str,
    ready: bool = True,
    model: Path | None = None,
    module: str = "sluice_worker",
    environ: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """A worker in a process of its own, of a small random `model`, ended on leaving."""
    model = model or write_checkpoint(directory / "model", max_position=4096)
    log = directory / "worker.log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    arguments = command(model, *flags, module=module)
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stderr=output, env=environment)
    try:
        worker = listening(process, log)
        if ready:
            worker.until("/readyz", 200)
        yield worker
    finally:
        process.kill()
        process.wait()


@contextmanager
def gate_of(
    upstream: str,
    directory: Path,
    *flags: str,
    module: tuple[str, ...] = ("sluice_gate",),
    environ: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """`sluice-gate` before the engine at `upstream`, ready; killed on leaving."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "gate.log"
    command = [
        *(sys.executable, "-m", *module, "--upstream", upstream),
        *ON_LOOPBACK,
        *flags,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output, env={**os.environ, **(environ or {})})
    try:
        gate = listening(process, log)
        gate.until("/readyz", 200)
        yield gate
    finally:
        process.kill()
        process.wait()


def listening(process: subprocess.Popen[bytes], log: Path) -> Worker:
    """The worker of `process`, once it listens."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        for line in log.read_text().splitlines():
            if '"listening"' in line:
                event = json.loads(line)
                urls = [f"http://127.0.0.1:{event[key]}" for key in ("port", "admin_port")]
                return Worker(process, log, *urls)
        assert process.poll() is None, log.read_text()
        time.sleep(POLL_S)
    raise AssertionError("the worker did not listen: " + log.read_text())


def stream_events(body: str) -> list[str]:
    """The data of each server-sent event; comments, which keep a connection alive, are none."""
    parts = [part for part in body.split("\n\n") if not part.startswith(":")]
    return [part.removeprefix("data: ") for part in parts if part]
