"""Which of the namespaces to serve can be watched: one that is deleted takes its Role along.

kopf ends as a whole when one watch stays forbidden for a minute (it tries again for 54 s). So it is
only given what answers, and started anew, within the process, when that changes.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..cluster.client import Cluster, ClusterError, Ref
from ..spec.service import KIND

_log = logging.getLogger(__name__)
_NOWHERE = "!*"
"""A pattern that fits no namespace: kopf answers probes and signals, and watches nothing."""
_TRIES = 3
_BETWEEN_TRIES_S = 2.0
"""Rights that were just given, and API servers that just started, say no for a moment."""


@dataclass(frozen=True, slots=True)
class Namespaces:
    """`served`: those that can be watched; `left_out`: what the API server says of the others."""

    served: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def patterns(self) -> tuple[str, ...]:
        """What kopf is to watch, where not all namespaces are served."""
        return self.served or (_NOWHERE,)

    def with_refusals(self, refusals: Mapping[str, str | None]) -> "Namespaces":
        """As they are now; a refusal of None means that nothing new is known of that one."""
        known = {
            name: self.left_out.get(name, "") if refusal is None else refusal
            for name, refusal in refusals.items()
        }
        served = tuple(name for name, refusal in known.items() if not refusal)
        return Namespaces(served, {name: refusal for name, refusal in known.items() if refusal})


MOST_BETWEEN_LOOKS_S = 20.0
"""Less than kopf's 54 s, whatever the resync, and time for the tries."""


async def look(cluster: Cluster, wanted: tuple[str, ...], before: Namespaces) -> Namespaces:
    """Which of `wanted` can be watched now; what is new is logged."""
    refusals = await asyncio.gather(
        *(_refusal(cluster, name, _TRIES if name in before.served else 1) for name in wanted)
    )
    now = before.with_refusals(dict(zip(wanted, refusals, strict=True)))
    for name in sorted(set(before.served) - set(now.served)):
        _log.error("namespace %s is left out, and looked at again: %s", name, now.left_out[name])
    for name in sorted(set(before.left_out) & set(now.served)):
        _log.warning("namespace %s can be watched again", name)
    if not now.served and before.served:
        _log.error("no namespace can be watched: waiting for one")
    return now


async def await_change(
    cluster: Cluster, wanted: tuple[str, ...], before: Namespaces, every_s: float
) -> Namespaces:
    """What can be watched, as soon as that is something else than `before`."""
    now = before
    while now.served == before.served:
        await asyncio.sleep(every_s)
        now = await look(cluster, wanted, before)
    return now


async def _refusal(cluster: Cluster, name: str, tries: int) -> str | None:
    """Why our objects in a namespace cannot be listed, "" where they can; None if nobody says."""
    refusal = ""
    for attempt in range(tries):
        if attempt:
            await asyncio.sleep(_BETWEEN_TRIES_S)
        try:
            refusal = await cluster.refusal(Ref(KIND, name))
        except ClusterError:
            return None
        if not refusal:
            break
    return refusal
