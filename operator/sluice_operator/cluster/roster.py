"""What is there, listed for all objects at once: it finds deletions that a watch has missed.

After a gap the watch lists again, and reports none. One list of each kind every few minutes costs
the same however many objects ask for it.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from .client import Cluster, Listed, Ref


@dataclass(frozen=True, slots=True)
class _Taken:
    listed: Listed
    at_s: float


class Roster:
    """Lists of the kinds in `labels`, each with its label. A list is taken again after `every_s`.
    `is_one`: one list holds all namespaces; else each has its own, as rights may lack in one."""

    def __init__(
        self, cluster: Cluster, labels: Mapping[str, str], every_s: float, *, is_one: bool
    ) -> None:
        self._cluster, self._labels, self._every_s = cluster, labels, every_s
        self._is_one = is_one
        self._taken: dict[Ref, _Taken] = {}
        self._turns: defaultdict[Ref, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def listed(self, kind: str, namespace: str, now_s: float) -> Listed:
        """The newest list with that namespace; `now_s`: any clock's. Raises ClusterError."""
        collection = Ref(kind, "" if self._is_one else namespace)
        async with self._turns[collection]:
            taken = self._taken.get(collection)
            if taken is None or now_s - taken.at_s >= self._every_s:
                listed = await self._cluster.listed(collection, self._labels[kind])
                taken = self._taken[collection] = _Taken(listed, now_s)
            return taken.listed
