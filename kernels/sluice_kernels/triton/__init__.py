"""Triton kernels, one per file, each with its checked wrapper and its plain-torch reference.

A wrapper runs its reference if the tensors are on a CPU, so its callers run without a GPU.
With `TRITON_INTERPRET=1` set before the first import it runs the kernel there, interpreted.
"""

import os

# Without this Triton 3.9 warns at each first compile.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
