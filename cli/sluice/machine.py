"""*rim*: the machine, as figures name it."""

import platform
from pathlib import Path


def processor() -> str:
    """This machine's, as Linux calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ")[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
