"""Kernels for CPUs, in C++ without torch's headers: built in a second, called through ctypes."""
