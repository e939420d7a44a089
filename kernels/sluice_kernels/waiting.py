"""How the host waits for a GPU."""

import torch


def reached() -> torch.cuda.Event:
    """An event that is reached when the device has finished all work given so far.

    A thread that waits for it sleeps. By default a host spins, which takes a core of the pod's
    quota; with a quota of one core the API process would get nothing.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
