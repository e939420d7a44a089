"""*Rim*: the machine's register peak, measured beside every run.

A shared machine gives half of its speed for minutes. The probe (`peak.c`: products of registers
alone, on all processors at once, per second of wall time) says what it gave just before and just
after a run. The best that was ever seen here is kept, so that a bench that only ever met a busy
machine does not take that for its maximum.
"""

import json
import shutil
import subprocess
import time
from pathlib import Path

from sluice.machine import processor

SECONDS = 0.3
SETTLE_S = 0.4  # threads of the run before may spin for 200 ms (KMP_BLOCKTIME)
FLAGS = ("-O3", "-march=native", "-pthread", "-Wno-psabi")


class NoProbe(Exception):
    """The probe cannot be built; the message is one sentence."""


class Peak:
    """The probe, built once into `cache`."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._binary = cache / "peak"
        self._kept = cache / "peak.json"
        self._name = processor()
        self.kind, self.best_gflops = "", 0.0
        if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
            raise NoProbe("The register peak is measured by a C loop: install gcc.")
        cache.mkdir(parents=True, exist_ok=True)
        source = Path(__file__).with_name("peak.c")
        built = subprocess.run(
            [compiler, *FLAGS, str(source), "-o", str(self._binary)], capture_output=True, text=True
        )
        if built.returncode:
            raise NoProbe(f"gcc cannot build peak.c: {built.stderr.strip()[-200:]}")
        self.best_gflops = float(self._of_all().get(self._name, 0.0))

    def _of_all(self) -> dict[str, float]:
        """The most of each processor that the cache has seen."""
        return json.loads(self._kept.read_text()) if self._kept.exists() else {}

    def measure(self) -> float:
        """GFLOP/s of all processors together, now."""
        time.sleep(SETTLE_S)
        said = subprocess.run(
            [str(self._binary), str(SECONDS)], capture_output=True, text=True, check=True
        ).stdout.split()
        self.kind, gflops = said[0], float(said[1])
        if gflops > self.best_gflops:
            self.best_gflops = gflops
            self._kept.write_text(json.dumps(self._of_all() | {self._name: gflops}))
        return gflops
