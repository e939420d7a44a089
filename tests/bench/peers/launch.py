"""*Rim*: starts peers and runs traces on them. A peer that stays up between runs only waits."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from bench.peers import client, processes
from bench.peers.checkpoint import MODELS, write
from bench.peers.client import RunFailed
from bench.peers.install import CannotInstall, Site, gguf, install, openmp, tcmalloc
from bench.peers.results import CpuTime, Result
from bench.peers.traces import Request, Trace, padded
from bench.peers.variants import Launch
from sluice.processes import free_ports

READY_LIMIT_S = 1200.0  # vLLM compiles at its first start
POLL_S = 0.05
SETTINGS = ("OMP_", "KMP_", "GOMP_", "MKL_", "VLLM_", "SLUICE_", "LD_PRELOAD",
            "PYTHONDONTWRITEBYTECODE")  # fmt: skip
WORKER = Path(__file__).with_name("batch_worker.py")
HEALTH = {"sluice": "/readyz", "vllm": "/health", "llama.cpp": "/health"}
ENGINE_MARK = {
    "sluice": "sluice_worker.engine.process",
    "vllm": "VLLM::",
    "llama.cpp": "llama-server",
    "batch": "batch_worker",
}


class CannotStart(Exception):
    """A peer that does not come up here; the message is one sentence without paths."""


class Running:
    """A peer's process, ready; `start_s`: from its start until it was."""

    def __init__(self, launch: Launch, process: subprocess.Popen[bytes], log: Path) -> None:
        self.launch, self.process, self.log = launch, process, log
        self.start_s = 0.0

    def cpu(self) -> CpuTime:
        """CPU time of its processes until now."""
        return processes.cpu_time(self.process.pid, ENGINE_MARK[self.launch.variant.family])

    def until_ready(self) -> None:
        """Return once it takes requests. Raises CannotStart."""
        raise NotImplementedError

    def run(self, trace: Trace, requests: Sequence[Request]) -> Result:
        """All requests. Raises RunFailed."""
        raise NotImplementedError

    def stop(self) -> None:
        """End it."""
        processes.stop(self.process)


class Server(Running):
    """A peer behind HTTP."""

    url = ""

    def until_ready(self) -> None:
        end_s = time.monotonic() + READY_LIMIT_S
        path = HEALTH[self.launch.variant.family]
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise CannotStart(f"it did not start: {complaint(self.log)}")
            try:
                if httpx.get(self.url + path, timeout=5.0).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # it does not listen yet
            time.sleep(POLL_S)
        raise CannotStart(f"it was not ready within {READY_LIMIT_S:.0f} s")

    def run(self, trace: Trace, requests: Sequence[Request]) -> Result:
        variant = self.launch.variant
        if variant.pads_prompts:
            requests = padded(requests, trace.cap)
        paced = trace.paced and not variant.is_static
        return client.run(self.url, requests, trace.cap if paced else None)


class Library(Running):
    """A peer that is a library, in `batch_worker`."""

    def until_ready(self) -> None:
        self._read()

    def run(self, trace: Trace, requests: Sequence[Request]) -> Result:
        if self.process.stdin is None:
            raise RunFailed("its input is closed")
        asked = [[request.prompt, request.output_tokens] for request in requests]
        message = json.dumps({"requests": asked, "cap": trace.cap}) + "\n"
        try:
            self.process.stdin.write(message.encode())
            self.process.stdin.flush()
        except OSError as error:
            raise RunFailed(f"it ended: {complaint(self.log)}") from error
        said = self._read()
        if "error" in said:
            raise RunFailed(str(said["error"])[:200])
        if said["tokens"] != [request.output_tokens for request in requests]:
            raise RunFailed("it made other numbers of tokens than were asked")
        return Result(float(said["wall_s"]), sum(said["tokens"]))

    def _read(self) -> dict[str, Any]:
        if (
            self.process.stdout is None
            or not select.select([self.process.stdout], [], [], client.LIMIT_S)[0]
        ):
            raise CannotStart(f"it said nothing for {client.LIMIT_S:.0f} s")
        line = self.process.stdout.readline()  # it writes one line, then waits
        if not line:
            raise CannotStart(f"it ended: {complaint(self.log)}")
        said: dict[str, Any] = json.loads(line)
        return said


def complaint(log: Path) -> str:
    """The last line of a log that looks like a reason, else the last one; no directories in it."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines if "rror" in line or line.startswith("sluice-worker:")]
    said = (reasons or lines or ["nothing was said"])[-1]
    return " ".join(Path(word).name if word.startswith("/") else word for word in said.split())[
        :240
    ]


class Peers:
    """All that is installed and started; ends what it started."""

    def __init__(self, cache: Path, logs: Path) -> None:
        self._cache, self._logs = cache, logs
        self._sites: dict[str, Site | CannotInstall] = {}
        self.running: dict[Launch, Running] = {}

    def __enter__(self) -> "Peers":
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one would leave peers behind
            signal.signal(number, signal.SIG_IGN)
        self.keep(())

    def site(self, name: str) -> Site | None:
        """Where a peer is installed, installing it first; None for what needs nothing."""
        if not name:
            return None
        if name not in self._sites:
            try:
                self._sites[name] = install(name, self._cache)
            except CannotInstall as error:
                self._sites[name] = error
        found = self._sites[name]
        if isinstance(found, CannotInstall):
            raise found
        return found

    def keep(self, launches: Sequence[Launch]) -> None:
        """Stop all others."""
        for launch in [launch for launch in self.running if launch not in launches]:
            self.running.pop(launch).stop()

    def get(self, launch: Launch) -> Running:
        """The peer, started if it is not up. Raises CannotInstall or CannotStart."""
        if launch not in self.running:
            self.running[launch] = self._start(launch)
        return self.running[launch]

    def _start(self, launch: Launch) -> Running:
        site = self.site(launch.variant.site)
        model = write(MODELS[launch.model], self._cache / "models")
        if launch.variant.family == "llama.cpp" and site:
            model = gguf(site, model)
        [port] = free_ports(1)
        arguments = [a.format(model=model, port=port) for a in launch.arguments]
        environ = inherited(os.environ, site) | dict(launch.environ) | environ_of(site)
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{launch.variant.name}-{launch.model}.log"
        is_library = launch.variant.family == "batch"
        print(f"  starting {launch.variant.name}", flush=True)
        started = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_program(launch, site), *arguments],
                stdin=subprocess.PIPE if is_library else subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_library else output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        peer: Running = (Library if is_library else Server)(launch, process, log)
        if isinstance(peer, Server):
            peer.url = f"http://127.0.0.1:{port}"
        try:
            peer.until_ready()
            _check_kernels(peer)
        except BaseException:
            peer.stop()
            raise
        peer.start_s = time.monotonic() - started
        return peer


def _program(launch: Launch, site: Site | None) -> list[str]:
    if launch.variant.family == "batch":
        return [str(site.python) if site else sys.executable, str(WORKER)]
    if site is None:
        return [sys.executable, "-m", "sluice_worker"]
    if launch.variant.family == "llama.cpp":
        return [str(site.root / "build" / "bin" / "llama-server")]
    return [str(site.python), "-m", "vllm.entrypoints.openai.api_server"]


def inherited(environ: Mapping[str, str], site: Site | None) -> dict[str, str]:
    """The caller's environment without what would tune one peer and not another."""
    left_out = SETTINGS if site is None else (*SETTINGS, "PYTHONPATH")
    return {name: value for name, value in environ.items() if not name.startswith(left_out)}


def environ_of(site: Site | None) -> dict[str, str]:
    """What vLLM's documentation asks to preload, and where it keeps what it compiles."""
    if site is None or site.name != "vllm":
        return {}
    found = [str(path) for path in (tcmalloc(site), openmp(site)) if path]
    return {"LD_PRELOAD": os.pathsep.join(found), "VLLM_CACHE_ROOT": str(site.root / "compiled")}


def _check_kernels(peer: Running) -> None:
    """A worker that knows no SLUICE_KERNELS would run the same kernels under another name."""
    asks = any(name == "SLUICE_KERNELS" for name, _ in peer.launch.environ)
    if asks and '"kernels"' not in peer.log.read_text(errors="replace"):
        raise CannotStart("this worker has one set of kernels only (it reads no SLUICE_KERNELS)")
