"""`sluice simulate`: a model of pods under a trace, tuned by the operator's own code.

What lives here is pure but `command`, `trace` (reads and writes files) and `picture`: a virtual
clock, no socket, and no thread. The tuner, the step-time fit and the evidence are the real ones;
scheduler and block pool have faster twins here, which a test holds against the real code.
"""

from .command import add_arguments, main

__all__ = ["add_arguments", "main"]
