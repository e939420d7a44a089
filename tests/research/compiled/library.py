"""*rim*: the compiled pod as a shared library: found in the cache, or built at first use."""

import ctypes
import os
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path

from research.compiled import layout
from sluice_kernels.cpu.build import CannotBuild, Recipe, cache_directories, loaded

# No contraction: a fused multiply-add would round otherwise than Python does.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off")


@cache
def library() -> ctypes.CDLL | None:
    """The library; None where there is no compiler, or nothing that it could write to."""
    recipe = Recipe("pod", Path(__file__).parent, FLAGS)
    try:
        return loaded(_declared, recipe, cache_directories(os.environ))
    except CannotBuild:
        return None


def _declared(path: Path) -> ctypes.CDLL:
    built = ctypes.CDLL(str(path))
    pod, reals, wholes = c_void_p, POINTER(c_double), POINTER(c_int64)
    row, fit = POINTER(layout.Row), POINTER(layout.Fit)
    for name, result, arguments in (
        ("pod_new", pod, (POINTER(layout.Config), row, c_int64, fit)),
        ("pod_delete", None, (pod,)),
        ("pod_send", None, (pod, c_double, c_int64, c_int64)),
        ("pod_factors", None, (pod, reals, c_int64)),
        ("pod_interference", None, (pod, reals, c_int64)),
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
        function = getattr(built, name)
        function.restype, function.argtypes = result, arguments
    return built
