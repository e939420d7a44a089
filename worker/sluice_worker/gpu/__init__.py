"""Steps on a GPU: what goes on, as which arrays, by which graph (pure), and the rim that runs it.

Untried on a GPU so far: kernels were proven interpreted, the rest on a CPU. docs/gpu.md has both.
"""
