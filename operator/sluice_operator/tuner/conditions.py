"""Conditions for status: does the promise hold, can it hold, and are there metrics to tell."""

from dataclasses import replace

from ..reasons import Reason
from . import constants as k
from .capacity import proposed_chunk, running_budget
from .caps import blocked_from, sequences_in_time
from .context import Context, effective_cap
from .demand import Demand
from .types import Bound, Condition, LimitedBy, Move


def metrics_available(context: Context) -> Condition:
    """MetricsAvailable: enough pods report to decide."""
    fleet = context.fleet
    if not fleet.num_ready:
        return Condition(None, Reason.NO_READY_PODS, "no pod is ready yet")
    if not fleet.heard and not fleet.silent:
        return Condition(None, Reason.NO_EVIDENCE_YET, "no pod has closed its first tick yet")
    if not fleet.silent:
        return Condition(True, Reason.ALL_PODS_HEARD, f"all {fleet.num_ready} ready pods are heard")
    silent = ", ".join(fleet.silent)
    message = (
        f"{len(fleet.silent)} of {fleet.num_ready} ready pods gave no fresh evidence: {silent}"
    )
    if fleet.majority_silent:
        return Condition(False, Reason.MAJORITY_SILENT, message)
    return Condition(True, Reason.SOME_PODS_SILENT, message)


def feasible(context: Context, demand: Demand) -> Condition:
    """SLOFeasible: this hardware can hold the targets at all."""
    if context.failures.is_all:
        return _untold(context)
    if context.gaps_breached:
        return _inter_token_feasible(context)
    if context.verdict("interTokenLatency") == "Breach":
        if context.verdicts["interTokenLatency"].in_prefill:
            is_fixed = context.has_fixed_chunk
            return _prefill_interferes(context, demand) if is_fixed else _long_steps(context)
        far = context.verdicts["interTokenLatency"].epoch_far
        message = (
            f"{context.numbers('interTokenLatency')}; {far} of them under interference, "
            "which half the cap would not have held"
        )
        return Condition(True, Reason.INTERFERENCE, message)
    if (alone := _alone_too_late(context, demand)) is not None:
        return _untold(context) if context.failures.are_many else alone
    if not context.epoch:
        return Condition(None, Reason.NO_EVIDENCE, f"epoch {context.seen.epoch}: no evidence yet")
    return Condition(True, Reason.FEASIBLE, "no target is out of reach by the evidence")


def _untold(context: Context) -> Condition:
    """What failed may have been late before, and a faster device would not mend it."""
    message = f"{context.failures.sentence}, which tells nothing of this hardware's speed"
    return Condition(None, Reason.REQUESTS_FAIL, message)


def _alone_too_late(context: Context, demand: Demand) -> Condition | None:
    """The condition if one request alone takes longer than a target; None if none does."""
    # More pods help prefills that queue behind each other, not one that alone takes too long.
    enough_pods = demand.arrivals.is_known and demand.needed <= context.fleet.num_ready
    if (
        context.late_in_queue
        and context.cause == "prefill"
        and enough_pods
        and _late_alone(context, demand)
    ):
        message = (
            f"{context.numbers(context.late_in_queue)}; the misses' time went into prefill: "
            "shorter prompts, a faster device or a looser target are needed"
        )
        return Condition(False, Reason.PREFILL_EXCEEDS_TARGET, message)
    if context.verdict("endToEnd") == "Breach" and _one_ends_late(context):
        message = (
            f"{context.numbers('endToEnd')}; one request alone would take as long: shorter "
            "answers, a faster device or a looser target are needed"
        )
        return Condition(False, Reason.END_TO_END_INFEASIBLE, message)
    return None


def _prefill_interferes(context: Context, demand: Demand) -> Condition:
    """The target can hold with another budget. More pods and lower caps do not help the gaps, but
    first tokens may still need them."""
    budget, chunk = running_budget(context), proposed_chunk(context, demand)
    if chunk is None:
        need = f"set a spec.batching.maxNumBatchedTokens below {budget} (--max-num-batched-tokens)"
    elif chunk.tokens < budget:
        need = f"set spec.batching.maxNumBatchedTokens to {chunk.tokens}, now {budget}"
        need += " (--max-num-batched-tokens)"
        need += "; with less the arriving prompts would be late" * chunk.for_load
    else:
        need = "more pods, " * chunk.for_load
        need += "a looser target, shorter prompts or a faster device is needed"
        need += f": the arriving prompts need {chunk.tokens} tokens a step" * chunk.for_load
    judged = context.verdicts["interTokenLatency"]
    message = (
        f"{context.numbers('interTokenLatency')}; prefill interference: {judged.epoch_far} of them "
        f"beside another request's prompt, which no cap mends: {need}"
    )
    return Condition(True, Reason.PREFILL_INTERFERENCE, message)


def _long_steps(context: Context) -> Condition:
    judged = context.verdicts["interTokenLatency"]
    message = (
        f"{context.numbers('interTokenLatency')}; {judged.epoch_far} of them in steps that were "
        "long so that first tokens were in time, which no cap mends: more pods or a looser target "
        "do"
    )
    return Condition(True, Reason.LONG_STEPS, message)


def told(feasible: Condition) -> Condition:
    """`feasible` for the status: with the present budget the target does not hold."""
    needs_budget = feasible.reason == Reason.PREFILL_INTERFERENCE
    return replace(feasible, holds=False) if needs_budget else feasible


def _late_alone(context: Context, demand: Demand) -> bool:
    """True if more first tokens are late than can have met another prompt's prefill."""
    judged = context.verdicts.get("timeToFirstToken")
    if context.model is None or judged is None:
        return True
    prefill_s = context.model.prefill_s(context.work.prompt_tokens)
    busy = demand.arrivals.per_s * prefill_s / max(1, context.fleet.num_ready)
    return judged.epoch_over > busy * judged.epoch_n


def _one_ends_late(context: Context) -> bool:
    """True if the step model predicts that the mean request, alone on a pod, ends too late."""
    work, due_ms = context.work, context.seen.targets.e2e_ms
    if context.model is None or due_ms is None or not work.lengths_known:
        return False
    return context.model.request_ms(1, work.output_steps, work.prompt_tokens) > due_ms


def _inter_token_feasible(context: Context) -> Condition:
    """Infeasible when measured at the minimum, or when not even the minimum is predicted to hold.

    Small pods with a CPU quota are always throttled somewhat; that alone says nothing.
    """
    seen, limits = context.seen, context.seen.limits
    minimum, smaller = limits.min_num_seqs, "lower cap"
    if limits.is_fixed:
        minimum, smaller = 1, "smaller batching.static.size"
    target_ms = context.verdicts["interTokenLatency"].target_ms
    tail_ms = context.model.tail_ms(minimum) if context.model else None
    beyond = tail_ms is not None and tail_ms > target_ms
    if not beyond and effective_cap(seen.cap, context.recent_ticks) > minimum:
        return Condition(True, Reason.FEASIBLE, f"a {smaller} can hold the inter-token target")
    predicted = f"; {minimum} alone is predicted at {tail_ms:.1f} ms" if tail_ms else ""
    message = f"{context.numbers('interTokenLatency')} at cap {seen.cap}{predicted}"
    throttled = context.work.throttled_share
    if throttled >= k.THROTTLED_INFEASIBLE:
        need = f"; throttled {throttled:.0%} of the busy time: a higher CPU limit is needed"
        return Condition(False, Reason.CPU_THROTTLED, message + need)
    need = "; a faster device, a smaller model or dtype, or a looser target is needed"
    return Condition(False, Reason.INTER_TOKEN_LATENCY_INFEASIBLE, message + need)


def requests_succeed(context: Context) -> Condition:
    """RequestsSucceed: hardly a request fails."""
    failures = context.failures
    if not failures.ended:
        return Condition(None, Reason.NO_TRAFFIC, "no request has ended in the window")
    message = f"{failures.sentence} in {context.seen.targets.window_s:g} s"
    if failures.are_many:
        return Condition(False, Reason.REQUESTS_FAIL, message)
    return Condition(True, Reason.REQUESTS_SUCCEED, message)


def slo_met(context: Context, demand: Demand, replicas: Move) -> Condition:
    """SLOMet: every target holds over its window, among all arrivals."""
    judged = [verdict for verdict in context.verdicts.values() if verdict.n]
    if not context.verdicts:
        return Condition(None, Reason.NO_TARGETS, "spec.slo has no target")
    if not judged and not context.failures.num:
        return _unjudged(context)
    missed = [verdict for verdict in judged if verdict.over > verdict.allowed_share * verdict.n]
    fails = _fails_the_promise(context)
    parts = [
        f"{v.target} over {v.target_ms:g} ms in {v.over} of {v.n} ({v.over_share:.2%})"
        for v in missed or judged
    ]
    if context.failures.num:
        parts.insert(0 if fails else len(parts), context.failures.sentence)
    allowed = (
        f"allowed {context.seen.targets.allowed_share:.2%} of {context.seen.targets.window_s:g} s"
    )
    message = f"{'; '.join(parts)}; {allowed}"
    if fails:
        return Condition(False, Reason.REQUESTS_FAIL, message)
    if not missed:
        return Condition(True, Reason.TARGETS_HOLD, message)
    if replicas.reason == Reason.AT_MAX_REPLICAS or _at_the_maximum(context, demand):
        return Condition(False, Reason.AT_MAX_REPLICAS, f"{message}; {replicas.message}")
    return Condition(False, Reason.TARGET_MISSED, message)


def _unjudged(context: Context) -> Condition:
    if context.fleet.majority_silent:
        return Condition(None, Reason.MAJORITY_SILENT, metrics_available(context).message)
    return Condition(None, Reason.NO_TRAFFIC, "no traffic in the window")


def _fails_the_promise(context: Context) -> bool:
    """True if the requests that failed break the promise: alone, or because a target that holds
    for the others does not with them. Gaps are not requests, so no failure adds to theirs."""
    failures, allowed = context.failures, context.seen.targets.allowed_share
    held = [
        verdict.over_share
        for name, verdict in context.verdicts.items()
        if name != "interTokenLatency" and verdict.over_share <= allowed
    ]
    return failures.share + max(held, default=0.0) > allowed if failures.num else False


def _at_the_maximum(context: Context, demand: Demand) -> bool:
    limits = context.seen.limits
    full = context.seen.replicas >= limits.max_replicas and not limits.replicas_external
    return full and demand.needed > limits.max_replicas


def limited_by(context: Context, bound: Bound) -> LimitedBy | None:
    """The reason why the cap cannot grow; None without one. `bound`: how far it can be raised."""
    cap, limits = context.seen.cap, context.seen.limits
    blocked = blocked_from(context)
    if context.gaps_breached and cap <= limits.min_num_seqs and not limits.is_fixed:
        return "Minimum"
    if cap >= limits.ceiling:
        return limits.ceiling_by
    if bound.reason == Reason.KV_MEMORY and not bound.is_worth_it(cap):
        return "VRAM"
    if context.predicted_cap is not None and context.predicted_cap <= cap:
        return "InterTokenLatency"
    if sequences_in_time(context) < cap + 1:
        return "EndToEnd"
    breaks: LimitedBy = "EndToEnd" if context.seen.targets.itl_ms is None else "InterTokenLatency"
    return breaks if blocked is not None and blocked <= cap + 1 else None
