"""The decision on replicas: its rules in order (`REPLICAS_RULES`), and what they rest on."""

from dataclasses import dataclass
from functools import cached_property
from math import inf

import msgspec
from sluice_core.contract import TICK_SECONDS, TargetName

from ..reasons import Reason
from . import constants as k
from .capacity import pod_capacity
from .context import Case, Context, nothing_to_go_by
from .demand import Arrivals, Backlog, Capacity, Demand, plan_demand, read_arrivals
from .evidence import is_filled, recent
from .types import Bound, Move, Observation, Past, ReplicaChange
from .verdicts import READERS


def measure_demand(context: Context, bound: Bound) -> Demand:
    """Demand of the arrivals at the concurrency that a pod can reach; `bound`: of its cap."""
    fleet, seen = context.fleet, context.seen
    # A pod that is too new to be heard has taken nothing yet.
    speaking = len(fleet.heard) + len(fleet.silent)
    heard_share = len(fleet.heard) / speaking if speaking else 1.0
    sources = tuple(pod for pod in fleet.heard + fleet.leaving if pod.ticks)
    arrivals = read_arrivals(sources, seen.now, heard_share or 1.0)
    capacity = pod_capacity(context, bound)
    serving = seen.replicas - _never_came(context)
    return plan_demand(
        arrivals, capacity, _queue(context, capacity), serving, seen.limits.min_replicas
    )


def _queue(context: Context, capacity: Capacity | None) -> Backlog:
    targets = context.seen.targets
    wait_s, prefill_s = inf, 0.0
    if targets.ttft_ms is not None:
        step_s = 0.0
        if context.model and capacity:
            prefill_s = context.model.prefill_s(context.work.prompt_tokens)
            step_s = context.model.mean_ms(capacity.concurrency, 0) / 1000
        wait_s = max(0.0, targets.ttft_ms / 1000 - prefill_s - step_s)
    # The spread of prompts is not reported; whole lengths spread at least as far.
    spread = (context.work.total_sigma / max(context.work.prompt_tokens, 1.0)) ** 2
    # A queue that drains before a new pod is ready needs none.
    drain_s = max(targets.window_s, min(_cold_start_s(context.past), k.MAX_DRAIN_S))
    return Backlog(
        wait_s,
        targets.allowed_share,
        drain_s,
        _backlog(context),
        prefill_s,
        spread,
        context.by_deadline,
    )


def _cold_start_s(past: Past) -> float:
    return past.cold_start_s or k.DEFAULT_COLD_START_S


def _is_overdue(context: Context) -> bool:
    """True if the pods of the last scale-out should have been ready long ago."""
    last = context.past.last_scale
    if last is None or last.settled_s is not None or last.to_replicas < last.from_replicas:
        return False
    return context.seen.now - last.time_s >= _patience_s(context.past)


def _patience_s(past: Past) -> float:
    return max(k.SETTLE_COLD_STARTS * _cold_start_s(past), k.MAX_DRAIN_S)


def _never_came(context: Context) -> bool:
    """True if a pod of an overdue scale-out got a node long ago and was never heard. Another one
    may get a sound node. Pods that no node takes would only become more."""
    if not _is_overdue(context) or context.fleet.num_ready >= context.seen.replicas:
        return False
    until_s = context.seen.now - _patience_s(context.past)
    coming = [
        pod for pod in context.seen.pods if not (pod.ready or pod.terminating or pod.evidence)
    ]
    return any(pod.started_s is not None and pod.started_s < until_s for pod in coming)


def _has_substitute(past: Past) -> bool:
    """True if a pod was already requested in place of one that never came. A pod that loads for
    hours looks the same, so only one more is risked."""
    before = past.scale_history[-2:-1]
    return any(c.settled_s is None and c.to_replicas > c.from_replicas for c in before)


def _backlog(context: Context) -> int:
    """Requests that wait for want of pods. None do while a pod has much room: clients keep an old
    connection, or the queue is older than the pod."""
    return 0 if context.work.spare_pods else context.work.waiting_cap + context.work.waiting_kv


def _rate(demand: Demand) -> str:
    arrivals, capacity = demand.arrivals, demand.capacity
    burst = f", bursts of {arrivals.burst}" if arrivals.burst > 1 else ""
    # A pod's capacity moves as traffic ages: it is left out if nothing is compared with it.
    is_idle = arrivals.per_s < k.LEAST_RATE
    one = f"; one pod holds {capacity.per_s:.2f}/s" if capacity and not is_idle else ""
    each_other = "; prompts wait for each other's prefill" if demand.for_prefill else ""
    return f"{arrivals.per_s:.2f} arrivals/s{burst}{one}{each_other}"


def _wanted(case: "ReplicasCase") -> int:
    """Replicas that are wanted now; the present ones unless something presses for more."""
    context, demand, replicas = case.context, case.demand, case.present
    # With more pods each is throttled less.
    is_throttled = case.feasible.reason == Reason.CPU_THROTTLED
    if case.feasible.holds is False and context.gaps_breached and not is_throttled:
        return replicas
    is_late = context.late_in_queue is not None or context.verdict("endToEnd") == "Breach"
    is_late = is_late or case.feasible.reason == Reason.LONG_STEPS
    late = is_late and not (context.cause == "outside" and context.is_cold)
    if not (late or _overloaded(context, demand)) or _raises_first(context, case.bound):
        return replicas
    waits = late and context.cause in ("cap", "kv") and demand.arrivals.is_known
    if waits and case.cap.to <= context.seen.cap and _queue_grows(context):
        return max(demand.needed, replicas + 1)
    return demand.needed + _never_came(context)


def _raises_first(context: Context, bound: Bound) -> bool:
    """True if a higher cap is tried before a new pod: without a model nobody knows its effect."""
    waits_for_cap = context.cause in ("cap", "none")
    return context.model is None and waits_for_cap and bound.cap > context.seen.cap


def _overloaded(context: Context, demand: Demand) -> bool:
    """True if more arrives than the pods can serve, and a queue has stood for ten seconds."""
    if demand.capacity is None:
        return False
    spans = [pod.ticks[-k.STALE_TICKS :] for pod in context.pods]
    queued = any(all(t.waiting.total for t in span) for span in spans)
    serving = context.seen.replicas - _never_came(context)
    return queued and demand.arrivals.per_s > serving * demand.capacity.per_s


def _queue_grows(context: Context) -> bool:
    """True if the queue grew, or was full and the rest refused, while every pod was full. No pod
    may be on its way."""
    num = int(k.GROWING_QUEUE_S / TICK_SECONDS)
    if not context.pods or context.fleet.num_ready < context.seen.replicas - _never_came(context):
        return False
    if any(len(pod.ticks) < num for pod in context.pods):
        return False
    spans = [pod.ticks[-num:] for pod in context.pods]
    full = all(is_filled(tick) for span in spans for tick in span)
    before = sum(span[0].waiting.total for span in spans)
    after = sum(span[-1].waiting.total + sum(tick.refused for tick in span) for span in spans)
    return full and after > before * k.LOAD_ROSE and after > 0


def _last_change_settles(context: Context, arrivals: Arrivals) -> str:
    """Why a second scale-out must wait, or ''. Arrivals that rose by a fifth do not wait."""
    last = context.past.last_scale
    if last is None or last.to_replicas < last.from_replicas:
        return ""
    if arrivals.per_s > k.LOAD_ROSE * last.arrivals_per_s:
        return ""
    if last.settled_s is None:
        return "the pods of the last scale-out are not ready yet"
    left_s = last.settled_s + last.drain_s - context.seen.now
    return f"the backlog drains for {left_s:.0f} s more" if left_s > 0 else ""


def _is_replaced(context: Context, demand: Demand) -> str:
    """Why lateness is not for want of pods, or '': one was replaced (a rollout, a lost node), and
    those requested can serve the arrivals. Its successor is not ready, or drains the backlog."""
    fleet, capacity, replicas = context.fleet, demand.capacity, context.seen.replicas
    if capacity is None or demand.arrivals.per_s > replicas * capacity.per_s:
        return ""
    last = context.past.last_scale
    raised_s = last.time_s if last and last.to_replicas > last.from_replicas else -inf
    left = any(pod.ticks and pod.end_s(pod.ticks[-1]) > raised_s for pod in fleet.leaving)
    young = any(pod.is_young for pod in fleet.heard)
    if not left or not (young or len(fleet.heard) < replicas):
        return ""
    return f"a pod was replaced, and {replicas} can do what arrives"


def _may_shrink(context: Context, demand: Demand) -> bool:
    """True if fewer replicas suffice with margin, hold what runs and are ready, and nothing waits.
    No pod may be on its way: it would be stopped before it has served."""
    fewer = demand.needed_with_margin
    if fewer >= context.seen.replicas or _backlog(context) or context.fleet.num_ready < fewer:
        return False
    if _running(context) > _fewer(context, demand) * _room(context, demand):
        return False
    last = context.past.last_scale
    is_coming = last and last.settled_s is None and last.to_replicas >= last.from_replicas
    return not is_coming or _is_overdue(context)


def _fewer(context: Context, demand: Demand) -> int:
    """The replicas after scaling in: at least half of them while anything arrives or runs."""
    is_idle = not (demand.arrivals.mean_per_s or _running(context) or context.fleet.silent)
    half = 0 if is_idle else -(-context.seen.replicas // 2)
    return max(demand.needed_with_margin, context.seen.limits.min_replicas, half)


def _running(context: Context) -> int:
    """Sequences on all heard pods: with long requests, arrivals may have ceased long ago."""
    return sum(pod.present[-1].running for pod in context.fleet.heard if pod.present)


def _room(context: Context, demand: Demand) -> float:
    """Sequences that one pod can run at once."""
    return max(context.seen.cap, demand.capacity.concurrency if demand.capacity else 0)


@dataclass(frozen=True)
class ReplicasCase(Case):
    """`cap`: its move."""

    demand: Demand
    cap: Move

    @cached_property
    def more(self) -> int:
        """The replicas that are wanted, if more than now; else 0."""
        wanted = _wanted(self)
        if self.is_substitute:
            wanted = min(wanted, self.present + 1)
        return wanted if wanted > self.present else 0

    @property
    def is_substitute(self) -> bool:
        """True if a pod is asked for in place of one that never came."""
        return _never_came(self.context) and not _has_substitute(self.context.past)

    @cached_property
    def fewer(self) -> bool:
        """True if fewer replicas would do."""
        return _may_shrink(self.context, self.demand)

    @property
    def least(self) -> int:
        """The most that any pass since fewer would do has left, as of an HPA."""
        least = max(self.context.past.scale_in_to, _fewer(self.context, self.demand))
        return min(least, self.present)

    @property
    def need(self) -> str:
        """What the arrivals need."""
        return f"{_rate(self.demand)} needs {self.more or self.demand.needed}"

    @property
    def fits(self) -> str:
        """What they fit into."""
        return f"{_rate(self.demand)} fits {self.demand.needed_with_margin} with margin"

    def waited_s(self, since_s: float | None) -> float:
        """Seconds since then, or 0."""
        return 0.0 if since_s is None else self.context.seen.now - since_s


def replicas_are_given(case: ReplicasCase) -> Move | None:
    """Leaves the replicas to an outside owner, or moves them back within their limits."""
    limits = case.context.seen.limits
    if limits.replicas_external:
        message = "the replicas have an outside owner"
        return Move(case.present, Reason.REPLICAS_EXTERNAL, message)
    within = limits.bound_replicas(case.present)
    message = f"{case.present} replicas are outside {limits.min_replicas}..{limits.max_replicas}"
    return None if within == case.present else Move(within, Reason.WITHIN_LIMITS, message)


def at_the_maximum(case: ReplicasCase) -> Move | None:
    """Keeps the replicas where more are needed than the spec allows."""
    most = case.context.seen.limits.max_replicas
    if not case.more or case.present < most:
        return None
    message = f"{case.need}, and {most} is the maximum"
    return Move(case.present, Reason.AT_MAX_REPLICAS, message)


def more_for_too_short(case: ReplicasCase) -> Move | None:
    """Keeps the replicas until more were wanted for the whole window."""
    window_s = case.context.seen.limits.scale_up_window_s
    waited_s = case.waited_s(case.context.past.scale_out_since_s)
    if not case.more or waited_s >= window_s:
        return None
    message = f"{case.need}, for {waited_s:.0f} of {window_s:.0f} s"
    return Move(case.present, Reason.SCALE_UP_WINDOW, message)


def pods_are_coming(case: ReplicasCase) -> Move | None:
    """Keeps the replicas while the last change settles, or a pod is replaced and enough serve."""
    if not case.more or case.is_substitute:
        return None
    settles = _last_change_settles(case.context, case.demand.arrivals)
    waits_for = settles or _is_replaced(case.context, case.demand)
    message = f"{case.need}; {waits_for}"
    return Move(case.present, Reason.AWAITING_REPLICAS, message) if waits_for else None


def more_are_needed(case: ReplicasCase) -> Move | None:
    """Adds the pods that the arrivals need, where requests are late or a queue stands and more
    arrives than the pods can serve."""
    if not case.more:
        return None
    to, cause = min(case.more, case.context.seen.limits.max_replicas), case.context.cause
    why = f"{cause} waits" if cause != "none" else "overload"
    return Move(to, Reason.SCALED_OUT, f"{case.need} ({why}); replicas {case.present} -> {to}")


def target_is_missed(case: ReplicasCase) -> Move | None:
    """Keeps pods that seem too many while first tokens or ends still come too late, unless no
    number of pods would hold the target."""
    newest = recent(case.context.pods)
    if not case.fewer or case.feasible.holds is False or not any(t.arrivals for t in newest):
        return None
    queued: tuple[TargetName, ...] = ("timeToFirstToken", "endToEnd")
    breached = (name for name in queued if case.context.verdict(name) == "Breach")
    missed = next((n for n in breached if any(READERS[n].seen(t)[1] for t in newest)), None)
    message = f"{case.need}; {missed} still comes too late"
    return Move(case.present, Reason.STEADY, message) if missed else None


def fewer_for_too_short(case: ReplicasCase) -> Move | None:
    """Keeps the replicas until fewer would have done for the whole window."""
    window_s = case.context.seen.limits.scale_down_window_s
    waited_s = case.waited_s(case.context.past.scale_in_since_s)
    if not case.fewer or waited_s >= window_s:
        return None
    # The status is written where its words change.
    message = f"{case.fits}, for {waited_s // 10 * 10:.0f} of {window_s:.0f} s"
    return Move(case.present, Reason.SCALE_DOWN_WINDOW, message)


def fewer_will_do(case: ReplicasCase) -> Move | None:
    """Removes pods down to the most that the window needed, and by half at most."""
    message = f"{case.fits}; replicas {case.present} -> {case.least}"
    return Move(case.least, Reason.SCALED_IN, message) if case.fewer else None


def replicas_fit(case: ReplicasCase) -> Move:
    """Keeps the replicas that the arrivals need."""
    return Move(case.present, Reason.STEADY, case.need)


REPLICAS_RULES = (
    replicas_are_given,
    nothing_to_go_by,
    at_the_maximum,
    more_for_too_short,
    pods_are_coming,
    more_are_needed,
    target_is_missed,
    fewer_for_too_short,
    fewer_will_do,
    replicas_fit,
)
"""The rules of the replicas, in order."""
_MORE = (
    Reason.AT_MAX_REPLICAS, Reason.SCALE_UP_WINDOW, Reason.AWAITING_REPLICAS, Reason.SCALED_OUT
)  # fmt: skip


def wishing(case: ReplicasCase, move: Move) -> Past:
    """The past with the time since when more or fewer replicas are wanted, as `move` says."""
    past, now = case.context.past, case.context.seen.now
    if move.reason in _MORE:
        return _wanting(past, now if past.scale_out_since_s is None else past.scale_out_since_s)
    if move.reason not in (Reason.SCALE_DOWN_WINDOW, Reason.SCALED_IN):
        return wanting_none(past)
    since_s = now if past.scale_in_since_s is None else past.scale_in_since_s
    # If nothing comes of it (Advisory), the window goes on, without its highest need so far.
    is_over = move.reason == Reason.SCALED_IN
    return _wanting(
        past, None, since_s, _fewer(case.context, case.demand) if is_over else case.least
    )


def wanting_none(past: Past) -> Past:
    """The past with no wish for more or fewer replicas."""
    return _wanting(past)


def _wanting(
    past: Past, out_s: float | None = None, in_s: float | None = None, in_to: int = 0
) -> Past:
    return msgspec.structs.replace(
        past, scale_out_since_s=out_s, scale_in_since_s=in_s, scale_in_to=in_to
    )


def record_scale(past: Past, context: Context, demand: Demand, move: Move) -> Past:
    """The past with this change of the replicas."""
    change = ReplicaChange(
        time_s=context.seen.now,
        from_replicas=context.seen.replicas,
        to_replicas=move.to,
        reason=move.reason,
        arrivals_per_s=max(demand.arrivals.per_s, demand.arrivals.newest_per_s),
        drain_s=min(_drain_after(past, context, demand, move.to), k.MAX_DRAIN_S),
    )
    history = (*past.scale_history, change)[-k.HISTORY :]
    return msgspec.structs.replace(wanting_none(past), scale_history=history)


def _drain_after(past: Past, context: Context, demand: Demand, replicas: int) -> float:
    """Seconds to drain today's queue, and what the cold start adds to it, at `replicas`."""
    capacity, per_s = demand.capacity, demand.arrivals.per_s
    if capacity is None or replicas < context.seen.replicas:
        return 0.0
    grows_per_s = max(0.0, per_s - context.seen.replicas * capacity.per_s)
    waiting = context.work.waiting_cap + context.work.waiting_kv + grows_per_s * _cold_start_s(past)
    spare_per_s = replicas * capacity.per_s - per_s
    return waiting / spare_per_s if spare_per_s > 0 else inf


def settle_scale(past: Past, seen: Observation) -> Past:
    """Note when the last change's pods were all ready, which measures the cold start. It counts
    from the start of the last of them on a node, which may have taken hours.

    If somebody else has since asked for other replicas, it is over and measures nothing.
    """
    last, now = past.last_scale, seen.now
    if last is None or last.settled_s is not None:
        return past
    ready = [pod for pod in seen.pods if pod.ready and not pod.terminating]
    num_ready = len(ready)
    grew, stands = last.to_replicas > last.from_replicas, last.to_replicas == seen.replicas
    missing = grew and num_ready < last.to_replicas or not grew and num_ready > last.to_replicas
    if missing and stands:
        return past
    settled = msgspec.structs.replace(last, settled_s=now)
    started_s = max([last.time_s, *(pod.started_s for pod in ready if pod.started_s is not None)])
    cold_s = max(0.0, now - started_s) if grew and stands else past.cold_start_s
    history = (*past.scale_history[:-1], settled)
    return msgspec.structs.replace(past, scale_history=history, cold_start_s=cold_s)
