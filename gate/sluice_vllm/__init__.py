"""Sluice's inner loop inside a stock vLLM: `vllm serve --scheduler-cls sluice_vllm.Scheduler`.

Each step's token budget keeps the step within the inter-token target, by the law of Sluice's own
engine (`sluice_core.steptime`). The cap on running requests, the target and the order of the queue
are live. A gate sends them over a Unix socket, and gets a record of each step. Without a gate the
environment sets them (`settings`). It needs `sluice_core`, msgspec and numpy beside vLLM.

vLLM does not promise this interface. At the start `probe` looks for all that is used here. If
something is missing, one line in the log says so, and the scheduler behaves as the stock one.
docs/engines.md lists the versions.
"""

from typing import Any

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    """`Scheduler` needs vLLM; the other modules do not."""
    if name != "Scheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .scheduler import Scheduler

    return Scheduler
