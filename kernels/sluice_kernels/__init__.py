"""Kernels: one per file, each beside its plain-torch reference. Imports torch and triton only."""
