"""Triton kernels: on the GPU where there is one, elsewhere in Triton's interpreter.

A run of its own (`pytest tests/gpu`), as the interpreter must be chosen before triton is imported.
"""

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton" in sys.modules:
        raise RuntimeError("tests/gpu needs a pytest run of its own: triton is already imported.")
