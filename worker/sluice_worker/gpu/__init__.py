"""Steps on a GPU: arrays (pure), which CUDA graphs (pure), the forward of kernels, and the runner.

Proven so far without a GPU only: the kernels interpreted, the rest on a CPU. docs/gpu.md says what
was measured on one.
"""
