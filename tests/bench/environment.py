"""The environment of a worker's engine process, for benches that run an engine's parts."""

import os
import sys

from sluice_worker.base.resources import engine_environment


def as_engine(module: str) -> None:
    """Begin `python -m MODULE` anew in that environment, unless it is there: the C library reads it
    before a program begins."""
    if "GLIBC_TUNABLES" not in os.environ:
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, engine_environment(os.environ))  # noqa: S606
