"""How much processor time a piece of code takes, on a machine that others share."""

import time
from collections.abc import Callable


def least_cpu_s(run: Callable[[], object], num: int = 5) -> float:
    """The least CPU time of this thread, in seconds, of `num` runs.

    Collections of garbage and busy neighbours lengthen any one of them.
    """
    spent_s = []
    for _ in range(num):
        began_s = time.thread_time()
        run()
        spent_s.append(time.thread_time() - began_s)
    return min(spent_s)
