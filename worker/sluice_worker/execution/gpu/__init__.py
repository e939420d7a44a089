"""Steps on a GPU: what goes on, as which arrays, by which graph (pure), and the rim that runs it.

docs/gpu.md has what was measured.
"""
