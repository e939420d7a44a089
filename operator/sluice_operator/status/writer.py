"""Writes one object's status: where it differs, in its turn, and what the CRD in force knows of it.

The API server refuses a whole status for one field, or one word, that its CRD does not know: a new
image of the operator may run beside the CRD of an older chart.
"""

import math
import time
from contextlib import suppress
from typing import Any

from ..children.manifests import digest
from ..cluster.client import Cluster, ClusterError
from ..cluster.observed import Object
from ..spec.kinds import Schema
from ..spec.service import API_VERSION, KIND
from . import trim
from .write_limiter import Pace, Turns

_OF_THE_SCHEMA = (422, 500)
"""How a word is refused, and how a field is, by server-side apply."""
_REREAD_S = 300.0
"""Until the CRD is looked at again, which may have been upgraded."""


class StatusWriter:
    """Of one object.

    `left_out`: paths that the CRD did not know; `unwritten`: the status that was refused last,
    empty once one is written: what it says has been told.
    """

    def __init__(self, cluster: Cluster, turns: Turns) -> None:
        self._cluster, self._pace = cluster, Pace(turns)
        self._accepted = ""
        self._schema: Schema = {}
        self._read_s = -math.inf
        self.left_out: tuple[str, ...] = ()
        self.unwritten: Object = {}

    async def write(self, body: Object, wanted: dict[str, Any]) -> tuple[Object, float]:
        """Write `wanted` if it differs from the status of `body`, once for each difference: the
        object as it is then, and seconds until it may be, where only measurements do and it is not
        their turn, else infinite. Raises ClusterError."""
        if self._schema and time.monotonic() - self._read_s >= _REREAD_S:
            await self._read_schema(wanted)
        known, live = self._known(wanted), body.get("status") or {}
        if known == live or self._accepted == digest([known, live]):
            return body, math.inf
        wait_s = self._pace.wait_s(known, live)
        if wait_s > 0:
            return body, wait_s
        self.unwritten = wanted
        written = await self._apply(body, wanted)
        self.unwritten = {}
        self._accepted = digest([self._known(wanted), written.get("status") or {}])
        self._pace.wrote()
        return written, math.inf

    async def _apply(self, body: Object, wanted: Object) -> Object:
        known = self._known(wanted)
        try:
            return await self._send(body, known)
        except ClusterError as refused:
            if refused.status not in _OF_THE_SCHEMA:
                raise
            await self._read_schema(wanted)
            if (less := self._known(wanted)) == known:
                raise
            return await self._send(body, less)

    async def _send(self, body: Object, status: Object) -> Object:
        meta = {key: body["metadata"][key] for key in ("name", "namespace")}
        manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "status": status}
        return await self._cluster.apply(manifest, "status")

    async def _read_schema(self, wanted: Object) -> None:
        """Keep the schema where it knows less than `wanted`; where none can be read, what was."""
        with suppress(ClusterError):
            schema = await self._cluster.status_schema()
            unknown = trim.prune_status(wanted, schema)[1]
            self._schema, self.left_out = (schema, unknown) if unknown else ({}, ())
        self._read_s = time.monotonic()

    def _known(self, wanted: Object) -> Object:
        known, unknown = trim.prune_status(wanted, self._schema)
        self.left_out += tuple(path for path in unknown if path not in self.left_out)
        return known
