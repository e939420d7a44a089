"""Another writer of the Deployment's replicas, such as an HPA that names it as its target. Pure.

A person's edit is put back once. Who sets the number again is a controller, and would do so for
ever: each time a pod would be made or ended. So it keeps the number, and the object says who it is.
"""

from dataclasses import dataclass

from ..cluster.observed import Object
from ..settings import FIELD_MANAGER

_AGAIN_S = 600.0
"""Seconds within which a second edit by the same writer is a controller's. An HPA takes 15."""


@dataclass(frozen=True, slots=True)
class Rivalry:
    """What is known of such writers. `last`: of the newest edit, seen at `last_s`, after which the
    Deployment's generation was `edited`. `writer`: who keeps the number, "" for nobody, until an
    edit of the object raises its `generation`."""

    last: str = ""
    edited: int = 0
    last_s: float = 0.0
    writer: str = ""
    generation: int = 0


def after(
    known: Rivalry, live: Object | None, wanted: int | None, generation: int, now: float
) -> Rivalry:
    """What is known once `live` is seen. `wanted`: the replicas that were written last."""
    if known.generation != generation:
        known = Rivalry(generation=generation)
    writer = "" if wanted is None or replicas_of(live) == wanted else _writer(live)
    if known.writer or not writer or live is None or _generation(live) == known.edited:
        return known
    is_again = writer == known.last and now - known.last_s < _AGAIN_S
    return Rivalry(writer, _generation(live), now, writer if is_again else "", generation)


def replicas_of(live: Object | None) -> int:
    """The replicas that a live Deployment asks for."""
    return int((live or {}).get("spec", {}).get("replicas") or 0)


def _generation(live: Object) -> int:
    return int(live["metadata"].get("generation", 0))


def _writer(live: Object | None) -> str:
    """Who else has written the number that is there; "" if we have. A write through /scale has no
    time there, so the newest is not known: there is hardly more than one."""
    entries = ((live or {}).get("metadata") or {}).get("managedFields") or ()
    writers = [
        str(entry.get("manager", ""))
        for entry in entries
        if "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
    ]
    return next((writer for writer in writers if writer != FIELD_MANAGER), "")
