"""The machine, as figures name it."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor's name as the machine gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
