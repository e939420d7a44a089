"""One pass as a value: (object, observed, now) -> what to write, send and report. Pure.

The order of `Plan.apply` is binding: the ConfigMap with cap and epoch comes first. So no pod ever
learns an epoch that would be lost with the operator.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..children import manifests
from ..children.runtime import DecidedRuntime
from ..cluster.observed import Object, Pod, Rollout, rollout_of
from ..reasons import Reason
from ..settings import Settings
from ..spec.service import KIND, InferenceService
from ..status import compose, events
from ..status.events import Notice
from .children import (
    children_of,
    num_unplaced_of,
    restorations,
    rollout_after,
    taken_names,
    to_apply,
)
from .observed import Observed, commit_of, configs, problems, serving, with_reports
from .patches import PodPatch, patches_of
from .tune import Tuned, effective_ceiling, tune, with_budget

_FORMER_S = 1.0
"""Seconds until the next check for children of a deleted object: not all of them are watched."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The order: apply the ConfigMap, send, report `decided`, apply the rest. Then report
    `restored` (by kind) where that changed anything, and `noticed`; write the status if it differs.
    `pods`: as reported, by uid."""

    apply: tuple[Object, ...]
    patches: tuple[PodPatch, ...]
    decided: tuple[Notice, ...]
    restored: Mapping[str, Notice]
    noticed: tuple[Notice, ...]
    status: dict[str, object]
    runtime: DecidedRuntime | None
    requeue_s: float
    pods: Mapping[str, Pod] = field(default_factory=dict)


def plan(service: InferenceService, observed: Observed, settings: Settings, now: float) -> Plan:
    """The plan of one pass over `service`."""
    observed = replace(observed, pods=tuple(with_reports(observed)))
    if _is_premature(observed) and not _has_pods(service, observed):
        return _plan_nothing(service, observed, settings, now)
    ceiling = effective_ceiling(service.spec, observed)
    tuned = tune(service.spec, observed, ceiling, now)
    withheld = _is_withheld(service, observed, settings)
    is_pending = observed.fit.status == "False" or withheld
    num_unplaced = num_unplaced_of(service, observed, tuned.runtime.replicas, now)
    wanted = children_of(
        service, observed, settings, tuned.runtime, num_unplaced, is_pending=is_pending
    )
    written = tuple(to_apply(wanted, observed))
    rollout = rollout_after(written, observed)
    report = _report(service, observed, tuned, ceiling, rollout, is_withheld=withheld)
    new_status = compose.build(report, observed.previous, now)
    taken = taken_names(service, wanted, observed)
    owner = manifests.owner_reference(KIND, service.name, service.uid)
    names = ", ".join(f"{kind} {live['metadata']['name']}" for kind, live in taken.items())
    if taken and all(manifests.is_of_former(owner, live) for live in taken.values()):
        waiting = compose.wait_for_deletion(new_status, observed.previous, names, now)
        return Plan((), (), (), {}, (), waiting, observed.runtime, _FORMER_S)
    if taken:
        message = f"{names}: there, and not of this InferenceService"
        failed = compose.fail(new_status, observed.previous, Reason.NAME_TAKEN, message, now)
        notices = tuple(events.transitions(observed.previous, failed))
        return Plan((), (), (), {}, notices, failed, observed.runtime, settings.resync_s)
    return Plan(
        apply=written,
        patches=tuple(patches_of(service.spec, observed, tuned.runtime)),
        decided=tuned.notices,
        restored=dict(restorations(wanted, observed, now)),
        noticed=tuple(_noticed(observed, new_status)),
        status=new_status,
        runtime=tuned.runtime,
        requeue_s=_requeue_s(observed, settings),
        pods={pod.uid: pod for pod in observed.pods},
    )


def _plan_nothing(
    service: InferenceService, observed: Observed, settings: Settings, now: float
) -> Plan:
    """No child is made: no pods are there, and the model does not fit, or is being read, or the
    API's keys are missing."""
    runtime = observed.runtime or DecidedRuntime(0, None, 0)
    rollout = rollout_of(observed.workload)
    report = _report(service, observed, Tuned(runtime, None), None, rollout)
    new_status = compose.build(report, observed.previous, now)
    notices = tuple(events.transitions(observed.previous, new_status))
    is_awaited = observed.fit.is_pending or observed.keys_problem
    again_s = settings.tick_s if is_awaited else settings.resync_s
    return Plan((), (), (), {}, notices, new_status, observed.runtime, again_s)


def _is_premature(observed: Observed) -> bool:
    """True if new pods could not start, as far as is known."""
    is_unknown = observed.fit.is_pending and not observed.pods
    return is_unknown or observed.fit.status == "False" or bool(observed.keys_problem)


def _has_pods(service: InferenceService, observed: Observed) -> bool:
    """True if there are pods of an older spec, which did fit."""
    live = observed.workload
    return live is not None and manifests.is_ours(service, live)


def _is_withheld(service: InferenceService, observed: Observed, settings: Settings) -> bool:
    """True if the workload stays as it is: the new spec's model is not known, or new pods would
    wait for the API's keys."""
    live = observed.workload
    if live is None:
        return False
    budget = observed.runtime.past.chunk_budget if observed.runtime else None
    wanted = with_budget(service, budget)
    if observed.keys_problem and not manifests.is_as_asked(wanted, settings, live):
        return True
    return observed.fit.is_pending and not manifests.is_of_model(service, live)


def _report(
    service: InferenceService,
    observed: Observed,
    tuned: Tuned,
    ceiling: int | None,
    rollout: Rollout,
    *,
    is_withheld: bool = False,
) -> compose.Report:
    return compose.Report(
        service=service,
        fit=observed.fit,
        commit=commit_of(observed),
        rollout=rollout,
        pods=observed.pods,
        runtime=tuned.runtime,
        desired=tuned.runtime.replicas,
        ceiling=ceiling,
        decision=tuned.decision,
        evidence=tuple(s.evidence for s in serving(observed) if s.evidence is not None),
        configs=tuple(configs(observed)),
        problems=tuple(problems(observed)),
        is_withheld=is_withheld,
        keys_problem=observed.keys_problem,
        failed=observed.failed,
        rival=observed.rival,
    )


def _noticed(observed: Observed, new_status: Object) -> Iterator[Notice]:
    """Events of pods and of conditions, each reason once."""
    of_pods = tuple(events.of_pods(observed.former, observed.pods))
    yield from of_pods
    told = {notice.reason for notice in of_pods}
    yield from events.transitions(observed.previous, new_status, told)


def _requeue_s(observed: Observed, settings: Settings) -> float:
    """Pods are read while they may have something to report, and the Secret of the keys while it is
    missing. Everything else wakes us by itself."""
    speaks = any(pod.serving or pod.unready_s for pod in observed.pods)
    return settings.tick_s if speaks or observed.keys_problem else settings.resync_s
