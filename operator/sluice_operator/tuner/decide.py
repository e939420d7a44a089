"""Combines evidence, model, demand and causes: rules of cap, replicas and budget."""

from operator import attrgetter
from typing import Any

import msgspec
from sluice_core.contract import Tick

from ..reasons import Reason
from .capacity import next_budget, proposed_chunk, read_load, remember_load
from .caps import CAP_RULES, CapCase, bound_to_end, raise_bound, remember_breach
from .conditions import (
    feasible,
    limited_by,
    metrics_available,
    requests_succeed,
    slo_met,
    told,
)
from .context import Context, build_context
from .demand import Demand
from .evidence import num_begun
from .replicas import (
    REPLICAS_RULES,
    ReplicasCase,
    measure_demand,
    record_scale,
    settle_scale,
    wishing,
)
from .types import Bound, CapChange, Condition, Decision, Move, Observation, Past, Targets, first

_TIMES = "time_s", "at_s", "settled_s", "targets_since_s", "scale_out_since_s", "scale_in_since_s"
"""The times of a past."""
_WELL = attrgetter("good", "smooth")
_ENDED = attrgetter("finished", "refused")
_DECIDED = attrgetter("ttft.n", "ttft.over")
_BREACHES = (
    Reason.INTER_TOKEN_LATENCY_BREACHED,
    Reason.RAISED_TOO_FAR,
    Reason.TOO_MANY_TO_END,
)
"""Reasons for which the cap that is lowered is remembered as breached. Gaps alone say nothing of a
cap while all pods start: they compile and capture graphs, and their step model is still to come."""


def decide(past: Past, observation: Observation) -> tuple[Past, Decision]:
    """The next cap and replicas, and why; the returned `Past` is the next call's `past`."""
    past = _with_targets(_until(observation.now, past), observation.targets, observation.now)
    past = settle_scale(past, observation)
    context = build_context(past, observation)
    bound = raise_bound(context)
    demand = measure_demand(context, bound)
    metrics, can_hold = metrics_available(context), feasible(context, demand)
    load = read_load(context, demand, can_hold)
    to_end = bound_to_end(context, bound, load.enough)
    conditions = metrics, can_hold
    cap = first(CAP_RULES, CapCase(context, observation.cap, *conditions, to_end, load))
    case = ReplicasCase(context, observation.replicas, *conditions, bound, demand, cap)
    replicas = first(REPLICAS_RULES, case)
    past = wishing(case, replicas)
    decision = _decision(context, demand, bound, cap, replicas, metrics, can_hold)
    return _remember(past, context, demand, decision), decision


def _done(move: Move, now: int, context: Context) -> int:
    """The value after `move`: Advisory mode only moves back within the limits."""
    is_done = context.seen.targets.mode == "Enforce" or move.reason == Reason.WITHIN_LIMITS
    return move.to if is_done else now


def _until(now: float, past: Past) -> Past:
    """The past with no time after `now`, in case the clock was set back. Otherwise all evidence
    would predate an edit, and a change would settle for hours."""

    def earlier(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {name: earlier(part, name) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [earlier(part) for part in value]
        return min(value, now) if name in _TIMES and value is not None else value

    return msgspec.convert(earlier(msgspec.to_builtins(past)), Past)


def _with_targets(past: Past, targets: Targets, now: float) -> Past:
    """Edited targets void what was counted and learnt against the old ones."""
    key = f"{targets.percentile}|{targets.ttft_ms}|{targets.itl_ms}|{targets.e2e_ms}"
    if past.targets == key:
        return past
    if not past.targets:
        return msgspec.structs.replace(past, targets=key)
    return msgspec.structs.replace(past, targets=key, targets_since_s=now, breached_caps=())


def _remember(past: Past, context: Context, demand: Demand, decision: Decision) -> Past:
    seen, cap, reason = context.seen, decision.cap, decision.cap_move.reason
    is_start = reason == Reason.INTER_TOKEN_LATENCY_BREACHED and all(
        pod.is_young for pod in context.acked
    )
    if cap < seen.cap and reason in _BREACHES and not is_start:
        kept = remember_breach(context).breached_caps
        past = msgspec.structs.replace(past, breached_caps=kept)
    if cap > seen.cap and reason == Reason.LOAD_NEEDS_CAP:
        past = msgspec.structs.replace(past, loaded_cap=remember_load(context, demand, cap))
    if cap != seen.cap:
        change = CapChange(seen.now, seen.cap, cap, seen.epoch + 1, reason)
        past = msgspec.structs.replace(past, last_change=change)
    if decision.replicas != seen.replicas:
        past = record_scale(past, context, demand, decision.replicas_move)
    budget, trial = next_budget(context, demand)
    return msgspec.structs.replace(past, chunk_budget=budget, chunk_trial=trial)


def _decision(
    context: Context,
    demand: Demand,
    bound: Bound,
    cap: Move,
    replicas: Move,
    metrics: Condition,
    can_hold: Condition,
) -> Decision:
    seen = context.seen
    ended, good, smooth = _quality(context)
    chunk = proposed_chunk(context, demand) if context.has_fixed_chunk else None
    return Decision(
        cap=_done(cap, seen.cap, context),
        replicas=_done(replicas, seen.replicas, context),
        cap_move=cap,
        replicas_move=replicas,
        cap_reason=cap.reason if cap.to != seen.cap else "",
        replicas_reason=replicas.reason if replicas.to != seen.replicas else "",
        cause=context.cause,
        verdicts=context.verdicts,
        slo_met=slo_met(context, demand, replicas),
        slo_feasible=told(can_hold),
        metrics=metrics,
        succeed=requests_succeed(context),
        failures=context.failures,
        predicted_cap=context.predicted_cap,
        limited_by=limited_by(context, bound),
        desired_replicas=demand.needed,
        pending_replicas=max(0, seen.replicas - context.fleet.num_ready),
        silent_pods=context.fleet.silent,
        noisy_pods=context.noisy,
        effective_batch=context.work.decodes,
        arrivals_per_s=demand.arrivals.per_s,
        good_share=good / ended if ended else None,
        smooth_share=smooth / ended if ended else None,
        proposed_chunk=chunk.tokens if chunk else None,
    )


def _quality(context: Context) -> tuple[int, int, int]:
    """Requests of the window: ended, good, smooth. Ended are those that finished, failed, were
    refused or stayed unserved past the target; a failed one may have been late before."""
    window = context.window
    good, smooth = window.total(_WELL)
    finished, refused = window.total(_ENDED)
    decided, over = window.total(_DECIDED)
    begun, _ = window.total(_begun)
    unserved = refused + context.failures.num
    return finished + max(unserved, min(decided - begun, over)), good, smooth


def _begun(tick: Tick) -> tuple[int, int]:
    return num_begun([tick]), 0
