"""Which kernels run: decided once, when a model is loaded.

On a CPU the C++ ones where they are there or can be built and have the dtype, else plain torch;
Triton's on a GPU. `SLUICE_KERNELS` (auto, cpp or torch) says otherwise.
"""

import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from .cpu.build import CannotBuild, cache_directories, library, usable_targets
from .cpu.kernels import DTYPES, CppKernels, Library
from .int8 import ByteRows, PlainByteRows, int8_projection
from .interface import Kernels, MakeProjection, Projection
from .linear import packed_projection
from .plain import PlainKernels

Quantization = Literal["w8a8"]
ASKED = ("auto", "cpp", "torch")


class CannotChoose(ValueError):
    """What was asked for cannot run here; the message is one sentence."""


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
    """The kernels for a model. The bytes: scratch of plain attention; group: the model's query
    heads for each key/value head, by which Triton's tiles are cut. Raises CannotChoose.
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
    if asked == "torch":
        return plain(projections(quantization, PlainByteRows()))
    try:
        target, built = _library(dtype, environ)
    except CannotBuild as error:
        if asked == "cpp":
            raise CannotChoose(f"SLUICE_KERNELS=cpp cannot be had: {error}.") from error
        return plain(projections(quantization, PlainByteRows()), f"torch ({error})")
    return CppKernels(built, projections(quantization, built), f"cpp {target}")


def _on_gpu(device: torch.device, group: int) -> Kernels:
    try:
        from .triton.kernels import TritonKernels
    except ModuleNotFoundError as error:
        sentence = "a GPU needs Triton, which is not installed; SLUICE_KERNELS=torch does without."
        raise CannotChoose(sentence) from error
    return TritonKernels(group, torch.cuda.get_device_properties(device).multi_processor_count)


def projections(quantization: Quantization | None, byte_rows: ByteRows) -> MakeProjection:
    """How linear layers are made on a CPU: packed, and int8 where that is asked and may be."""
    if quantization is None:
        return packed_projection
    if not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        raise CannotChoose("w8a8 needs oneDNN, which this torch has not.")

    def make(weight: Tensor, bias: Tensor | None, narrow: bool) -> Projection:
        if narrow:
            return int8_projection(weight, bias, byte_rows)
        return packed_projection(weight, bias, narrow)

    return make


def _library(dtype: torch.dtype, environ: Mapping[str, str]) -> tuple[str, Library]:
    if dtype not in DTYPES:
        raise CannotBuild(f"the C++ kernels have no {str(dtype).removeprefix('torch.')}")
    targets = usable_targets(platform.machine(), Path("/proc/cpuinfo").read_text())
    if not targets:
        raise CannotBuild("no instruction set that the C++ kernels are made for")
    try:
        return targets[0].name, Library(library(targets[0], cache_directories(environ)))
    except OSError as error:
        raise CannotBuild(f"the library cannot be loaded: {error}") from error
