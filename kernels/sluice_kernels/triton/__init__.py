"""Triton kernels, one per file, each with its checked wrapper and its plain-torch reference.

Wrappers run the reference where the tensors are on a CPU, so all above them runs without a GPU; with
`TRITON_INTERPRET=1` set before the first import, they run the kernels there, interpreted.
"""
