"""*rim*: the compiled pod as a shared library: found in the cache, or built at first use."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

from . import layout

SOURCES = Path(__file__).parent
# No contraction: a fused multiply-add would round otherwise than Python does.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off")
BUILD_TIMEOUT_S = 120


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where there is no compiler, or nothing that it could write to."""
    try:
        path = _built(_directory(os.environ))
    except (OSError, subprocess.SubprocessError):
        return None
    return _declared(ctypes.CDLL(str(path)))


def _directory(environ: Mapping[str, str]) -> Path:
    home, known = environ.get("HOME"), environ.get("XDG_CACHE_HOME")
    root = Path(known) if known else Path(home or tempfile.gettempdir()) / ".cache"
    directory = root / "sluice" / "simulate"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if directory.stat().st_uid != os.getuid():  # what others may write to could be anybody's code
        raise PermissionError(f"{directory} is somebody else's")
    return directory


def _built(directory: Path) -> Path:
    digest = hashlib.sha256(repr(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    path = directory / f"pod-{digest.hexdigest()[:16]}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=directory) as made:
            output = Path(made) / path.name
            command = ["g++", *FLAGS, str(SOURCES / "pod.cpp"), "-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
            output.replace(path)  # a process that builds the same at the same time does no harm
    return path


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pod, reals, wholes = c_void_p, POINTER(c_double), POINTER(c_int64)
    row, fit = POINTER(layout.Row), POINTER(layout.Fit)
    for name, result, arguments in (
        ("pod_new", pod, (POINTER(layout.Config), row, c_int64, fit)),
        ("pod_delete", None, (pod,)),
        ("pod_send", None, (pod, c_double, c_int64, c_int64)),
        ("pod_factors", None, (pod, reals, c_int64)),
        ("pod_spells", None, (pod, reals, c_int64)),
        ("pod_run", c_int64, (pod, c_double)),
        ("pod_patch", None, (pod, c_int64, c_int64, c_double)),
        ("pod_view", POINTER(layout.View), (pod,)),
        ("pod_ticks", POINTER(layout.Tick), (pod,)),
        ("pod_pairs", wholes, (pod,)),
        ("pod_lengths", wholes, (pod,)),
        ("pod_forget", None, (pod,)),
        ("pod_gaps", c_int64, (pod, POINTER(layout.Totals), wholes)),
        ("pod_jobs", None, (pod, POINTER(layout.Ended))),
        ("pod_num_jobs", c_int64, (pod,)),
        ("pod_num_done", c_int64, (pod,)),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
