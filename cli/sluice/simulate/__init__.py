"""`sluice simulate`: a model of pods under a trace, tuned by the operator's own code.

What lives here is pure but `command`, `trace` (reads and writes files) and `picture`: a virtual
clock, no socket, and no thread. The tuner is the operator's own; scheduler, block pool, evidence
and step-time fit are the worker's own, with a twin in C++ (`compiled`) that a test holds to them.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
