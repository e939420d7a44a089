"""*Rim*: three processes: a made-up engine, a real gate in front of it, a watch over the gate."""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
from integration.worker_process import Worker, listening
from strangers.engine import Answer, Record
from strangers.watch import Sight

STOP_S = 10.0
_TESTS = Path(__file__).parents[1]


def _program(module: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_TESTS
    )


@dataclass(frozen=True, slots=True)
class MadeUp:
    """A made-up engine's process, and what one sets and sees of it."""

    process: "subprocess.Popen[str]"
    port: int
    control: http.client.HTTPConnection

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self, *answers: Answer) -> None:
        """From now on it answers so; the last that fits wins."""
        self._asked("PUT", "/answers", msgspec.json.encode(answers))

    def record(self) -> Record:
        """All that reached it since it was last forgotten."""
        return msgspec.json.decode(self._asked("GET", "/seen"), type=Record)

    def forget(self) -> None:
        """Forget what was seen."""
        self._asked("DELETE", "/seen")

    def _asked(self, method: str, path: str, body: bytes = b"") -> bytes:
        self.control.request(method, path, body, {"content-length": str(len(body))})
        return self.control.getresponse().read()


@contextmanager
def made_up_engine() -> Iterator[MadeUp]:
    """A made-up engine in a process of its own."""
    with _program("strangers.engine") as process:
        assert process.stdout is not None
        try:
            ports = json.loads(process.stdout.readline())
            port = ports["control_port"]
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as control:
                yield MadeUp(process, ports["port"], control)
        finally:
            process.kill()


@dataclass(slots=True)
class Watched:
    """A real server's process. `sight`: what was seen of it, once its watch has ended."""

    worker: Worker
    address: tuple[str, int]
    admin: tuple[str, int]
    watching: "subprocess.Popen[str]"
    sight: Sight | None = None

    def exit_code(self) -> int | None:
        """None while it lives."""
        return self.worker.process.poll()

    def log(self) -> str:
        """All that it has written."""
        return self.worker.log.read_text(errors="replace")

    def probe(self, path: str) -> tuple[int, str]:
        """Status and reason of a probe at the API port; 0 if nobody answers."""
        with suppress(httpx.HTTPError, ValueError):
            answer = httpx.get(self.worker.url + path, timeout=5)
            return answer.status_code, str(answer.json().get("reason", ""))
        return 0, "no answer"

    def end_watch(self) -> Sight:
        """What its watch has seen; the first call ends it."""
        if self.sight is None:
            said, _ = self.watching.communicate(timeout=STOP_S)
            self.sight = msgspec.json.decode(said.splitlines()[-1], type=Sight)
        return self.sight


@contextmanager
def watched(worker: Worker) -> Iterator[Watched]:
    """A server that serves, and a watch over it in a process of its own."""
    address, admin = (_address(url) for url in (worker.url, worker.admin_url))
    where = "{}:{}".format(*address)
    with _program("strangers.watch", where, str(worker.process.pid)) as watching:
        assert watching.stdout is not None
        watching.stdout.readline()
        server = Watched(worker, address, admin, watching)
        try:
            yield server
        finally:
            server.end_watch()


@contextmanager
def running_gate(directory: Path, engine: MadeUp, *flags: str) -> Iterator[Watched]:
    """A gate in front of the engine, ready and watched; killed on leaving."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "gate.log"
    command = [
        *(sys.executable, "-m", "sluice_gate", "--upstream", engine.url, "--host", "127.0.0.1"),
        *("--port", "0", "--admin-port", "0", *flags),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    try:
        worker = listening(process, log)
        worker.until("/readyz", 200)
        with watched(worker) as server:
            yield server
    finally:
        process.kill()
        process.wait()


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def until(holds: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until it holds; None if it does not within the limit."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + limit_s:
        if holds():
            return time.monotonic() - start_s
        time.sleep(0.1)
    return None


def key_file(directory: Path, keys: Sequence[str]) -> tuple[str, ...]:
    """The flag that makes these the API's keys; none without keys."""
    if not keys:
        return ()
    path = directory / "keys"
    path.write_text("\n".join(keys) + "\n")
    return ("--api-key-file", str(path))
