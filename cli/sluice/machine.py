"""*rim*: the machine, as figures name it."""

import platform
from pathlib import Path


def processor() -> str:
    """This machine's, as Linux calls it, with its family where a host hides the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    name = told.get("model name") or platform.processor() or platform.machine()
    family = told.get("cpu family")
    return name if family is None or any(map(str.isdigit, name)) else f"{name} (family {family})"
