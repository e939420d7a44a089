"""How long a worker takes from its start to `/readyz`, its files in the page cache: JSON.

    PYTHONPATH=tests .venv/bin/python -m bench.start [--other CHECKOUT] [--sources]

Starts of another checkout alternate with those of this one. The bytecode of all modules is on disk,
as in the image; `--sources`: of none, as where `uv pip install` was told nothing of it.

`undisturbed_s`: `ready_s` less what the engine's main thread waited for a processor, which on a
machine of its own it would not have.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.peers.checkpoint import MODELS, write
from bench.peers.launch import ENGINE_MARK, free_port
from bench.peers.processes import cpu_time, stop, tree
from sluice.machine import processor

HERE, CACHE = Path(__file__).resolve().parents[2], Path.home() / ".cache/sluice/peers"
LIMIT_S, POLL_S = 180.0, 0.02
FLAGS = "--device cpu --dtype bfloat16 --max-num-seqs 32 --slo-itl-ms 100 --admin-port 0"


def is_ready(port: int) -> bool:
    """Whether the worker takes requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def started(checkout: Path, model: Path, environ: dict[str, str]) -> dict[str, float]:
    """Seconds until a worker is ready, and CPU-seconds of its processes."""
    port, begin = free_port(), time.monotonic()
    command = [sys.executable, "-m", "sluice_worker", "--model", str(model), "--host", "127.0.0.1"]
    path = f"{checkout / 'worker'}{os.pathsep}{checkout / 'kernels'}"
    process = subprocess.Popen(
        [*command, "--port", str(port), *FLAGS.split()],
        env={**environ, "PYTHONPATH": path},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > begin + LIMIT_S:
                raise SystemExit(f"the worker of {checkout.name} did not become ready")
            time.sleep(POLL_S)
        ready_s, cpu = time.monotonic() - begin, cpu_time(process.pid, ENGINE_MARK["sluice"])
        (engine,) = tree(process.pid).keys() - {process.pid}
        queued_s = int(Path(f"/proc/{engine}/schedstat").read_text().split()[1]) / 1e9
    finally:
        stop(process)
    return {
        "ready_s": ready_s,
        "undisturbed_s": ready_s - queued_s,
        "engine_cpu_s": cpu.engine_s,
        "cpu_s": cpu.total_s,
    }


def main() -> None:
    """Print medians and ranges, and the paired ratio of the first to the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sources", action="store_true")
    asked = parser.parse_args()
    sides = {"this": HERE} | ({"other": asked.other.resolve()} if asked.other else {})
    model = write(MODELS["88M"], CACHE / "models")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as bytecode:
        environ = {"PYTHONPYCACHEPREFIX": bytecode, **os.environ}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        if asked.sources:
            environ["PYTHONDONTWRITEBYTECODE"] = "1"
        for repeat in range(asked.repeats + 1):  # the first reads the files, and compiles
            for name in list(sides) if repeat % 2 else reversed(sides):
                found = started(sides[name], model, environ)
                runs[name] += [found] if repeat else []
    told: dict[str, object] = {"processor": processor(), "processors": os.cpu_count()}
    for name, made in runs.items():
        told[name] = {key: spread([run[key] for run in made]) for key in made[0]}
    if asked.other:
        pairs = zip(runs["this"], runs["other"], strict=True)
        ratios = [this["undisturbed_s"] / other["undisturbed_s"] for this, other in pairs]
        told["ratio of undisturbed_s"] = spread(ratios)
    print(json.dumps(told, indent=1))


def spread(values: list[float]) -> str:
    """Median, least and largest."""
    return f"{median(values):.2f} ({min(values):.2f} .. {max(values):.2f})"


if __name__ == "__main__":
    main()
