"""What is there, listed for all objects at once: it finds deletions that a watch has missed.

After a gap the watch lists again, and reports none. One list of each kind every few minutes costs
the same however many objects ask for it.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from .client import Cluster, Listed, Ref


@dataclass(frozen=True, slots=True)
class _Taken:
    listed: Listed
    at_s: float


class Roster:
    """Lists of the kinds in `labels`, each with its label, of `namespaces` or of all; a list is
    taken again after `every_s`."""

    def __init__(
        self, cluster: Cluster, namespaces: Collection[str], labels: dict[str, str], every_s: float
    ) -> None:
        self._cluster, self._namespaces = cluster, tuple(namespaces) or ("",)
        self._labels, self._every_s = labels, every_s
        self._taken: dict[str, _Taken] = {}
        self._turns = {kind: asyncio.Lock() for kind in labels}

    async def listed(self, kind: str, now_s: float) -> Listed:
        """The newest list; `now_s`: any clock's. Raises ClusterError."""
        async with self._turns[kind]:
            taken = self._taken.get(kind)
            if taken is None or now_s - taken.at_s >= self._every_s:
                taken = self._taken[kind] = _Taken(await self._list(kind), now_s)
            return taken.listed

    async def _list(self, kind: str) -> Listed:
        label = self._labels[kind]
        lists = [await self._cluster.listed(Ref(kind, name), label) for name in self._namespaces]
        uids = frozenset[str]().union(*(one.uids for one in lists))
        return Listed(uids, min(one.version for one in lists))
