"""The children of one object: read if no watch has shown them, and written as a plan says."""

import logging
import math
import secrets
import time
from collections.abc import Iterable, Mapping

from ..children import drift, manifests
from ..children.admin_token import token_of
from ..cluster.child_store import ChildStore, Key
from ..cluster.client import Cluster, ClusterError, Listed, Ref, ref_of
from ..cluster.observed import Object
from ..cluster.roster import Roster
from ..reasons import Reason
from ..spec.service import InferenceService

_log = logging.getLogger(__name__)
_WRITTEN_OVER: Mapping[str, Object] = {"Service": {}, "PodDisruptionBudget": {"minAvailable": None}}
"""Kinds whose spec is all ours, with the fields that must not be there beside it."""
SWEEP_RESYNCS = 10
"""Resyncs between two checks for deletions that the watch has missed: five minutes by default."""
_AT_ONCE = 10
"""Objects whose Secrets are read within one resync; of more objects, each is read less often."""

_NO_GROUPS = (
    "spec.hardware.nodes needs LeaderWorkerSet, which is not installed in this cluster: "
    "https://lws.sigs.k8s.io/docs/installation"
)


class Children:
    """The children of the object `key`.

    `unread`: by kind, why a child could not be read in the last pass. `accepted`: by kind,
    `drift.acceptance` of our last write. `saved`, `saved_s`: manifest hash and time of our last
    write of the ConfigMap. `pods_label`: selects the object's pods. Times are of `time.monotonic`,
    as no other process reads them.
    """

    def __init__(
        self, cluster: Cluster, roster: Roster, store: ChildStore, key: Key, resync_s: float
    ) -> None:
        self._cluster, self._roster, self._store = cluster, roster, store
        self._key, self._resync_s = key, resync_s
        self.pods_label = (
            f"{manifests.INSTANCE_LABEL}={key[1]},"
            f"{manifests.MANAGED_BY_LABEL}={manifests.MANAGED_BY}"
        )
        self._has_listed = False
        self._read_by_name_s = -math.inf
        self._swept: dict[str, Listed] = {}
        self._absent_s: dict[str, float] = {}
        self.unread: dict[str, ClusterError] = {}
        self.accepted: dict[str, str] = {}
        self.saved: str | None = None
        self.saved_s = -math.inf
        self.token = ""

    async def list_pods(self) -> None:
        """Read the pods once, as the watch may not have shown them yet. Without them a pass would
        decide as if none served. Raises ClusterError."""
        if not self._has_listed:
            async for body in self._cluster.live_pods(self._key[0], self.pods_label):
                self._store.show(self._key, "Pod", body)
            self._has_listed = True

    @property
    def every_s(self) -> float:
        """Seconds between two reads of what no watch shows. They cost the same for all objects,
        however many there are."""
        return self._resync_s * max(1.0, len(self._store) / _AT_ONCE)

    async def find(self, ref: Ref, *, afresh: bool = False) -> Object | None:
        """The child of that name; read if it is not known, or if no watch would show it. One that
        was absent is looked for again after some minutes, if not `afresh`."""
        if ref.kind == manifests.GROUPS:
            return await self._read_one(ref)
        if (known := self._store.child(self._key, ref.kind)) is not None:
            self._absent_s.pop(ref.kind, None)
            return known
        now_s = time.monotonic()
        absent_s = now_s - self._absent_s.get(ref.kind, -math.inf)
        if not afresh and absent_s < SWEEP_RESYNCS * self._resync_s:
            return None
        live = await self._cluster.get(ref)
        if live is None:
            self._absent_s[ref.kind] = now_s
        if live and _is_watched(live):
            self._store.keep(self._key, ref.kind, live)
        return live

    async def are_of_model(self, service: InferenceService) -> bool:
        """True if the pods are of the model that is asked for now."""
        return manifests.is_of_model(service, await self._workload(service))

    async def _workload(self, service: InferenceService) -> Object | None:
        kind = manifests.workload_of(service)
        return await self.find(Ref(kind, service.namespace, manifests.name_of(service, kind)))

    def _known(self, refs: Iterable[Ref]) -> dict[str, Object]:
        found = {ref.kind: self._store.child(self._key, ref.kind) for ref in refs}
        return {kind: child for kind, child in found.items() if child is not None}

    async def look(self, service: InferenceService, *, fits: bool) -> dict[str, Object]:
        """All live children by kind; only the known ones if the model does not fit and was never
        rolled out. Raises ClusterError."""
        refs = _refs(service, manifests.seen_kinds(service))
        self.unread = {}
        pods = await self._workload(service)
        if not fits and not (pods and manifests.is_ours(service, pods)):
            return self._known(refs)
        # The watch shows only labelled ones; others of that name must not be overwritten.
        found = {ref.kind: await self.find(ref, afresh=True) for ref in refs}
        live = {kind: child for kind, child in found.items() if child is not None}
        live |= await self._by_name(service)
        secret = live.get("Secret")
        # Pods read the Secret again when it changes, so an edited one is restored, not believed.
        is_ours = secret is not None and manifests.is_ours(service, secret)
        token = self.token or (token_of(secret) if secret and is_ours else None)
        if not token and "Secret" in self.unread:
            raise self.unread["Secret"]
        self.token = token or secrets.token_urlsafe(32)
        return live

    async def _by_name(self, service: InferenceService) -> dict[str, Object]:
        now_s, refs = time.monotonic(), _refs(service, manifests.UNWATCHED)
        if now_s - self._read_by_name_s >= self.every_s:
            await self._read(refs)
            self._read_by_name_s = -math.inf if self.unread else now_s
        found = self._known(refs)
        if not all(manifests.is_ours(service, body) for body in found.values()):
            self._read_by_name_s = -math.inf  # a deleted object's may be gone in a moment
        return found

    async def _read(self, refs: Iterable[Ref]) -> None:
        """Read a child; one that cannot be read stays as it was known."""
        for ref in refs:
            try:
                await self._read_one(ref)
            except ClusterError as e:
                if not e.status:  # nobody answers: the others would wait as long
                    raise
                said = f"{ref.kind} {ref.name} cannot be read: {e}"
                self.unread[ref.kind] = ClusterError(e.status, e.reason, said)

    async def _read_one(self, ref: Ref) -> Object | None:
        live = await self._cluster.get(ref)
        if live:
            self._store.keep(self._key, ref.kind, live)
        elif before := self._store.child(self._key, ref.kind):
            self._store.lose(self._key, ref.kind, before)
        return live

    async def sweep(self) -> None:
        """Find deletions that the watch has missed. Raises ClusterError."""
        for kind in manifests.SEEN:
            listed = await self._roster.listed(kind, self._key[0], time.monotonic())
            if self._swept.get(kind) is listed:
                continue
            self._swept[kind] = listed
            child = self._store.child(self._key, kind)
            known = self._store.pods(self._key) if kind == "Pod" else filter(None, [child])
            for body in [body for body in known if listed.lacks(body)]:
                self._store.lose(self._key, kind, body)

    async def apply(self, wanted: Iterable[Object]) -> set[str]:
        """Write all of them, even after one is refused. Raises the first ClusterError.

        Returns the kinds for which that changed nothing, as a webhook makes the same of it again.
        """
        refused, same = None, set()
        for manifest in wanted:
            kind, before = manifest["kind"], self._store.child(self._key, manifest["kind"])
            try:
                live = await self._write(manifest)
            except ClusterError as e:
                if e.status == 409 and kind == "ConfigMap":  # somebody else wrote: look again
                    self._store.drop(self._key, kind)
                if not e.status:  # nobody answers: the others would wait as long
                    raise
                refused = refused or e
                continue
            self._store.keep(self._key, kind, live)
            self.accepted[kind] = drift.acceptance(manifest, live)
            if before and drift.acceptance(manifest, before) == self.accepted[kind]:
                same.add(kind)
            if kind == "ConfigMap":
                self.saved, self.saved_s = drift.manifest_hash(live), time.monotonic()
            _log.info("%s/%s: applied %s", *self._key, kind)
        if refused:
            raise refused
        return same

    async def change(self, ref: Ref, patch: Object) -> None:
        """Write some fields of a child over what is there. Raises ClusterError."""
        self._store.keep(self._key, ref.kind, await self._cluster.merge(ref, patch))
        _log.info("%s/%s: changed %s", *self._key, ref.kind)

    async def _write(self, manifest: Object) -> Object:
        """Apply it and return the live object.

        A field that somebody added beside ours may cause a refusal, such as a second port of the
        same name. Then our fields replace the whole spec.
        """
        ref = ref_of(manifest)
        try:
            return await self._cluster.apply(manifest)
        except ClusterError as e:
            if e.status == 404 and ref.kind == manifests.GROUPS:
                raise ClusterError(e.status, Reason.NO_GROUPS, _NO_GROUPS) from e
            is_new = self._store.child(self._key, ref.kind) is None
            if e.status != 422 or ref.kind not in _WRITTEN_OVER or is_new:
                raise
        spec = {**manifest["spec"], **_WRITTEN_OVER[ref.kind]}
        await self._cluster.merge(ref, {"spec": spec})
        return await self._cluster.apply(manifest)


def _refs(service: InferenceService, kinds: Iterable[str]) -> list[Ref]:
    return [Ref(kind, service.namespace, manifests.name_of(service, kind)) for kind in kinds]


def _is_watched(live: Object) -> bool:
    """True if the watch shows it: somebody may have removed its label."""
    labels = live["metadata"].get("labels") or {}
    return labels.get(manifests.MANAGED_BY_LABEL) == manifests.MANAGED_BY
