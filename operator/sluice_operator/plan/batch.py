"""One pass over a batch as a value: the Job to make or to steer, and the status. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice_core.contract import BatchReport

from ..children import job, manifests
from ..cluster.jobs import ShardEnd, job_of
from ..cluster.observed import Object, Pod
from ..model.fit import Fit, ceiling_of, loading_bytes
from ..reasons import Reason
from ..settings import Settings
from ..spec.batch import InferenceBatch
from ..status import batch as status
from ..status import events
from ..status.events import Notice

_WAITS = frozenset({Reason.AWAITING_DELETION, Reason.NO_SERVICE, Reason.HEADERS_UNAVAILABLE})
"""What no watch tells the end of."""


@dataclass(frozen=True, slots=True)
class BatchObserved:
    """All that one pass knows. `job`: whatever is there of its name; `fit`: of an engine of its
    own; `service`, `address`: the one that answers, None and "" if it is not there; `live`, `ends`:
    what pods told.
    """

    job: Object | None
    previous: Object
    fit: Fit | None = None
    service: Object | None = None
    address: str = ""
    pods: tuple[Pod, ...] = ()
    live: Mapping[int, BatchReport] | None = None
    ends: Sequence[ShardEnd] = ()


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The order: make the Job, or write `steer` over it; report; write the status."""

    status: dict[str, object]
    requeue_s: float
    make: Object | None = None
    steer: Object | None = None
    noticed: tuple[Notice, ...] = ()


def plan(
    batch: InferenceBatch, observed: BatchObserved, settings: Settings, now: float
) -> BatchPlan:
    """The plan of one pass over `batch`."""
    previous, live = observed.previous, observed.job
    if status.is_over(previous):  # also where its Job has been deleted since
        return BatchPlan({**previous, "observedGeneration": batch.generation}, settings.resync_s)
    is_ours = live is not None and manifests.is_child(batch.uid, job.labels(batch), live)
    refused = None if is_ours else _refusal(batch, observed)
    seen = status.BatchSeen(
        batch=batch,
        job=job_of(live) if live and is_ours else None,
        fit=observed.fit,
        refused=refused,
        pods=observed.pods,
        live=observed.live or {},
        ends=observed.ends,
    )
    made = status.build(seen, previous, now)
    is_waiting = refused and refused[0] in _WAITS
    return BatchPlan(
        status=made,
        requeue_s=settings.tick_s if observed.pods or is_waiting else settings.resync_s,
        make=None if is_ours or refused else _job(batch, observed, settings),
        steer=_steer(batch, live) if live and is_ours else None,
        noticed=tuple(events.transitions(previous, made)),
    )


def _refusal(batch: InferenceBatch, observed: BatchObserved) -> tuple[Reason, str] | None:
    """Why no Job is made now."""
    live, fit, ref = observed.job, observed.fit, batch.spec.service_ref
    if live is not None:
        name = f"Job {live['metadata']['name']}"
        if manifests.is_of_former(job.owner(batch), live):
            said = f"{name}: of a deleted object of this name"
            return Reason.AWAITING_DELETION, said
        return Reason.NAME_TAKEN, f"{name}: there, and not of this InferenceBatch"
    if ref and not (observed.service and observed.address):
        return Reason.NO_SERVICE, f"spec.serviceRef: there is no InferenceService {ref.name}"
    if fit and (fit.status == "False" or fit.is_pending):
        return fit.reason, fit.message
    if batch.is_queued and batch.spec.suspend:
        return Reason.SUSPENDED, "spec.suspend keeps it from being queued"
    return None


def _job(batch: InferenceBatch, observed: BatchObserved, settings: Settings) -> Object:
    fit, engine = observed.fit, batch.engine
    if fit is None or engine is None:
        return job.job(batch, settings, observed.address, _keys(observed.service))
    return job.job(
        batch,
        settings,
        "",
        "",
        ceiling_of(engine.spec, fit),
        loading_bytes(fit),
        fit.disk_bytes,
        fit.checkpoint.commit if fit.checkpoint else "",
    )


def _keys(service: Object | None) -> str:
    """The Secret with the keys of a service, "" if it asks for none."""
    ref = ((service or {}).get("spec") or {}).get("apiKeySecretRef") or {}
    return str(ref.get("name", ""))


def _steer(batch: InferenceBatch, live: Object) -> Object | None:
    """The fields of the Job that are not as the object says. All others cannot be changed."""
    held = live["spec"]
    late = {key: value for key, value in job.steering(batch).items() if held.get(key) != value}
    return {"spec": late} if late else None
