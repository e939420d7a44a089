"""How the host waits for a GPU."""

import torch


def reached() -> torch.cuda.Event:
    """Comes when the device is done with what it was given so far.

    Who waits for it sleeps. By default a host spins, which would take a core of the pod's quota: of
    one core all that the API process has.
    """
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
