"""`sluice simulate`: a model of pods under a trace, tuned by the operator's own code.

The code here is pure but `command` and `trace`, which read files: a virtual clock, no socket, and
no thread. The tuner is the operator's own. Scheduler, block pool, evidence and step-time fit are
the worker's own.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
