"""What a streamed token costs the gate: CPU time, and the most tokens a second.

    PYTHONPATH=tests .venv/bin/python -m bench.gate_stream --out docs/engines-gate-stream.json

A real `sluice-gate`, a made-up engine and its clients are a process each. The engine sends every
stream a token each 20 ms, then as fast as they are read. CPU time is the gate's own by /proc, with
all that it does beside: its looks at the engine, its clocks. `--beside DIR` measures the gate of
another checkout in turns with this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.gate_cost import resident_mib
from bench.peers.processes import cpu_seconds, unwind_on_sigterm
from integration.worker_process import Worker, gate_of
from sluice.numbers import count

ROOT = Path(__file__).parents[2]
ENDS = [sys.executable, "-m", "bench.gate_stream_ends"]
STEP_MS = 20.0
STREAMS = (8, 64, 256)
FLAT_OUT = 64
"""Streams of the run in which the engine does not wait."""


@contextmanager
def _running(command: Sequence[str], **more: Any) -> Iterator["subprocess.Popen[str]"]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, **more)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def _gate(port: int, checkout: Path) -> Iterator[Worker]:
    """The gate of a checkout before the engine at `port`, ready."""
    parts = os.pathsep.join(str(checkout / part) for part in ("gate", "frontend", "core"))
    url, flags = f"http://127.0.0.1:{port}", ("--max-num-seqs", "1024")
    with (
        tempfile.TemporaryDirectory() as directory,
        gate_of(url, Path(directory), *flags, environ={"PYTHONPATH": parts}) as gate,
    ):
        yield gate


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("an end of the benchmark is over")
    return line


def _tokens(clients: "subprocess.Popen[str]") -> dict[str, float]:
    """Tokens so far, and the time. Raises RuntimeError if a stream was cut."""
    assert clients.stdin is not None
    clients.stdin.write("\n")
    clients.stdin.flush()
    told: dict[str, float] = json.loads(_line(clients))
    if told["cut"]:
        raise RuntimeError(f"{told['cut']:.0f} streams were cut")
    return told


def measured(checkout: Path, num_streams: int, step_ms: float, seconds: float) -> dict[str, float]:
    """One run: a new engine, a new gate, new clients."""
    tests = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with (
        _running([*ENDS, "engine", "--step-ms", str(step_ms)], env=tests) as engine,
        _gate(int(_line(engine)), checkout) as gate,
    ):
        port, pid = gate.url.rpartition(":")[2], gate.process.pid
        streams = ["--port", port, "--streams", str(num_streams)]
        with _running([*ENDS, "clients", *streams], env=tests) as clients:
            assert _line(clients) == "begun\n"
            time.sleep(seconds / 4)  # warm up
            before, before_s = _tokens(clients), cpu_seconds(pid)
            time.sleep(seconds)
            after, after_s = _tokens(clients), cpu_seconds(pid)
            tokens = after["tokens"] - before["tokens"]
            return {
                "tokens": tokens,
                "tokens_per_s": round(tokens / (after["s"] - before["s"]), 1),
                "cpu_us_per_token": round(1e6 * (after_s - before_s) / tokens, 2),
                "resident_mib": round(resident_mib(pid), 1),
            }


def spread(runs: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Median, least and most of each figure."""
    names = ("cpu_us_per_token", "tokens_per_s", "resident_mib")
    return {
        name: [round(f([run[name] for run in runs]), 2) for f in (statistics.median, min, max)]
        for name in names
    }


def run(given: argparse.Namespace) -> dict[str, object]:
    """All loads on all gates, in turns."""
    gates = {"here": ROOT} | ({"beside": given.beside} if given.beside else {})
    loads = [(num, STEP_MS) for num in given.streams] + [(FLAT_OUT, 0.0)]
    found: dict[str, object] = {}
    for num_streams, step_ms in loads:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in gates}
        for repeat in range(given.repeats):
            for name in list(gates)[:: -1 if repeat % 2 else 1]:
                runs[name].append(measured(gates[name], num_streams, step_ms, given.seconds))
        load = f"{num_streams} streams, " + (f"{step_ms:g} ms" if step_ms else "flat out")
        told = {n: {"median, least, most": spread(each), "runs": each} for n, each in runs.items()}
        print(load, {name: spread(each) for name, each in runs.items()}, flush=True)
        found[load] = told
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gate_stream", description=__doc__)
    parser.add_argument("--streams", type=count, nargs="+", default=list(STREAMS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, whose gate runs in turns")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Entry of `python -m bench.gate_stream`."""
    given = parse(argv)
    unwind_on_sigterm()
    found = run(given)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
