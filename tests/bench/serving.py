"""A real worker, for measurements over HTTP."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.peers.processes import unwind_on_sigterm
from integration.worker_process import Worker, listening

MODEL = Path(__file__).parents[2] / "examples" / "model"
NAME = "demo"
VOCAB_SIZE = 2048
PACKAGES = ("core", "frontend", "gate", "kernels", "worker")
"""Folders of a checkout that have what an engine runs."""
RANDOM_60M = MODEL.parent / "models" / "random-60m"


def product_of(checkout: Path) -> dict[str, str]:
    """The environment in which Python finds the packages of another checkout."""
    return {
        "PYTHONPATH": os.pathsep.join(str(checkout.resolve() / package) for package in PACKAGES)
    }


@contextmanager
def serving(
    *flags: str,
    model: Path = MODEL,
    device: str = "cpu",
    environ: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """A worker, ready, with one thread of the CPU; ended on leaving, also by SIGTERM. Its log is
    told if it fails."""
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "worker.log"
        command = [sys.executable, "-m", "sluice_worker", "--model", str(model)]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", "0"]
        command += ["--admin-port", "0", "--device", device, *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stderr=output, env=environment)
        try:
            worker = listening(process, log)
            worker.until("/readyz", 200)
            yield worker
        finally:
            process.kill()
            process.wait()
