"""How long a worker takes from its start to `/readyz`, its files in the page cache: JSON.

    PYTHONPATH=tests .venv/bin/python -m bench.start [CHECKOUT ...]

Starts of this checkout and of others alternate, after one of each that is not counted; bytecode is
read and written below $PYTHONPYCACHEPREFIX, where that is set. `undisturbed_s`: less what the
engine's main thread waited for a processor, which on a machine of its own it would not have.
"""

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.overload import spread
from bench.peers.checkpoint import CACHE, MODELS, write
from bench.peers.launch import ENGINE_MARK
from bench.peers.processes import cpu_time, stop, tree, unwind_on_sigterm
from sluice.machine import processor
from sluice.processes import free_ports

HERE = Path(__file__).resolve().parents[2]
REPEATS, LIMIT_S, POLL_S = 5, 180.0, 0.02
PACKAGES = ("core", "frontend", "worker", "kernels")
FLAGS = "--host 127.0.0.1 --admin-port 0 --device cpu --max-num-seqs 32 --slo-itl-ms 100"


def is_ready(port: int) -> bool:
    """Whether the worker takes requests."""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/readyz", headers={"Connection": "close"})
        return connection.getresponse().status == 200
    except OSError:
        return False


def start(checkout: Path, model: Path) -> dict[str, float]:
    """Seconds until a worker is ready, and CPU-seconds of its processes."""
    [port], begin = free_ports(1), time.monotonic()
    command = [sys.executable, "-m", "sluice_worker", "--model", str(model), "--port", str(port)]
    path = os.pathsep.join(str(checkout / part) for part in PACKAGES)
    environ = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen([*command, *FLAGS.split()], env=environ, start_new_session=True)
    try:
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > begin + LIMIT_S:
                raise SystemExit(f"the worker of {checkout} did not become ready")
            time.sleep(POLL_S)
        ready_s, cpu = time.monotonic() - begin, cpu_time(process.pid, ENGINE_MARK["sluice"])
        (engine,) = tree(process.pid).keys() - {process.pid}
        queued_s = int(Path(f"/proc/{engine}/schedstat").read_text().split()[1]) / 1e9
    finally:
        stop(process)
    undisturbed_s = ready_s - queued_s
    return {"ready_s": ready_s, "undisturbed_s": undisturbed_s, "cpu_s": cpu.total_s}


def main() -> None:
    """Print medians and ranges."""
    unwind_on_sigterm()
    checkouts = [HERE, *(Path(given).resolve() for given in sys.argv[1:])]
    model = write(MODELS["88M"], CACHE / "models")
    rounds = [[start(checkout, model) for checkout in checkouts] for _ in range(REPEATS + 1)]
    told: dict[str, object] = {"processor": processor(), "processors": os.cpu_count()}
    for checkout, runs in zip(checkouts, zip(*rounds[1:], strict=True), strict=True):
        told[str(checkout)] = {name: spread([run[name] for run in runs]) for name in runs[0]}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
