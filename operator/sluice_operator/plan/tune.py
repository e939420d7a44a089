"""Cap, epoch and replicas of one pass: what the tuner is asked, and what follows. Pure."""

from dataclasses import dataclass, replace
from statistics import median_high

from msgspec import structs
from sluice_core.engines import FOREIGN

from ..children import manifests, resources
from ..children.runtime import DecidedRuntime
from ..model.fit import UNREAD_CAP, ceiling_of, most_num_seqs
from ..reasons import Reason
from ..spec.kinds import MAX_BATCHED_TOKENS, MAX_NUM_SEQS
from ..spec.service import InferenceService, Spec
from ..status import events
from ..status.events import Notice
from ..tuner import (
    CapLimits,
    ChunkBudget,
    ChunkLimits,
    Decision,
    Observation,
    Targets,
    decide,
)
from ..tuner.constants import MIN_BUDGET
from . import rival
from .observed import Observed, configs, gone_views, pod_view


@dataclass(frozen=True, slots=True)
class Tuned:
    """The runtime after this pass, and how it came about."""

    runtime: DecidedRuntime
    decision: Decision | None
    notices: tuple[Notice, ...] = ()


def effective_ceiling(spec: Spec, observed: Observed) -> int:
    """The planned ceiling, or the median of the workers' ceilings if that is less. One worker on a
    smaller GPU must not lower the cap of all."""
    fits = observed.fit.status != "False"
    planned = ceiling_of(spec, observed.fit) if fits else None
    reported = [config.ceiling for config in configs(observed)]
    if planned is None and not reported:  # a cap that is in force is no first one
        cap = observed.runtime.cap if observed.runtime else None
        return max(UNREAD_CAP, cap or 0, spec.batching.initial_num_seqs or 0)
    # Any image may stand for the worker's, and report what it likes.
    bounds = [spec.batching.fixed_cap or MAX_NUM_SEQS]
    if planned is not None:
        bounds.append(planned)
    if reported:
        bounds.append(median_high(reported))
    return min(bounds)


def limits_of(spec: Spec, ceiling: int, *, has_rival: bool = False) -> CapLimits:
    behavior, fixed_cap = spec.scaling.behavior, spec.batching.fixed_cap
    return CapLimits(
        ceiling=ceiling,
        min_num_seqs=min(fixed_cap or spec.batching.min_num_seqs, ceiling),
        min_replicas=spec.scaling.min_replicas,
        max_replicas=spec.scaling.max_replicas,
        replicas_external=has_rival or spec.suspend or spec.replicas is not None,
        scale_up_window_s=float(behavior.scale_up.stabilization_window_s),
        scale_down_window_s=float(behavior.scale_down.stabilization_window_s),
        ceiling_by="User" if ceiling >= most_num_seqs(spec) else "VRAM",
        chunk=_chunk_limits(spec, ceiling),
        is_fixed=fixed_cap is not None,
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


def with_budget(service: InferenceService, budget: ChunkBudget | None) -> InferenceService:
    """The object as its pods see it: `Auto` is the budget that the tuner found."""
    batching = service.spec.batching
    if budget is None or batching.max_num_batched_tokens is not None:
        return service
    batching = structs.replace(batching, max_num_batched_tokens=budget.tokens)
    return replace(service, spec=structs.replace(service.spec, batching=batching))


def targets_of(spec: Spec) -> Targets:
    slo = spec.slo
    targets = slo.ttft_ms, slo.itl_ms, slo.e2e_ms
    return Targets(slo.percentile, *targets, slo.window_s, slo.told_overload, slo.mode)


def tune(spec: Spec, observed: Observed, ceiling: int, now: float) -> Tuned:
    limits = limits_of(spec, ceiling, has_rival=bool(observed.rival))
    runtime = observed.runtime or _unremembered(spec, observed)
    if spec.suspend:
        runtime = replace(runtime, replicas=0)
    elif observed.rival:  # one writer: whoever would undo our number
        runtime = replace(runtime, replicas=rival.replicas_of(observed.workload))
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
        targets=targets_of(spec),
        limits=limits,
        cap=cap,
        epoch=settled.runtime.epoch,
        replicas=settled.runtime.replicas,
        pods=(*(pod_view(observed, pod) for pod in observed.pods), *gone_views(observed)),
    )
    past, decision = decide(settled.runtime.past, observation)
    if decision.limited_by == "VRAM" and not (observed.fit.memory or configs(observed)):
        decision = replace(decision, limited_by=None)  # no memory is known yet
    after = _decided(limits, replace(settled.runtime, past=past), decision)
    told = events.decided(settled.runtime, after, decision)
    return Tuned(after, decision, (*settled.notices, *told))


def _unremembered(spec: Spec, observed: Observed) -> DecidedRuntime:
    """A new object, or one whose ConfigMap is gone or spoilt: its pods then report the state."""
    replicas = rival.replicas_of(observed.workload)
    running = [config.cap for config in configs(observed) if config.epoch]
    first = spec.batching.fixed_cap or spec.batching.initial_num_seqs
    cap = min(running) if running else first
    return DecidedRuntime(0, cap, replicas)


def _decided(limits: CapLimits, runtime: DecidedRuntime, decision: Decision) -> DecidedRuntime:
    """The decision as state: a change of the cap opens an epoch."""
    epoch = runtime.epoch + (decision.cap != runtime.cap)
    replicas = runtime.replicas if limits.replicas_external else decision.replicas
    return replace(runtime, epoch=epoch, cap=decision.cap, replicas=replicas)


def _settle(observed: Observed, runtime: DecidedRuntime) -> Tuned:
    """Moves that need no evidence: the first cap, and a newer epoch if pods are ahead."""
    ahead = max((config.epoch for config in configs(observed)), default=0)
    # The ConfigMap was lost or edited; pods refuse an older epoch, and another cap in the same one.
    if ahead > runtime.epoch or _is_refused(observed, runtime):
        notice = Notice(
            True,
            Reason.EPOCH_RECOVERED,
            f"epoch {ahead + 1}: pods were at {ahead}",
            f"epoch/{ahead}",
        )
        return Tuned(replace(runtime, epoch=ahead + 1), None, (notice,))
    return _adopt(observed, runtime) if runtime.cap is None else Tuned(runtime, None)


def _is_refused(observed: Observed, runtime: DecidedRuntime) -> bool:
    """True if a pod runs another cap in this very epoch."""
    return runtime.cap is not None and any(
        config.epoch == runtime.epoch and config.cap != min(runtime.cap, config.ceiling)
        for config in configs(observed)
    )


def _adopt(observed: Observed, runtime: DecidedRuntime) -> Tuned:
    """The first cap is the least that the pods predict from their start-up profiles."""
    predicted = [config.cap for config in configs(observed)]
    if not predicted:
        return Tuned(runtime, None)
    adopted = replace(runtime, cap=min(predicted), epoch=runtime.epoch + 1)
    message = f"epoch {adopted.epoch}: the cap starts at {adopted.cap}, predicted by the profile"
    return Tuned(
        adopted, None, (Notice(False, Reason.CAP_PREDICTED, message, f"epoch/{adopted.epoch}"),)
    )
