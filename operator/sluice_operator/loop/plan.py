"""One pass as a value: (object, observed, now) -> what to write, send and report. Pure.

The order of `Plan.apply` is binding: the ConfigMap with cap and epoch comes first. So no pod ever
learns an epoch that would be lost with the operator.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Any

from msgspec import structs
from sluice_core.contract import RuntimeConfig, RuntimePatch
from sluice_core.contract import Slo as WireSlo
from sluice_core.engines import FOREIGN

from ..children import drift, manifests, resources
from ..children.pod import grace_seconds
from ..children.runtime import Runtime
from ..cluster.observed import NODE_S, Object, Pod, Rollout, Trouble, rollout_of, unplaced
from ..model.fit import UNREAD_CAP, Fit, ceiling_of, loading_bytes, most_num_seqs
from ..pods.scrape import Scrape
from ..reasons import Reason
from ..settings import Settings
from ..spec.kinds import MAX_BATCHED_TOKENS, MAX_NUM_SEQS
from ..spec.service import InferenceService, Spec
from ..status import compose, events
from ..status.events import Notice
from ..tuner import (
    CapLimits,
    ChunkBudget,
    ChunkLimits,
    Decision,
    Observation,
    PodView,
    Targets,
    decide,
)
from ..tuner.constants import MIN_BUDGET
from . import rival

PAST_SAVE_SECONDS = 30.0
"""Seconds between saves of the tuner's memory alone: losing it costs caution, not correctness."""

_TOLD_AGAIN_S = 600.0
_ROOM_S = 60.0
"""Seconds in which the room of a stopped pod is taken: the scheduler retries after 10 s at most."""
_FORMER_S = 1.0
"""Seconds until the next check for children of a deleted object: not all of them are watched."""
_MEMORY_ONLY = {"data.past.json", f"metadata.annotations.{manifests.MANIFEST_ANNOTATION}"}


@dataclass(frozen=True, slots=True)
class Observed:
    """All that one pass knows. `live`: children by kind. `scrapes`: by pod uid, also of pods that
    are gone.

    `runtime`: from the ConfigMap, or the newer memory of this process; None at the start.
    `accepted`: by kind, `drift.acceptance` of our last write. `deleted`: kinds whose last child
    somebody deleted. `unsaved_s`: seconds since the runtime was last persisted. `failed`: why the
    newest failed pod failed. `keys_problem`: why the Secret of the API's keys is unusable, "" if it
    is usable. `former`: the pods of the last pass, by uid. `rival`: who keeps setting the
    Deployment's replicas, "" for nobody.
    """

    live: Mapping[str, Object]
    pods: tuple[Pod, ...]
    scrapes: Mapping[str, Scrape]
    fit: Fit
    token: str
    previous: Object
    runtime: Runtime | None
    accepted: Mapping[str, str]
    deleted: Collection[str]
    unsaved_s: float
    failed: Trouble | None = None
    keys_problem: str = ""
    former: Mapping[str, Pod] = field(default_factory=dict)
    rival: str = ""


@dataclass(frozen=True, slots=True)
class PodPatch:
    """A PATCH of one pod's runtime configuration."""

    pod: Pod
    patch: RuntimePatch


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
    runtime: Runtime | None
    requeue_s: float
    pods: Mapping[str, Pod] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Tuned:
    """The runtime after this pass, and how it came about."""

    runtime: Runtime
    decision: Decision | None
    notices: tuple[Notice, ...] = ()


def plan(service: InferenceService, observed: Observed, settings: Settings, now: float) -> Plan:
    """The plan of one pass over `service`."""
    observed = replace(observed, pods=tuple(_told(observed)))
    if _is_premature(observed) and not _has_pods(service, observed):
        return _plan_nothing(service, observed, settings, now)
    ceiling = _effective_ceiling(service.spec, observed)
    tuned = _tune(service.spec, observed, ceiling, now)
    withheld = _is_withheld(service, observed, settings)
    is_pending = observed.fit.status == "False" or withheld
    num_unplaced = _num_unplaced(service, observed, tuned.runtime.replicas, now)
    wanted = _children(
        service, observed, settings, tuned.runtime, num_unplaced, is_pending=is_pending
    )
    written = tuple(_to_apply(wanted, observed))
    rollout = _rollout(written, observed)
    report = _report(service, observed, tuned, ceiling, rollout, is_withheld=withheld)
    new_status = compose.build(report, observed.previous, now)
    taken = _taken(service, wanted, observed)
    names = ", ".join(f"{kind} {live['metadata']['name']}" for kind, live in taken.items())
    if taken and all(manifests.is_of_former(service, live) for live in taken.values()):
        waiting = compose.wait_for_deletion(new_status, observed.previous, names, now)
        return Plan((), (), (), {}, (), waiting, observed.runtime, _FORMER_S)
    if taken:
        message = f"{names}: there, and not of this InferenceService"
        failed = compose.fail(new_status, observed.previous, Reason.NAME_TAKEN, message, now)
        notices = tuple(events.transitions(observed.previous, failed))
        return Plan((), (), (), {}, notices, failed, observed.runtime, settings.resync_s)
    return Plan(
        apply=written,
        patches=tuple(_patches(service.spec, observed, tuned.runtime)),
        decided=tuned.notices,
        restored=dict(_restorations(wanted, observed, now)),
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
    runtime = observed.runtime or Runtime(0, None, 0)
    rollout = rollout_of(observed.live.get("Deployment"))
    report = _report(service, observed, _Tuned(runtime, None), None, rollout)
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
    live = observed.live.get("Deployment")
    return live is not None and manifests.is_ours(service, live)


def _is_withheld(service: InferenceService, observed: Observed, settings: Settings) -> bool:
    """True if the Deployment stays as it is: the new spec's model is not known, or new pods would
    wait for the API's keys."""
    live = observed.live.get("Deployment")
    if live is None:
        return False
    budget = observed.runtime.past.chunk_budget if observed.runtime else None
    wanted = _with_budget(service, budget)
    if observed.keys_problem and not manifests.is_as_asked(wanted, settings, live):
        return True
    return observed.fit.is_pending and not manifests.is_of_model(service, live)


def _commit(observed: Observed) -> str:
    """The commit that pods are pinned to, or will be before there are any. Pods made while the hub
    was away have none, and fetch the revision as it is when they start."""
    if live := observed.live.get("Deployment"):
        return manifests.pinned_commit(live)
    return observed.fit.checkpoint.commit if observed.fit.checkpoint else ""


def _report(
    service: InferenceService,
    observed: Observed,
    tuned: _Tuned,
    ceiling: int | None,
    rollout: Rollout,
    *,
    is_withheld: bool = False,
) -> compose.Report:
    return compose.Report(
        service=service,
        fit=observed.fit,
        commit=_commit(observed),
        rollout=rollout,
        pods=observed.pods,
        runtime=tuned.runtime,
        desired=tuned.runtime.replicas,
        ceiling=ceiling,
        decision=tuned.decision,
        evidence=tuple(s.evidence for s in _serving(observed) if s.evidence is not None),
        configs=tuple(_configs(observed)),
        problems=tuple(_problems(observed)),
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


# Reports of the pods


def _scrape_of(observed: Observed, pod: Pod) -> Scrape:
    return observed.scrapes.get(pod.uid, Scrape())


def _told(observed: Observed) -> Iterator[Pod]:
    """The pods; those that run but are not ready include what they report about that."""
    for pod in observed.pods:
        scrape = _scrape_of(observed, pod)
        hung = scrape.config.hung if scrape.config and not scrape.problem else None
        if hung and (pod.trouble is None or pod.trouble.reason == Reason.NOT_READY):
            yield replace(pod, trouble=Trouble(Reason.HUNG, hung.reason, passes=True))
        elif pod.trouble and pod.trouble.reason == Reason.NOT_READY and scrape.problem:
            said = f"{pod.trouble.message}; its admin port: {scrape.problem}"
            yield replace(pod, trouble=replace(pod.trouble, message=said))
        else:
            yield pod


def _serving(observed: Observed) -> list[Scrape]:
    return [_scrape_of(observed, pod) for pod in observed.pods if pod.serving]


def _configs(observed: Observed) -> list[RuntimeConfig]:
    return [scrape.config for scrape in _serving(observed) if scrape.config is not None]


def _problems(observed: Observed) -> Iterator[str]:
    for pod in sorted(observed.pods, key=lambda pod: pod.name):
        problem = _scrape_of(observed, pod).problem
        if pod.serving and problem:
            yield f"pod {pod.name}: {problem}"


def _pod_view(observed: Observed, pod: Pod) -> PodView:
    scrape = _scrape_of(observed, pod)
    return PodView(
        name=pod.name,
        ready=pod.ready,
        terminating=pod.terminating,
        evidence=scrape.evidence,
        config=scrape.config,
        started_s=pod.started_s or None,
        seen_s=scrape.seen_s,
    )


def _gone_views(observed: Observed) -> Iterator[PodView]:
    """Pods that are gone: what they served belongs to the promise."""
    there = {pod.uid for pod in observed.pods}
    for uid, scrape in observed.scrapes.items():
        if uid not in there:
            yield PodView(uid, False, True, scrape.evidence, None, None, scrape.seen_s)


# Cap, epoch and replicas


def _effective_ceiling(spec: Spec, observed: Observed) -> int:
    """The planned ceiling, or the median of the workers' ceilings if that is less. One worker on a
    smaller GPU must not lower the cap of all."""
    fits = observed.fit.status != "False"
    planned = ceiling_of(spec, observed.fit) if fits else None
    reported = [config.ceiling for config in _configs(observed)]
    if planned is None and not reported:  # a cap that is in force is no first one
        cap = observed.runtime.cap if observed.runtime else None
        return max(UNREAD_CAP, cap or 0, spec.batching.initial_num_seqs or 0)
    bounds = [MAX_NUM_SEQS]  # any image may stand for the worker's, and report what it likes
    if planned is not None:
        bounds.append(planned)
    if reported:
        bounds.append(median_high(reported))
    return min(bounds)


def _limits(spec: Spec, ceiling: int, *, has_rival: bool = False) -> CapLimits:
    behavior = spec.scaling.behavior
    return CapLimits(
        ceiling=ceiling,
        min_num_seqs=min(spec.batching.min_num_seqs, ceiling),
        min_replicas=spec.scaling.min_replicas,
        max_replicas=spec.scaling.max_replicas,
        replicas_external=has_rival or spec.replicas is not None,
        scale_up_window_s=float(behavior.scale_up.stabilization_window_s),
        scale_down_window_s=float(behavior.scale_down.stabilization_window_s),
        ceiling_by="User" if ceiling >= most_num_seqs(spec) else "VRAM",
        chunk=_chunk_limits(spec, ceiling),
    )


def _chunk_limits(spec: Spec, ceiling: int) -> ChunkLimits | None:
    """None if the token budget of a step is not the tuner's to choose. A new one restarts pods, so
    it is only proposed where an edit would leave a replica without a successor."""
    engine, asked = FOREIGN.get(spec.engine.name), spec.batching.max_num_batched_tokens
    if engine is None or not engine.takes_budget or asked or spec.slo.itl_ms is None:
        return None
    hardware = [spec.hardware.accelerator, resources.limits(spec.hardware)]
    key = manifests.digest([spec.engine.name, spec.model.uri, spec.model.revision, hardware])
    least = max(MIN_BUDGET, ceiling)  # vLLM takes no budget under its capacity
    return ChunkLimits(least, MAX_BATCHED_TOKENS, spec.rollout == "Surge", key)


def _with_budget(service: InferenceService, budget: ChunkBudget | None) -> InferenceService:
    """The object as its pods see it: `Auto` is the budget that the tuner found."""
    batching = service.spec.batching
    if budget is None or batching.max_num_batched_tokens is not None:
        return service
    batching = structs.replace(batching, max_num_batched_tokens=budget.tokens)
    return replace(service, spec=structs.replace(service.spec, batching=batching))


def _targets(spec: Spec) -> Targets:
    slo = spec.slo
    targets = slo.ttft_ms, slo.itl_ms, slo.e2e_ms
    return Targets(slo.percentile, *targets, slo.window_s, slo.told_overload, slo.mode)


def _tune(spec: Spec, observed: Observed, ceiling: int, now: float) -> _Tuned:
    limits = _limits(spec, ceiling, has_rival=bool(observed.rival))
    runtime = observed.runtime or _unremembered(spec, observed)
    if observed.rival:  # one writer: whoever would undo our number
        runtime = replace(runtime, replicas=rival.replicas_of(observed.live.get("Deployment")))
    elif spec.replicas is not None:  # one writer: an outside owner
        runtime = replace(runtime, replicas=spec.replicas)
    elif observed.runtime is None or runtime.cap is None:  # else the tuner's, which reports it
        runtime = replace(runtime, replicas=limits.bound_replicas(runtime.replicas))
    settled = _settle(observed, runtime)
    cap = settled.runtime.cap
    if cap is None:
        return settled
    observation = Observation(
        now=now,
        targets=_targets(spec),
        limits=limits,
        cap=cap,
        epoch=settled.runtime.epoch,
        replicas=settled.runtime.replicas,
        pods=(*(_pod_view(observed, pod) for pod in observed.pods), *_gone_views(observed)),
    )
    past, decision = decide(settled.runtime.past, observation)
    if decision.limited_by == "VRAM" and not (observed.fit.memory or _configs(observed)):
        decision = replace(decision, limited_by=None)  # no memory is known yet
    after = _decided(limits, replace(settled.runtime, past=past), decision)
    told = events.decided(settled.runtime, after, decision)
    return _Tuned(after, decision, (*settled.notices, *told))


def _unremembered(spec: Spec, observed: Observed) -> Runtime:
    """A new object, or one whose ConfigMap is gone or spoilt: its pods then report the state."""
    replicas = rival.replicas_of(observed.live.get("Deployment"))
    running = [config.cap for config in _configs(observed) if config.epoch]
    cap = min(running) if running else spec.batching.initial_num_seqs
    return Runtime(0, cap, replicas)


def _decided(limits: CapLimits, runtime: Runtime, decision: Decision) -> Runtime:
    """The decision as state: a change of the cap opens an epoch."""
    epoch = runtime.epoch + (decision.cap != runtime.cap)
    replicas = runtime.replicas if limits.replicas_external else decision.replicas
    return replace(runtime, epoch=epoch, cap=decision.cap, replicas=replicas)


def _settle(observed: Observed, runtime: Runtime) -> _Tuned:
    """Moves that need no evidence: the first cap, and a newer epoch if pods are ahead."""
    ahead = max((config.epoch for config in _configs(observed)), default=0)
    # The ConfigMap was lost or edited; pods refuse an older epoch, and another cap in the same one.
    if ahead > runtime.epoch or _is_refused(observed, runtime):
        notice = Notice(
            True,
            Reason.EPOCH_RECOVERED,
            f"epoch {ahead + 1}: pods were at {ahead}",
            f"epoch/{ahead}",
        )
        return _Tuned(replace(runtime, epoch=ahead + 1), None, (notice,))
    return _adopt(observed, runtime) if runtime.cap is None else _Tuned(runtime, None)


def _is_refused(observed: Observed, runtime: Runtime) -> bool:
    """True if a pod runs another cap in this very epoch."""
    return runtime.cap is not None and any(
        config.epoch == runtime.epoch and config.cap != min(runtime.cap, config.ceiling)
        for config in _configs(observed)
    )


def _adopt(observed: Observed, runtime: Runtime) -> _Tuned:
    """The first cap is the least that the pods predict from their start-up profiles."""
    predicted = [config.cap for config in _configs(observed)]
    if not predicted:
        return _Tuned(runtime, None)
    adopted = replace(runtime, cap=min(predicted), epoch=runtime.epoch + 1)
    message = f"epoch {adopted.epoch}: the cap starts at {adopted.cap}, predicted by the profile"
    return _Tuned(
        adopted, None, (Notice(False, Reason.CAP_PREDICTED, message, f"epoch/{adopted.epoch}"),)
    )


# Children, events and patches


def _num_unplaced(service: InferenceService, observed: Observed, replicas: int, now: float) -> int:
    """The wanted pods that no node will take. A pod that is made as another begins to leave gets
    room only after the other's grace period."""
    patience_s = max(NODE_S, grace_seconds(service) + _ROOM_S)
    rollout = rollout_of(observed.live.get("Deployment"))
    return unplaced(observed.pods, rollout, replicas, now, patience_s)


def _children(
    service: InferenceService,
    observed: Observed,
    settings: Settings,
    runtime: Runtime,
    num_unplaced: int,
    *,
    is_pending: bool,
) -> tuple[Object, ...]:
    pods = manifests.deployment(
        _with_budget(service, runtime.past.chunk_budget),
        settings,
        ceiling=ceiling_of(service.spec, observed.fit),
        loading_bytes=loading_bytes(observed.fit),
        disk_bytes=observed.fit.disk_bytes,
        replicas=runtime.replicas,
        commit=observed.fit.checkpoint.commit if observed.fit.checkpoint else "",
        live=observed.live.get("Deployment"),
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


def _taken(
    service: InferenceService, wanted: tuple[Object, ...], observed: Observed
) -> dict[str, Object]:
    """Objects of others that have our children's names, by kind; they are never overwritten."""
    found = {kind: observed.live.get(kind) for kind in (manifest["kind"] for manifest in wanted)}
    return {
        kind: live for kind, live in found.items() if live and not manifests.is_ours(service, live)
    }


def _to_apply(wanted: tuple[Object, ...], observed: Observed) -> Iterator[Object]:
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


def _rollout(written: tuple[Object, ...], observed: Observed) -> Rollout:
    """The Deployment's own account, but of no spec that is only now being written. A spec that is
    put back is not new; a webhook may change each one that we write."""
    live = observed.live.get("Deployment")
    held = live.get("spec") if live else None
    rollout, known = rollout_of(live), drift.manifest_hash(live)
    deployments = [manifest for manifest in written if manifest["kind"] == "Deployment"]
    new = [made["spec"] for made in deployments if drift.manifest_hash(made) != known]
    is_new = any(any(drift.differences(spec, held)) for spec in new)
    return replace(rollout, observed=False) if is_new else rollout


def _conditional(manifest: Object, live: Object | None) -> Object:
    """Refused with 409 if somebody wrote since: two operators never both open an epoch."""
    if live is None:
        return manifest
    version = live["metadata"]["resourceVersion"]
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}


def _restorations(
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


def _patches(spec: Spec, observed: Observed, runtime: Runtime) -> Iterator[PodPatch]:
    """Patches for every pod that is not as it should be: late, new, or with older targets."""
    if runtime.cap is None:
        return
    slo = _wire_slo(spec)
    for pod in observed.pods:
        config = _scrape_of(observed, pod).config
        if config is None or pod.terminating:
            continue
        wanted: dict[str, Any] = {
            "epoch": runtime.epoch,
            "cap": min(runtime.cap, config.ceiling),
            "slo": slo,
            "overload": spec.slo.told_overload,
            "scheduling_policy": spec.scheduling_policy,
        }
        if config.hold_share is not None:
            wanted["hold_share"] = spec.slo.hold_share
        if any(getattr(config, name) != value for name, value in wanted.items()):
            yield PodPatch(pod, RuntimePatch(**wanted))


def _wire_slo(spec: Spec) -> WireSlo:
    return WireSlo(spec.slo.ttft_ms, spec.slo.itl_ms, spec.slo.e2e_ms)
