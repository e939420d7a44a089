"""Engines of others on this machine: the command line and the environment of each. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

BUDGET = 2048
"""Tokens of a step if none are given: what `sluice-gate` assumes, too."""


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine is to serve. `folder`: has `sluice_vllm` and what it needs, and the socket of
    the gate. `budget`: the tokens of a step, None for the engine's own."""

    model: str
    name: str | None
    port: int
    num_seqs: int
    budget: int | None
    folder: Path

    @property
    def socket(self) -> str:
        """Where the gate listens for `sluice_vllm`."""
        return str(self.folder / "engine.sock")


@dataclass(frozen=True, slots=True)
class Engine:
    """`program`: found in PATH, and called with `verb`; `install`: where it comes from. `num_seqs`:
    the most sequences at once if `--max-num-seqs` is not given. `module`: words for `python3` that
    do as the program. `is_steered`: `sluice_vllm` runs in it."""

    program: str
    install: str
    num_seqs: int
    arguments: Callable[[Start], list[str]] = lambda start: []
    environ: Callable[[Start], Mapping[str, str]] = lambda start: {}
    verb: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    is_steered: bool = False


def _vllm(start: Start) -> list[str]:
    name = [] if start.name is None else [f"--served-model-name={start.name}"]
    return [
        start.model, "--host=127.0.0.1", f"--port={start.port}",
        f"--max-num-seqs={start.num_seqs}", f"--max-num-batched-tokens={start.budget or BUDGET}",
        "--scheduler-cls=sluice_vllm.Scheduler", *name,
    ]  # fmt: skip


def _steered(start: Start) -> dict[str, str]:
    return {"PYTHONPATH": str(start.folder), "SLUICE_GATE_SOCKET": start.socket}


def _llama_cpp(start: Start) -> list[str]:
    is_file = Path(start.model).is_file()
    batch = [] if start.budget is None else [f"--batch-size={start.budget}"]
    name = [] if start.name is None else ["--alias", start.name]
    return [
        "--model" if is_file else "--hf-repo", start.model, "--host", "127.0.0.1",
        "--port", str(start.port), "--parallel", str(start.num_seqs), "--metrics", *batch, *name,
    ]  # fmt: skip


def _ollama(start: Start) -> dict[str, str]:
    return {
        "OLLAMA_HOST": f"127.0.0.1:{start.port}",
        "OLLAMA_NUM_PARALLEL": str(start.num_seqs),
        "OLLAMA_KEEP_ALIVE": "-1",
    }


ENGINES = {
    "vllm": Engine(
        "vllm",
        "https://docs.vllm.ai",
        128,
        _vllm,
        _steered,
        verb=("serve",),
        module=("-m", "vllm.entrypoints.openai.api_server", "--model"),
        is_steered=True,
    ),
    "llamacpp": Engine("llama-server", "https://github.com/ggml-org/llama.cpp", 4, _llama_cpp),
    "ollama": Engine("ollama", "https://ollama.com/download", 4, environ=_ollama, verb=("serve",)),
}
