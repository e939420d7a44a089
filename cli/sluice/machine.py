"""*rim*: the machine's name, for figures."""

import platform
from pathlib import Path


def processor() -> str:
    """The processor's name in Linux, with its family if a host hides the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)
    name = told.get("model name") or platform.processor() or platform.machine()
    family = told.get("cpu family")
    return name if family is None or any(map(str.isdigit, name)) else f"{name} (family {family})"
