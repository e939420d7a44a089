"""Which kernels run: decided once, when a model is loaded.

A CPU runs the C++ kernels if they exist or can be built and have the dtype, else plain torch.
A GPU runs Triton's. `SLUICE_KERNELS` (auto, cpp or torch) overrides this.
"""

import platform
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from .cpu.build import (
    BUILT,
    BuildTarget,
    CannotBuild,
    cache_directories,
    has_vnni,
    loaded,
    recipe_of,
    usable_targets,
)
from .cpu.kernels import DTYPES, CppKernels
from .cpu.library import Library
from .cpu.panels import panel_int8_projection, panel_projection
from .int8 import PlainByteRows, onednn_int8
from .interface import Activation, Kernels, MakeProjection
from .linear import can_pack, packed_projection, rounded_rows
from .plain import PlainKernels

Quantization = Literal["w8a8"]
ASKED = ("auto", "cpp", "torch")
LEAST_MAJOR = 8
"""Least compute capability of a GPU. Older ones have 64 KiB of shared memory; prefill takes 96."""


class CannotChoose(ValueError):
    """The kernels that were asked for cannot run here; the message is one sentence."""


def choose(
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    environ: Mapping[str, str],
    *,
    max_gather_bytes: int,
    max_scores_bytes: int,
    group: int = 1,
) -> Kernels:
    """The kernels for a model. The bytes: scratch of plain attention. group: the model's query
    heads for each key/value head, which sets the size of Triton's tiles. Raises CannotChoose.
    """
    asked = environ.get("SLUICE_KERNELS", "auto")
    if asked not in ASKED:
        raise CannotChoose(f"SLUICE_KERNELS must be one of {', '.join(ASKED)}, not {asked[:32]}.")
    if quantization is not None and dtype not in DTYPES:
        raise CannotChoose(f"{quantization} needs dtype bfloat16 or float32.")
    plain = partial(PlainKernels, max_gather_bytes, max_scores_bytes)
    if device.type != "cpu":
        if quantization is not None or asked == "cpp":
            raise CannotChoose(f"{quantization or 'SLUICE_KERNELS=cpp'} is built for CPUs only.")
        return plain() if asked == "torch" else _on_gpu(device, group)
    return _on_cpu(dtype, quantization, asked, environ, plain)


def _on_cpu(
    dtype: torch.dtype,
    quantization: Quantization | None,
    asked: str,
    environ: Mapping[str, str],
    plain: Callable[..., PlainKernels],
) -> Kernels:
    """The C++ kernels if they can be built, unless plain ones are requested."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    is_exact = _onednn_int8_is_exact(cpuinfo, dtype)
    round_rows = rounded_rows if quantization or can_pack(dtype) else int
    library, name = None, "torch"
    if asked != "torch":
        try:
            library = _library(dtype, cpuinfo, environ)
        except CannotBuild as error:
            if asked == "cpp":
                raise CannotChoose(f"SLUICE_KERNELS=cpp cannot be had: {error}.") from error
            name = f"torch ({error})"
    if library is None:
        if quantization is not None and not is_exact:
            raise CannotChoose(f"{quantization} needs a processor with VNNI, or the C++ kernels.")
        int8 = onednn_int8(PlainByteRows())
        making = partial(_projection, quantization, packed_projection, int8)
        return plain(making, name, round_rows)
    return _cpp(*library, dtype, quantization, is_exact, round_rows)


def _cpp(
    target: BuildTarget,
    built: Library,
    dtype: torch.dtype,
    quantization: Quantization | None,
    is_exact: bool,
    round_rows: Callable[[int], int],
) -> Kernels:
    """The C++ kernels, with their own products if these are faster than oneDNN's."""
    own_bytes = target.has_byte_products or not is_exact
    # Faster than oneDNN's on all measured CPUs (AVX2, AVX512-BF16, AMX): five times on AVX2.
    is_own = dtype == torch.bfloat16
    if is_own and (quantization is None or own_bytes):
        round_rows = int  # only oneDNN compiles a product for each number of rows

    def making(activation: Activation | None, may_narrow: bool) -> MakeProjection:
        if is_own:
            wide, int8 = panel_projection(built, activation), _int8(built, own_bytes, activation)
            return _projection(quantization, wide, int8, may_narrow)
        int8 = _int8(built, not is_exact, None)
        make = _projection(quantization, packed_projection, int8, may_narrow)
        return built.gating(make, activation)

    return CppKernels(built, making, f"cpp {target.name}", round_rows)


def _on_gpu(device: torch.device, group: int) -> Kernels:
    try:
        from .triton.kernels import TritonKernels
    except ModuleNotFoundError as error:
        sentence = "a GPU needs Triton, which is not installed; SLUICE_KERNELS=torch does without."
        raise CannotChoose(sentence) from error
    gpu = torch.cuda.get_device_properties(device)
    if gpu.major < LEAST_MAJOR:
        raise CannotChoose(
            f"the Triton kernels need a GPU of compute capability {LEAST_MAJOR}.0 (Ampere) or "
            f"more, and this one has {gpu.major}.{gpu.minor}; SLUICE_KERNELS=torch does without."
        )
    return TritonKernels(group, gpu.multi_processor_count)


def _projection(
    quantization: Quantization | None, wide: MakeProjection, int8: MakeProjection, may_narrow: bool
) -> MakeProjection:
    """Choose how a layer is made on a CPU: by `int8` if it is requested and allowed."""
    return wide if quantization is None or not may_narrow else int8


def _onednn_int8_is_exact(cpuinfo: str, dtype: torch.dtype) -> bool:
    """True if oneDNN's products of bytes are exact and fast. Without VNNI it adds two products in
    16 bits, which large neighbours overflow. For bfloat16 without AVX512's VNNI its loop is a
    hundred times as slow."""
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    return platform.machine() != "x86_64" or has_vnni(cpuinfo, in_avx512=dtype == torch.bfloat16)


def _int8(built: Library, own: bool, activation: Activation | None) -> MakeProjection:
    if own:
        return panel_int8_projection(built, activation)
    return built.gating(onednn_int8(built), activation)


def _library(
    dtype: torch.dtype, cpuinfo: str, environ: Mapping[str, str]
) -> tuple[BuildTarget, Library]:
    if dtype not in DTYPES:
        raise CannotBuild(f"the C++ kernels have no {str(dtype).removeprefix('torch.')}")
    targets = usable_targets(platform.machine(), cpuinfo)
    if not targets:
        raise CannotBuild("no instruction set that the C++ kernels are made for")
    return targets[0], loaded(Library, recipe_of(targets[0]), cache_directories(environ), (BUILT,))
