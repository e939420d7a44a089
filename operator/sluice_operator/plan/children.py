"""The children of an object, those to write, and edits of others that are undone. Pure."""

from collections.abc import Iterator
from dataclasses import replace

from ..children import drift, manifests
from ..children.pod import grace_seconds
from ..children.runtime import DecidedRuntime
from ..cluster.observed import NODE_S, Object, Rollout, rollout_of, unplaced
from ..model.fit import ceiling_of, loading_bytes
from ..reasons import Reason
from ..settings import Settings
from ..spec.service import InferenceService
from ..status.events import Notice
from .observed import Observed
from .tune import with_budget

PAST_SAVE_SECONDS = 30.0
"""Seconds between saves of the tuner's memory alone: losing it costs caution, not correctness."""
_TOLD_AGAIN_S = 600.0
_ROOM_S = 60.0
"""Seconds in which the room of a stopped pod is taken: the scheduler retries after 10 s at most."""
_MEMORY_ONLY = {"data.past.json", f"metadata.annotations.{manifests.MANIFEST_ANNOTATION}"}


def num_unplaced_of(
    service: InferenceService, observed: Observed, replicas: int, now: float
) -> int:
    """The wanted pods that no node will take. A pod that is made as another begins to leave gets
    room only after the other's grace period."""
    patience_s = max(NODE_S, grace_seconds(service) + _ROOM_S)
    rollout = rollout_of(observed.workload)
    return unplaced(observed.pods, rollout, replicas, now, patience_s)


def children_of(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    runtime: DecidedRuntime,
    num_unplaced: int,
    *,
    is_pending: bool,
) -> tuple[Object, ...]:
    pods = manifests.workload(
        with_budget(service, runtime.past.chunk_budget),
        settings,
        ceiling=ceiling_of(service.spec, observed.fit),
        loading_bytes=loading_bytes(observed.fit),
        disk_bytes=observed.fit.disk_bytes,
        replicas=runtime.replicas,
        commit=observed.fit.checkpoint.commit if observed.fit.checkpoint else "",
        live=observed.workload,
        is_unread=observed.fit.checkpoint is None,
        is_pending=is_pending,
        unplaced=num_unplaced,
    )
    return (
        manifests.configmap(service, settings, runtime),
        manifests.secret(service, observed.token),
        manifests.kube_service(service),
        manifests.disruption_budget(service, num_unplaced),
        pods,
    )


def taken_names(
    service: InferenceService, wanted: tuple[Object, ...], observed: Observed
) -> dict[str, Object]:
    """Objects of others that have our children's names, by kind; they are never overwritten."""
    found = {kind: observed.live.get(kind) for kind in (manifest["kind"] for manifest in wanted)}
    return {
        kind: live for kind, live in found.items() if live and not manifests.is_ours(service, live)
    }


def to_apply(wanted: tuple[Object, ...], observed: Observed) -> Iterator[Object]:
    for manifest in wanted:
        live = observed.live.get(manifest["kind"])
        if _in_sync(manifest, live, observed):
            continue
        if manifest["kind"] != "ConfigMap":
            yield manifest
        elif live is None or not _can_wait(manifest, live, observed):
            yield _conditional(manifest, live)


def _in_sync(manifest: Object, live: Object | None, observed: Observed) -> bool:
    if live is None:
        return False
    if next(drift.changes(manifest, live), None) is None:
        return True
    return observed.accepted.get(manifest["kind"]) == drift.acceptance(manifest, live)


def _can_wait(manifest: Object, live: Object, observed: Observed) -> bool:
    """True if only the tuner's memory changed, and was saved recently."""
    changed = set(drift.changes(manifest, live))
    return changed <= _MEMORY_ONLY and observed.unsaved_s < PAST_SAVE_SECONDS


def rollout_after(written: tuple[Object, ...], observed: Observed) -> Rollout:
    """The workload's own account, but of no spec that is only now being written. A spec that is
    put back is not new; a webhook may change each one that we write."""
    live = observed.workload
    held = live.get("spec") if live else None
    rollout, known = rollout_of(live), drift.manifest_hash(live)
    workloads = [manifest for manifest in written if manifest["kind"] in manifests.WORKLOADS]
    new = [made["spec"] for made in workloads if drift.manifest_hash(made) != known]
    is_new = any(any(drift.differences(spec, held)) for spec in new)
    return replace(rollout, observed=False) if is_new else rollout


def _conditional(manifest: Object, live: Object | None) -> Object:
    """Refused with 409 if somebody wrote since: two operators never both open an epoch."""
    if live is None:
        return manifest
    version = live["metadata"]["resourceVersion"]
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}


def restorations(
    wanted: tuple[Object, ...], observed: Observed, now: float
) -> Iterator[tuple[str, Notice]]:
    """By kind, an edit or deletion of a child by a person or another controller, and that it is
    undone. Reported once in ten minutes: a fight over a field would be an event in every pass."""
    when = int(now // _TOLD_AGAIN_S)
    for manifest in wanted:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        live = observed.live.get(kind)
        if live is None:
            if kind in observed.deleted:
                text = f"{kind} {name} was deleted: created again"
                yield kind, Notice(True, Reason.CHILD_RESTORED, text, f"{kind}/deleted/{when}")
        elif drift.manifest_hash(live) == drift.manifest_hash(manifest):
            edited = tuple(drift.differences(manifest, live))
            if edited and not _in_sync(manifest, live, observed):
                text = f"{kind} {name} was edited: put back {', '.join(edited[:8])}"
                key = f"{kind}/edited/{manifests.digest(edited)}/{when}"
                yield kind, Notice(True, Reason.CHILD_RESTORED, text, key)
