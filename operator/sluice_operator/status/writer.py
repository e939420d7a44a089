"""Writes one object's status: only if it differs, and in its turn."""

import math
from typing import Any

from ..children.manifests import digest
from ..cluster.client import Cluster
from ..cluster.observed import Object
from ..spec.service import API_VERSION, KIND
from .write_limiter import WritePace, WriteTurns


class StatusWriter:
    """The writer of one object's status.

    `kind`: of the object. `unwritten`: the status that the API server refused last; empty after one
    is written. Its events are not sent again.
    """

    def __init__(self, cluster: Cluster, turns: WriteTurns, kind: str = KIND) -> None:
        self._cluster, self._pace, self._kind = cluster, WritePace(turns), kind
        self._accepted = ""
        self.unwritten: Object = {}

    async def write(self, body: Object, wanted: dict[str, Any]) -> tuple[Object, float]:
        """Write `wanted` if it differs from the status of `body`; raises ClusterError.

        Returns the object after that, and the seconds until a write is due: infinite, unless only
        measurements differ and their turn comes later.
        """
        live = body.get("status") or {}
        if wanted == live or self._accepted == digest([wanted, live]):
            return body, math.inf
        wait_s = self._pace.wait_s(wanted, live)
        if wait_s > 0:
            return body, wait_s
        self.unwritten = wanted
        meta = {key: body["metadata"][key] for key in ("name", "namespace")}
        manifest = {
            "apiVersion": API_VERSION,
            "kind": self._kind,
            "metadata": meta,
            "status": wanted,
        }
        written = await self._cluster.apply(manifest, "status")
        self.unwritten = {}
        self._accepted = digest([wanted, written.get("status") or {}])
        self._pace.wrote()
        return written, math.inf
