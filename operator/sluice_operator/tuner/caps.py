"""The cap: its rules in order (`CAP_RULES`), how far a raise goes, and which caps breached."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, inf, sqrt

import msgspec
from sluice_core import sketch
from sluice_core.contract import TICK_SECONDS
from sluice_core.latency import STEPS_TO_END, TARGET_MARGIN, StepTime
from sluice_core.model.sizing import carried_sequences

from ..reasons import Reason
from . import constants as k
from . import interference
from .context import Case, Context, effective_cap, nothing_to_go_by
from .demand import OfferedLoad
from .evidence import cap_is_used, median_kv_tokens
from .tick_sums import series_of
from .types import (
    Bound,
    BreachedCap,
    Cause,
    LoadedCap,
    Move,
    Past,
    Targets,
    first,
)
from .verdicts import READERS

GAPS = READERS["interTokenLatency"]


@dataclass(frozen=True)
class CapCase(Case):
    """`load`: the caps that the arrivals need."""

    load: OfferedLoad

    @cached_property
    def queue(self) -> str | None:
        """Why a queue for the cap justifies a raise, or None."""
        return _queue_for_more(self.context)


def within_limits(case: CapCase) -> Move | None:
    """Moves a cap that is outside its limits back, which needs no evidence."""
    limits = case.context.seen.limits
    within = limits.bound_cap(case.present)
    if within == case.present:
        return None
    message = f"the cap {case.present} is outside {limits.min_num_seqs}..{limits.ceiling}"
    return Move(within, Reason.WITHIN_LIMITS, message)


def batch_is_static(case: CapCase) -> Move | None:
    """Keeps the cap where it is the size of a static batch."""
    message = f"mode Static: the cap is the size of a batch, {case.present}"
    is_fixed = case.context.seen.limits.is_fixed
    return Move(case.present, Reason.STATIC_BATCH, message) if is_fixed else None


def change_is_new(case: CapCase) -> Move | None:
    """Keeps the cap until half of the pods have taken over its last change."""
    context, num = case.context, len(case.context.pods)
    if 2 * len(context.acked) >= num:
        return None
    message = f"epoch {context.seen.epoch} is acknowledged by {len(context.acked)} of {num} pods"
    return Move(case.present, Reason.AWAITING_ACKNOWLEDGEMENT, message)


def load_needs_cap(case: CapCase) -> Move | None:
    """Raises the cap to the least that serves the arrivals, where no more pods may come and no
    later rule raises it as far."""
    context, cap, least = case.context, case.present, case.load.raise_to
    ceiling, late = context.seen.limits.ceiling, context.late_in_queue
    room = min(ceiling, sequences_if_shared(context) or ceiling)
    # Each raise opens an epoch, so it goes at least this far, even if less would do.
    to = min(max(least, ceil(k.MIN_RAISE * cap)), _doubled(cap), room)
    if late is None or least <= cap or to <= max(cap, first(EVIDENCE_RULES, case).to):
        return None
    message = f"{context.numbers(late)}; below {least} arrivals wait for ever; cap {cap} -> {to}"
    return Move(to, Reason.LOAD_NEEDS_CAP, message)


def no_cap_holds(case: CapCase) -> Move | None:
    """Keeps the cap under broken gaps that no cap would hold."""
    if not case.context.gaps_breached or case.feasible.holds is not False:
        return None
    return Move(case.present, case.feasible.reason, case.feasible.message)


def gaps_breached(case: CapCase) -> Move | None:
    """Lowers the cap under broken gaps to the model's best, but not below what the load needs."""
    context, cap, keep = case.context, case.present, case.load.keep
    if not context.gaps_breached:
        return None
    minimum = context.seen.limits.min_num_seqs
    best, source = _best_below(context)
    if best < keep:
        best, source = keep, "the least that does what arrives"
        if best > k.LOWER * cap:
            message = f"{context.numbers('interTokenLatency')}; below {best} arrivals wait for ever"
            return Move(case.present, Reason.LOAD_NEEDS_CAP, message)
    lowered = max(minimum, min(cap - 1, best))
    if lowered == minimum > best:
        source = "the minimum"
    message = f"{context.numbers('interTokenLatency')}; cap {cap} -> {lowered}, {source}"
    if interference.mostly(context.recent_ticks):
        return Move(lowered, Reason.INTERFERENCE_LASTS, f"{message}; until it ends")
    return Move(lowered, Reason.INTER_TOKEN_LATENCY_BREACHED, message)


def _best_below(context: Context) -> tuple[int, str]:
    """The cap that should hold the gaps, by what was proven, by the model or by a step down; and
    which of them said so."""
    cap, predicted = context.seen.cap, context.predicted_cap
    base = effective_cap(cap, context.recent_ticks)
    best, source = floor(k.LOWER * base), f"{k.LOWER:g} of the {base} that ran"
    if predicted is not None and predicted < cap:
        best, source = predicted, "the model's best"
        if best <= 1 < floor(k.HALVE * base):
            best, source = floor(k.HALVE * base), f"half of the {base} that ran: the model sees one"
    proven = _proven_before(context)
    return (proven, "which had shown headroom") if best < proven else (best, source)


def _proven_before(context: Context) -> int:
    """The cap before this epoch's raise, if measured headroom caused that recently, or 0. It does
    not count if the targets were edited since."""
    last = context.past.last_change
    if last is None or last.epoch != context.seen.epoch or last.reason != Reason.HEADROOM:
        return 0
    if last.time_s < context.past.targets_since_s:
        return 0
    return last.from_cap if context.seen.now - last.time_s < k.REMEMBER_S else 0


def raised_too_far(case: CapCase) -> Move | None:
    """Takes a raise back if the gaps exceed the allowed share and the step model sees less room,
    too. Together the two show what gaps alone take minutes to show."""
    context, cap = case.context, case.present
    last, targets = context.past.last_change, context.seen.targets
    if last is None or last.epoch != context.seen.epoch or last.from_cap >= cap:
        return None
    if context.model is None or targets.itl_ms is None:
        return None
    judged = context.verdicts["interTokenLatency"]
    allowed = judged.allowed_share * judged.epoch_n
    if allowed < k.MIN_BEYOND or judged.epoch_over - judged.epoch_far <= allowed:
        return None
    busy = [(n, over) for n, over in series_of(context.epoch.parts, GAPS.seen) if n]
    num_over = sum(over > judged.allowed_share * n for n, over in busy)
    if num_over < max(k.STANDING_TICKS, k.TOO_FAR_SHARE * len(busy)):
        return None
    room = context.model.largest_batch(k.LATE_MARGIN * targets.itl_ms, cap)
    back = context.seen.limits.bound_cap(max(last.from_cap, room, case.load.keep))
    if back > k.SAME_CAP * cap:
        return None
    message = f"{context.numbers('interTokenLatency')}, and the step model has room for {room}; "
    return Move(back, Reason.RAISED_TOO_FAR, f"{message}cap {cap} -> {back}")


def too_many_to_end(case: CapCase) -> Move | None:
    """Lowers the cap to a batch that ends in time, if none does because so many run and fewer
    serve the arrivals too. Else the queue would lose what the batch gains."""
    context, cap = case.context, case.present
    ran, in_time = effective_cap(cap, context.recent_ticks), sequences_in_time(context)
    # A larger step over texts does hardly more in a second: pods are for more.
    enough = case.load.keep if context.work.is_encoding else max(case.load.keep, case.load.enough)
    if context.verdict("endToEnd") != "Breach" or not enough <= in_time < k.SAME_CAP * ran:
        return None
    lowered = context.seen.limits.bound_cap(floor(in_time))
    message = f"{context.numbers('endToEnd')}; of {lowered} at once each ends in time; "
    return Move(lowered, Reason.TOO_MANY_TO_END, f"{message}cap {cap} -> {lowered}")


def interference_may_last(case: CapCase) -> Move | None:
    """Keeps the cap while interference may still prove to be the pod's lasting speed."""
    context = case.context
    is_young = context.late_in_queue is None or len(context.epoch) < k.REGIME_WINDOW
    if context.verdict("interTokenLatency") != "Breach" or not is_young:
        return None
    return Move(case.present, case.feasible.reason, case.feasible.message)


def cap_is_not_the_cause(case: CapCase) -> Move | None:
    """Keeps the cap where late requests waited for memory, prefill, a start or something outside
    the engine."""
    late, why = case.context.late_in_queue, _OTHER_CAUSES.get(case.context.cause)
    if late is None or why is None:
        return None
    if case.context.cause == "outside" and case.context.is_cold:
        why = Reason.COLD_START, "the time went into a cold start"
    return Move(case.present, why[0], f"{case.context.numbers(late)}; {why[1]}")


_OTHER_CAUSES: dict[Cause, tuple[Reason, str]] = {
    "kv": (Reason.WAITING_FOR_KV, "requests wait for KV memory, not the cap"),
    "prefill": (Reason.PREFILL_BOUND, "the time went into prefill"),
    "outside": (
        Reason.OUTSIDE_ENGINE,
        "the time went by outside the engine: tokenising, HTTP, a busy CPU",
    ),
}


def late_for_cap(case: CapCase) -> Move | None:
    """Raises the cap where requests are late for it, if memory, gaps and the model leave room."""
    context, late, bound = case.context, case.context.late_in_queue, case.bound
    if late is None or context.cause != "cap":
        return None
    numbers = context.numbers(late)
    if not bound.is_worth_it(case.present):
        return Move(case.present, bound.reason, f"{numbers}; {bound.message}")
    if late == "timeToFirstToken":
        reason, waited = (
            Reason.FIRST_TOKEN_BREACHED,
            f"{context.misses_by['cap']} waited for the cap",
        )
    else:
        reason, waited = Reason.END_TO_END_BREACHED, f"{context.work.waiting_cap} wait for the cap"
    if _shows_headroom(context) and "interTokenLatency" in context.verdicts:
        return _raised(case, Reason.HEADROOM, f"{_proof(context)}; {numbers}; {waited}")
    return _raised(case, reason, f"{numbers}; {waited}")


def cap_is_unused(case: CapCase) -> Move | None:
    """Keeps a cap that nobody waits for and that few or none use: it proves nothing."""
    verdicts, epoch = case.context.verdicts, f"epoch {case.context.seen.epoch}"
    if verdicts and not any(verdict.n for verdict in verdicts.values()):
        return Move(case.present, Reason.NO_TRAFFIC, f"{epoch}: no traffic in the window")
    if case.queue or cap_is_used(case.context.recent_ticks):
        return None
    message = f"{epoch}: the cap {case.present} is not used, so it proves nothing"
    return Move(case.present, Reason.CAP_UNUSED, message)


def no_room(case: CapCase) -> Move | None:
    """Keeps the cap where memory, gaps or the model leave no room."""
    bound = case.bound
    return (
        None if bound.is_worth_it(case.present) else Move(case.present, bound.reason, bound.message)
    )


def headroom_is_shown(case: CapCase) -> Move | None:
    """Raises the cap once gaps at the full cap have shown room."""
    if not _shows_headroom(case.context):
        return None
    used = cap_is_used(case.context.recent_ticks)
    why = "the cap is used" if used else "requests wait for the cap"
    return _raised(case, Reason.HEADROOM, f"{_proof(case.context)}; {why}")


def queue_stands(case: CapCase) -> Move | None:
    """Raises the cap for a queue that will be late, or for any if the model sees far more room."""
    if case.context.model is None or not case.queue:
        return None
    return _raised(case, Reason.QUEUE_STANDS, f"{_proof(case.context)}; {case.queue}")


def evidence_is_missing(case: CapCase) -> Move:
    """Keeps the cap until gaps have shown room."""
    return Move(case.present, Reason.COLLECTING_EVIDENCE, _what_is_missing(case.context))


EVIDENCE_RULES = (
    no_cap_holds,
    gaps_breached,
    raised_too_far,
    too_many_to_end,
    interference_may_last,
    cap_is_not_the_cause,
    late_for_cap,
    cap_is_unused,
    no_room,
    headroom_is_shown,
    queue_stands,
    evidence_is_missing,
)
CAP_RULES = (
    within_limits, batch_is_static, nothing_to_go_by, change_is_new, load_needs_cap,
    *EVIDENCE_RULES,
)  # fmt: skip
"""The rules of the cap, in order."""


def _queue_for_more(context: Context) -> str | None:
    """Why a queue for the cap justifies a raise on a prediction alone, before measured gaps have
    shown room; None if it does not."""
    if _queue_stands(context):
        return "requests wait for the cap, and the last of them will be late"
    predicted, cap = context.predicted_cap, context.seen.cap
    if predicted is None or predicted < k.CLEAR_ROOM * cap:
        return None
    waits = any(tick.waiting.cap for ticks in context.newest(1) for tick in ticks)
    return f"requests wait for the cap, and the model sees {predicted}" if waits else None


def _queue_stands(context: Context) -> bool:
    """True if requests wait for the cap for so long, or are so many, that some will be late."""
    if _is_too_long(context):
        return True
    num = _standing_ticks(context.seen.targets)
    queued = [sum(tick.waiting.cap > 0 for tick in ticks) for ticks in context.newest(num)]
    return max(queued, default=0) >= k.USED_SHARE * num


def _is_too_long(context: Context) -> bool:
    """True if the last request that waits for the cap will be late at the pace of the step model.
    Late means past the first-token target, or without one past the end-to-end target."""
    targets, work, cap = context.seen.targets, context.work, context.seen.cap
    due_ms = targets.e2e_ms if targets.ttft_ms is None else targets.ttft_ms
    if context.model is None or due_ms is None or not work.lengths_known:
        return False
    queues = [tick.waiting.cap for ticks in context.newest(1) for tick in ticks]
    if len(queues) < len(context.acked):
        return False  # the others may have none
    turn_ms = context.model.request_ms(cap, work.output_steps, work.prompt_tokens) / cap
    return turn_ms * sum(queues) > due_ms * len(queues)


def _standing_ticks(targets: Targets) -> int:
    """Ticks that a queue must stand: as long as the first token may take, within bounds."""
    if targets.ttft_ms is None:
        return k.RECENT_TICKS
    due = ceil(targets.ttft_ms / 1000 / TICK_SECONDS)
    return min(max(due, k.STANDING_TICKS), k.RECENT_TICKS)


def _shows_headroom(context: Context) -> bool:
    """True if inter-token evidence shows headroom; first-token headroom never gates a raise."""
    judged = context.verdicts.get("interTokenLatency")
    if judged is None:
        return len(context.epoch) >= k.RECENT_TICKS
    return bool(judged.epoch_n) and not (judged.samples_needed or judged.cap_breached)


def _proof(context: Context) -> str:
    if "interTokenLatency" in context.verdicts:
        return context.numbers("interTokenLatency")
    return f"epoch {context.seen.epoch}: no inter-token target"


def _what_is_missing(context: Context) -> str:
    judged = context.verdicts.get("interTokenLatency")
    if judged is None:
        return f"epoch {context.seen.epoch}: {len(context.epoch)} of {k.RECENT_TICKS} ticks"
    rate = "" if judged.verifiable else ", which takes over an hour at this rate"
    return (
        f"{context.numbers('interTokenLatency')}; headroom needs {judged.samples_needed} more "
        f"samples at the cap{rate}"
    )


def _raised(case: CapCase, reason: Reason, why: str) -> Move:
    """The raise to the bound, as far as one goes, or to where the cap was before interference."""
    before = _before_interference(case.context)
    to = min(case.bound.cap, max(_farthest(case.context), before))
    change = f"cap {case.present} -> {to}" + ", as before the interference" * (to == before)
    return Move(to, reason, f"{why}; {change}")


def _before_interference(context: Context) -> int:
    """The cap before a lowering under interference that is now over, or 0; it was not wrong."""
    last = context.past.last_change
    if last is None or last.epoch != context.seen.epoch or last.reason != Reason.INTERFERENCE_LASTS:
        return 0
    # In lasting interference the worker fits its model to it, which then predicts less room.
    is_over = context.predicted_cap is not None and context.predicted_cap >= context.seen.cap
    return last.from_cap if is_over and not interference.mostly(context.recent_ticks) else 0


def _farthest(context: Context) -> int:
    """The largest cap of one raise: at least double, and by a step model of the pods' own steps
    under traffic a part of where that points. Gaps as a gate sees them give no such model, and
    steps of a throttled pod do not show what the quota costs a larger batch."""
    doubled, predicted = _doubled(context.seen.cap), context.predicted_cap
    is_throttled = context.work.throttled_share > k.THROTTLED_ADDITIVE
    if predicted is None or context.has_fixed_chunk or is_throttled:
        return doubled
    steps = min((sum(t.steps for t in pod.present) for pod in context.acked), default=0)
    return max(doubled, floor(k.SURE_PART * predicted)) if steps >= k.SURE_STEPS else doubled


def _doubled(cap: int) -> int:
    return max(cap + 1, floor(cap * k.MAX_RAISE))


def raise_bound(context: Context) -> Bound:
    """How far the cap may be raised: memory, evidence, the prediction, and earlier breaches."""
    cap, limits = context.seen.cap, context.seen.limits
    if not _inter_token_allows(context):
        message = f"{context.numbers('interTokenLatency')}: no room to raise the cap {cap}"
        return Bound(cap, Reason.INTER_TOKEN_LATENCY_AT_TARGET, message)
    bound = Bound(limits.ceiling, Reason.AT_CEILING, f"the ceiling is {limits.ceiling}")
    predicted = believed_cap(context)
    if predicted is not None and predicted < bound.cap:
        message = f"the step model predicts that {predicted} holds the inter-token target"
        bound = Bound(predicted, Reason.AT_PREDICTED_CAP, message)
    carried = sequences_if_shared(context)
    if carried is not None and carried < bound.cap:
        message = f"the KV memory carries {carried} sequences of the observed lengths"
        bound = Bound(carried, Reason.KV_MEMORY, message)
    blocked = blocked_from(context)
    if blocked is not None and blocked <= bound.cap:
        message = f"caps from {blocked} on breached a target and are not retried yet"
        bound = Bound(blocked - 1, Reason.CAP_REMEMBERED, message)
    return bound


def bound_to_end(context: Context, bound: Bound, enough: int) -> Bound:
    """`bound`, or as many sequences as end in time together, if those are `enough` for the load."""
    in_time = sequences_in_time(context)
    if in_time >= bound.cap or (in_time < enough and not context.work.is_encoding):
        return bound
    message = f"of more than {floor(in_time)} at once each would end too late"
    return Bound(floor(in_time), Reason.ENDS_AT_TARGET, message)


def sequences_in_memory(context: Context) -> int | None:
    """Sequences of the observed whole lengths that the KV memory of one pod carries with rare
    preemptions, as in status; None before any has finished.

    If outputs are alike and start at any time, a running sequence is shorter: half of its output on
    average. In a burst all reach their ends together. If lengths are exponential, the longest run
    most of the time, and their mean is that of whole lengths.
    """
    kv_tokens = median_kv_tokens(context.pods)
    if not kv_tokens or not context.work.lengths_known:
        return None
    work = context.work
    return max(1, carried_sequences(int(kv_tokens), work.total_tokens, work.total_sigma))


def sequences_if_shared(context: Context) -> int | None:
    """The same if what the prefix cache gave is one prefix for all, held once. It bounds raises
    only. If each request has its own prefix (turns of a chat), it is too high, and requests then
    wait for memory, not for the cap."""
    work, carried = context.work, sequences_in_memory(context)
    own = work.prompt_tokens + work.output_tokens
    shared = work.total_tokens - own
    if carried is None or shared <= k.SHARED * work.total_tokens:
        return carried
    spare = max(0.0, (median_kv_tokens(context.pods) or 0.0) - shared)
    return max(carried, carried_sequences(int(spare), own, work.total_sigma))


def sequences_in_time(context: Context) -> float:
    """Sequences of the mean lengths that end within their target when run together, by the step
    model. Infinite without a model or a target, or if not even one does."""
    due_ms, work = context.seen.targets.e2e_ms, context.work
    if context.model is None or due_ms is None or not work.lengths_known:
        return inf
    due_ms *= TARGET_MARGIN / (STEPS_TO_END if work.is_encoding else 1)
    most = context.model.most_within(due_ms, work.output_steps, work.prompt_tokens)
    return most if most >= 1 else inf


def believed_cap(context: Context) -> int | None:
    """The highest cap that the prediction allows. The margin is small if first tokens are late for
    want of a cap, or soon will be. From a cap with proven headroom, measured gaps may allow
    more."""
    target_ms, ceiling = context.seen.targets.itl_ms, context.seen.limits.ceiling
    if context.model is None or context.predicted_cap is None or target_ms is None:
        return context.predicted_cap
    is_late = context.late_in_queue is not None and context.cause == "cap"
    if not (is_late or _queue_stands(context)):
        return context.predicted_cap
    believed = context.model.largest_batch(k.LATE_MARGIN * target_ms, ceiling)
    if _shows_headroom(context):
        believed = max(believed, _projected_cap(context, context.model, target_ms))
    return min(max(context.predicted_cap, believed, _before_interference(context)), ceiling)


def _projected_cap(context: Context, model: StepTime, target_ms: float) -> int:
    """The largest cap at which the measured gaps, scaled by the model, would hold the target."""
    cap, gaps = context.seen.cap, context.epoch.sketch(GAPS.sketch)
    over = sketch.count_above(gaps, sketch.bucket_of(target_ms))
    share = k.PROJECTED_SHARE * context.seen.targets.allowed_share
    far = context.verdicts["interTokenLatency"].epoch_far
    allowed = share * sum(gaps.values()) - max(0, over - far)
    _, late = context.epoch.total(READERS["timeToFirstToken"].seen)
    added_at_most = min(allowed, k.STALLS_TO_LATE * late)
    for higher in range(min(_doubled(cap), context.seen.limits.ceiling), cap, -1):
        limit_ms = target_ms * model.full_ms(cap) / model.full_ms(higher)
        if sketch.count_above(gaps, sketch.bucket_of(limit_ms)) - over <= added_at_most:
            return higher
    return cap


def _inter_token_allows(context: Context) -> bool:
    """True if the gaps at the cap stay within the allowed share, as far as they can tell."""
    judged = context.verdicts.get("interTokenLatency")
    if judged is None:
        return True
    if judged.cap_breached:
        return False
    n, over = context.epoch.total(GAPS.proof)
    near = over - judged.far_at_cap
    return n * judged.allowed_share < 1 or near <= judged.allowed_share * n


def blocked_from(context: Context) -> int | None:
    """The smallest cap that counts as breached and must not be retried yet."""
    blocked = [
        max(1, floor(k.SAME_CAP * known.cap))
        for known in context.past.breached_caps
        if not is_forgotten(known, context)
        and not is_another_time(known, context, also_if_longer=True)
    ]
    return max(min(blocked), context.seen.limits.min_num_seqs + 1) if blocked else None


def is_forgotten(known: BreachedCap | LoadedCap, context: Context) -> bool:
    """True if it was learnt too long ago; each repetition is kept longer."""
    kept_s = k.REMEMBER_S * (1 << min(known.times, k.MAX_DOUBLINGS))
    return context.seen.now - known.time_s >= kept_s


def is_another_time(
    known: BreachedCap | LoadedCap, context: Context, *, also_if_longer: bool
) -> bool:
    """True if steps are faster or requests shorter than when it was learnt. `also_if_longer`: or
    longer; a cap for the load does not set it, as longer requests need that cap even more."""
    work = context.work
    chance = k.LENGTHS_DOUBT * work.total_sigma / sqrt(max(work.num_totals, 1))
    shift = known.mean_tokens - work.total_tokens
    if also_if_longer:
        shift = abs(shift)
    is_known = known.mean_tokens > 0 and work.num_totals >= k.MIN_FINISHED
    if is_known and shift > k.LENGTHS_SHIFTED * known.mean_tokens + chance:
        return True
    if context.model is None:
        return False
    return context.model.fitted_tail_ms(known.cap) < (1 - k.STEPS_SHIFTED) * known.tail_ms


def remember_breach(context: Context) -> Past:
    """The past, including the concurrency that just breached; each repetition is kept longer."""
    cap = effective_cap(context.seen.cap, context.recent_ticks)
    same = [known for known in context.past.breached_caps if _is_same(known.cap, cap)]
    others = [known for known in context.past.breached_caps if known not in same]
    times = min(max((known.times + 1 for known in same), default=0), k.MAX_DOUBLINGS)
    tail_ms = context.model.fitted_tail_ms(cap) if context.model else 0.0
    kept = (*others, BreachedCap(cap, context.seen.now, times, context.work.total_tokens, tail_ms))
    return msgspec.structs.replace(context.past, breached_caps=kept[-k.REMEMBERED_CAPS :])


def _is_same(one: int, other: int) -> bool:
    return min(one, other) >= k.SAME_CAP * max(one, other)
