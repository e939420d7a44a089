"""*rim*: `sluice gate --upstream URL`: a gate before an engine that runs already."""

import os
import sys

MODULE = "sluice_gate"


def main(flags: list[str]) -> int:
    """Becomes `sluice-gate` with `flags`, which says by itself what is wrong with them."""
    os.execv(sys.executable, line(flags))


def line(flags: list[str]) -> list[str]:
    """The command line of a gate."""
    return [sys.executable, "-m", MODULE, *flags]
