"""*rim*: the machine, as figures name it."""

import platform
from importlib.util import find_spec
from pathlib import Path

NEEDS_MATPLOTLIB = "the picture needs matplotlib: sluice[plots]"


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


def can_draw() -> bool:
    """Whether there is matplotlib, which comes with the `plots` extra."""
    return find_spec("matplotlib") is not None
