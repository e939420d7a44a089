"""Compile every kernel ahead of time, without a GPU, and tell what each takes of one.

    PYTHONPATH=tests .venv/bin/python -m gpu.compiled [--arch 80 90 100]

Shapes are those of an 8B Llama in bfloat16; window and softcap make one more variant of attention,
float32 two.
Registers and spills (bytes of local memory a thread) are what cuobjdump reads off the machine code.
Exits 1 where a kernel spills much or does not fit.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from sluice_kernels.triton import add_norm, choose, cut, decode, gated, prefill, rotate_store, texts
from sluice_kernels.triton.attend import Pages
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHS = (80, 90, 100)
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of a program. sm_80 has 163 KiB, but sm_86 and sm_89, whose code takes the same, have 99."""
HEADS, KV_HEADS, DIM, PAGE, HIDDEN = 32, 8, 128, 16, 4096
MOST_LOCAL_BYTES = 64
"""A few words of a loop with 255 registers stay in the first cache; more would be felt."""
POINTERS = {
    "tables": "i32",
    "lengths": "i32",
    "tiles": "i32",
    "slots": "i64",
    "blocks": "i64",
    "seeds": "i64",
}
POINTERS |= dict.fromkeys(("parts", "sums", "rotary", "best", "floors"), "fp32")
POINTERS |= dict.fromkeys(("temperatures", "top_ps", "min_ps"), "fp32")
POINTERS |= dict.fromkeys(("tokens", "top_ks"), "i64")
UNKNOWN = ("table_stride", "min_blocks")  # what is not specialised
SCALARS = {"scale": "fp32", "eps": "fp32", "softcap": "fp32"}
SCALARS |= dict.fromkeys(("query_stride", "table_stride", "row_stride", "stride"), "i32")
SCALARS |= {"width": "i32", "min_blocks": "i32"}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel with what it is compiled for."""

    name: str
    kernel: Any
    constants: Mapping[str, int | float]
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one program takes: registers of a thread, bytes of local and of shared memory."""

    registers: int
    local_bytes: int
    shared_bytes: int


def cases() -> Iterator[Case]:
    """Every kernel, in the variants that differ in their code."""
    pages, wide = Pages(KV_HEADS, PAGE, DIM, 2), Pages(4, PAGE, 256, 2)
    many = (HEADS, pages, 32, None, None)
    yield Case("decode, 32 splits", decode._decode, decode.decode_constants(*many))
    gemma = decode.decode_constants(8, wide, 8, 4096, 50.0)
    yield Case("decode, dim 256, window, cap", decode._decode, gemma)
    yield Case("join", decode._join, decode.join_constants(*many))
    plain = {"WINDOW": 0, "SOFTCAP": 0.0}
    whole = {**prefill.prefill_constants(HEADS // KV_HEADS, pages), **plain}
    yield Case("prefill", prefill._prefill, whole)
    whole = {**prefill.prefill_constants(2, wide), "WINDOW": 4096, "SOFTCAP": 50.0}
    yield Case("prefill, dim 256, window, cap", prefill._prefill, whole)
    for dim in (64, 256):
        full = Pages(4, PAGE, dim, 4)
        few = decode.decode_constants(8, full, 8, None, None)
        yield Case(f"decode, dim {dim}, float32", decode._decode, few, "fp32")
        whole = {**prefill.prefill_constants(2, full), **plain}
        yield Case(f"prefill, dim {dim}, float32", prefill._prefill, whole, "fp32")
    turn = rotate_store.rotate_constants(HEADS, pages, has_norm=True)
    yield Case("norm, rotate, store", rotate_store._rotate_store, turn)
    yield Case("add, norm", add_norm._add_norm, add_norm.norm_constants(HIDDEN, adds=True))
    yield Case("silu, mul", gated._gated, {"IS_GELU": False, "BLOCK": gated.BLOCK})
    for name, itemsize, dtype in (("", 2, "bf16"), (", float32", 4, "fp32")):
        common = texts.text_constants(12, 64, itemsize)
        whole = {**common, "WINDOW": 0, "IS_CAUSAL": False}
        yield Case(f"texts{name}", texts._texts, whole, dtype)
        whole = {**common, "WINDOW": 64, "IS_CAUSAL": True}
        yield Case(f"texts, window, causal{name}", texts._texts, whole, dtype)
    yield Case("choose", choose._choose, choose.choose_constants(has_softcap=False))
    yield Case("cut", cut._cut, cut.cut_constants(torch.bfloat16, has_softcap=False))
    bent = cut.cut_constants(torch.float32, has_softcap=True)
    yield Case("cut, cap, float32", cut._cut, bent, "fp32")


def compile_case(case: Case, arch: int) -> Usage:
    """Compile for one architecture; raises what triton raises where it cannot."""
    options = {k: v for k, v in case.constants.items() if k.startswith("num_")}
    constants = {k: v for k, v in case.constants.items() if k not in options}
    signature, attrs = {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in SCALARS:
            signature[name] = SCALARS[name]
        else:
            signature[name] = "*" + POINTERS.get(name, case.dtype)
        if name not in (*constants, *UNKNOWN) and SCALARS.get(name) != "fp32":
            attrs[(index,)] = [["tt.divisibility", 16]]  # as it is of every allocation and width
    source = ASTSource(case.kernel, signature, constants, attrs)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return usage(built.asm["cubin"], built.metadata.shared)


def usage(cubin: bytes, shared_bytes: int) -> Usage:
    """Read what `cubin` takes. Shared memory that is asked for at launch is not in it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)
    found = {key: int(value) for key, value in told}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], shared_bytes)


def main() -> int:
    """Print one line per kernel and architecture; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHS, choices=ARCHS)
    archs: list[int] = parser.parse_args().arch
    failures = 0
    print(f"triton {triton.__version__}; registers a thread, local bytes a thread, shared bytes")
    for case in cases():
        for arch in archs:
            used = compile_case(case, arch)
            bad = used.local_bytes > MOST_LOCAL_BYTES or used.shared_bytes > SHARED_BYTES[arch]
            failures += bad
            print(
                f"{case.name:30} sm_{arch:<4} {used.registers:4} {used.local_bytes:5} "
                f"{used.shared_bytes:7}{'  TOO MUCH' * bad}",
                flush=True,
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
