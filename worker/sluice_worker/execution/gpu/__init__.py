"""Steps on a GPU: their rows, arrays and CUDA graphs (pure), and the rim that runs them.

docs/gpu.md has what was measured.
"""
