"""The capacity of one pod, and the lowest cap that serves the arrivals.

Capacity comes from the step model, corrected by the measured speed of full pods. If no more pods
will come, the cap rises for the load at the expense of the gaps.

Some engines fix the token budget of a step at their start, so a new one restarts the pods. The
first is taken once it has settled (`ChunkTrial`), a better one at most once a day.
"""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from msgspec import structs
from sluice_core.contract import TICK_SECONDS
from sluice_core.latency import StepTime

from . import constants as k
from .caps import is_another_time, is_forgotten, sequences_in_memory, sequences_in_time
from .context import Context, effective_cap
from .demand import Capacity, Demand, OfferedLoad
from .evidence import recent
from .model import allowed_chunk, needed_chunk
from .types import Bound, ChunkBudget, ChunkLimits, ChunkTrial, Condition, LoadedCap, first


def pod_capacity(context: Context, bound: Bound) -> Capacity | None:
    """Capacity of one pod: from the step model if there is one, else observed (Little's law).

    `bound`: how far the cap can be raised.
    """
    if not context.work.lengths_known:
        return None
    if context.model is None:
        return _observed_capacity(context)
    concurrency = min(_reachable_concurrency(context, bound), sequences_in_time(context))
    return modelled_capacity(context, context.model, concurrency)


def modelled_capacity(context: Context, model: StepTime, concurrency: float) -> Capacity:
    """Capacity that the step model predicts for one pod with `concurrency` sequences."""
    service_ms = model.request_ms(
        concurrency, context.work.output_steps, context.work.prompt_tokens
    )
    service_s = max(service_ms / 1000, k.MIN_SERVICE_S)
    return Capacity(concurrency, service_s / context.calibration)


def _observed_capacity(context: Context) -> Capacity | None:
    ticks = recent(context.pods)
    finished_per_tick = sum(tick.finished for tick in ticks) / len(ticks) if ticks else 0.0
    running = sum(tick.running for tick in ticks) / len(ticks) if ticks else 0.0
    if not finished_per_tick or not running:
        return None
    service_s = running * TICK_SECONDS / finished_per_tick
    concurrency = in_memory(context, float(context.seen.cap))
    if context.cause == "kv":
        concurrency = min(concurrency, running)
    service_s = max(service_s, k.MIN_SERVICE_S)
    return Capacity(max(concurrency, 1.0), service_s, is_modelled=False)


def _reachable_concurrency(context: Context, bound: Bound) -> float:
    """The cap after possible raises or a lowering, at most what the KV memory holds."""
    cap, best = context.seen.cap, context.predicted_cap
    if context.gaps_breached and not context.seen.limits.is_fixed:
        reach = float(min(cap, best) if best else k.LOWER * cap)
    else:
        reach = float(max(cap, bound.cap))
    return max(1.0, in_memory(context, reach))


def in_memory(context: Context, reach: float) -> float:
    """`reach`, at most the number of sequences that the KV memory of one pod carries."""
    carried = sequences_in_memory(context)
    return reach if carried is None else min(reach, carried)


def read_load(context: Context, demand: Demand, feasible: Condition) -> OfferedLoad:
    """Asks nothing of the cap while pods may still be added, or if requests that wait too long are
    refused."""
    seen, limits, known = context.seen, context.seen.limits, context.past.loaded_cap
    are_all = limits.replicas_external or seen.replicas >= limits.max_replicas
    may_wait = seen.targets.ttft_ms is None and seen.targets.e2e_ms is None
    enough = _enough(context, demand)
    if may_wait or seen.targets.overload == "Shed" or not (are_all or feasible.holds is False):
        return OfferedLoad(enough=enough)
    is_starved = _is_starved(context, demand)
    waiting_per_s = context.work.waiting_cap / max(1, len(context.pods)) / seen.targets.window_s
    per_s = _of_one(context, demand.arrivals.mean_per_s) + waiting_per_s
    needed = _needed(context, per_s) if is_starved or known else 0
    keep = max(needed, _kept(known, context, demand)) if known else 0
    raise_to = needed if is_starved and _is_worth_it(context, needed) else 0
    return OfferedLoad(raise_to, keep if _is_worth_it(context, keep) else 0, enough)


def _is_worth_it(context: Context, cap: int) -> bool:
    """True if the mean gap at `cap` holds its target; checked only under an order by deadline.
    There only some first tokens are late, and all gaps would pay for those few."""
    model, work, itl_ms = context.model, context.work, context.seen.targets.itl_ms
    if not context.by_deadline or model is None or itl_ms is None:
        return True
    whole_ms = model.request_ms(cap, work.output_steps, work.prompt_tokens)
    return whole_ms <= work.output_steps * itl_ms


def _is_starved(context: Context, demand: Demand) -> bool:
    """True if far more arrives than the cap lets the pods serve. The queue must stand: one from a
    burst, interference or chance goes away."""
    if context.late_in_queue is None or context.cause != "cap" or not _queues_on(context):
        return False
    arrives = _of_one(context, demand.arrivals.surely_per_s)
    return arrives > k.OVERLOADED * _does_per_s(context)


def _does_per_s(context: Context) -> float:
    """Requests/s that the step model predicts for one pod at the present cap; 0 if unknown."""
    done = (
        None
        if context.model is None
        else modelled_capacity(context, context.model, context.seen.cap)
    )
    return done.per_s if done else 0.0


def _queues_on(context: Context) -> bool:
    spans = [pod.present[-k.STARVED_TICKS :] for pod in context.pods]
    queued = [sum(tick.waiting.cap > 0 for tick in span) for span in spans]
    return min(queued, default=0) >= k.USED_SHARE * k.STARVED_TICKS


def _enough(context: Context, demand: Demand) -> int:
    """The lowest cap that serves the arrivals with a tenth to spare; the ceiling if none does."""
    if context.seen.targets.e2e_ms is None:
        return 0
    per_s = _of_one(context, demand.arrivals.mean_per_s)
    needed = _needed(context, k.OVERLOADED * per_s)
    return needed or context.seen.limits.ceiling


def _needed(context: Context, of_one_per_s: float) -> int:
    """The lowest cap at which a pod serves `of_one_per_s` requests/s; 0 if none does or it is
    unknown."""
    model, work, seen = context.model, context.work, context.seen
    if model is None or not work.lengths_known:
        return 0
    per_s = of_one_per_s / context.calibration
    lengths = work.output_steps, work.prompt_tokens
    fixed_s = model.request_ms(0, *lengths) / 1000
    each_s = model.request_ms(1, *lengths) / 1000 - fixed_s
    spare = 1 - per_s * each_s  # n at once take fixed_s + n * each_s each
    if spare <= 0 or per_s * fixed_s > spare * in_memory(context, seen.limits.ceiling):
        return 0
    return ceil(per_s * fixed_s / spare)


def _of_one(context: Context, per_s: float) -> float:
    """One pod's part of all arrivals, including those at pods that are not heard."""
    return per_s / max(1, len(context.fleet.heard) + len(context.fleet.silent))


def _kept(known: LoadedCap, context: Context, demand: Demand) -> int:
    """The remembered cap that the load needed. 0 if it is forgotten, requests are shorter, steps
    are faster, or far less arrives at a pod."""
    if is_forgotten(known, context) or is_another_time(known, context, also_if_longer=False):
        return 0
    per_s = _of_one(context, demand.arrivals.mean_per_s)
    return min(known.cap, context.seen.limits.ceiling) if per_s >= k.LOAD_FELL * known.per_s else 0


def remember_load(context: Context, demand: Demand, cap: int) -> LoadedCap:
    """The record of a raise to `cap` for the load alone; each repetition is kept longer."""
    known, times = context.past.loaded_cap, 0
    if known is not None and not is_another_time(known, context, also_if_longer=False):
        times = min(known.times + is_forgotten(known, context), k.MAX_DOUBLINGS)
    tail_ms = context.model.fitted_tail_ms(cap) if context.model else 0.0
    per_s = _of_one(context, demand.arrivals.mean_per_s)
    return LoadedCap(cap, context.seen.now, times, per_s, context.work.total_tokens, tail_ms)


class ProposedChunk(NamedTuple):
    """A token budget for engines with a fixed one. `for_load`: it is larger than what holds the
    inter-token target, as first tokens would be late with less."""

    tokens: int
    for_load: bool = False


def proposed_chunk(context: Context, demand: Demand) -> ProposedChunk | None:
    """The budget that the step model allows beside the decodes that ran, or that the arriving
    prompts need if their first tokens have a target; None if it is unknown."""
    if context.model is None:
        return None
    law, targets, work = context.model.law, context.seen.targets, context.work
    limits = context.seen.limits.chunk or ChunkLimits()
    ran = effective_cap(context.seen.cap, context.recent_ticks)
    allowed = allowed_chunk(law, targets, ran, limits)
    if allowed is None:
        return None
    if targets.ttft_ms is None:
        return ProposedChunk(allowed)
    per_ms = _of_one(context, demand.arrivals.per_s) * work.prompt_tokens / 1000
    needed = needed_chunk(law, per_ms, min(work.decodes, ran), limits)
    return ProposedChunk(max(allowed, needed), needed > allowed)


Budget = tuple[ChunkBudget | None, ChunkTrial | None]
"""The token budget that the pods' engines start with, and what is on trial for it; None while
their own will do."""


@dataclass(frozen=True, slots=True)
class BudgetCase:
    """What the rules of a fixed budget look at. `limits`: None if it is not ours to set; `allowed`:
    what the step model allows, None if unknown. `known`, `trial`: of this model, device, target
    and limits."""

    context: Context
    limits: ChunkLimits | None
    allowed: int | None
    known: ChunkBudget | None
    trial: ChunkTrial | None
    key: str


def next_budget(context: Context, demand: Demand) -> Budget:
    """The budget for the pods' engines, and what is on trial: by the first rule that applies."""
    past, limits = context.past, context.seen.limits.chunk
    known, trial = past.chunk_budget, past.chunk_trial
    key = f"{limits.key}|{context.seen.targets.itl_ms}" if limits else ""
    if known and limits and (known.key != key or not limits.least <= known.tokens <= limits.most):
        known = None
    if trial and trial.key != key:
        trial = None
    chunk = proposed_chunk(context, demand) if context.has_fixed_chunk else None
    allowed = chunk.tokens if chunk else None
    return first(BUDGET_RULES, BudgetCase(context, limits, allowed, known, trial, key))


def is_not_ours(case: BudgetCase) -> Budget | None:
    """Sets no budget where the user sets it or chunks follow the target."""
    return (None, None) if case.limits is None else None


def may_not_restart(case: BudgetCase) -> Budget | None:
    """Keeps the budget where the tuner may not restart pods."""
    may_roll = case.limits and case.limits.may_roll
    return None if may_roll and case.context.seen.targets.mode == "Enforce" else (case.known, None)


def is_unknown(case: BudgetCase) -> Budget | None:
    """Keeps the budget without a step model or an inter-token target."""
    return (case.known, case.trial) if case.allowed is None else None


def is_good_enough(case: BudgetCase) -> Budget | None:
    """Keeps a budget that is about what the model allows, or younger than a day, or that no late
    gap or first token speaks against."""
    allowed, known, trial = case.allowed or 0, case.known, case.trial
    now = known.tokens if known else running_budget(case.context)
    if not _are_alike(now, allowed) and (
        known is None or _may_replace(known, allowed, case.context)
    ):
        return None
    return known, trial and structs.replace(trial, num=0)


def is_on_trial(case: BudgetCase) -> Budget | None:
    """Tries a new budget until it has been proposed for five minutes with requests, or another for
    an hour."""
    trial = _tried(case)
    is_settled = trial.num >= k.CHUNK_TICKS or trial.total >= k.CHUNK_TICKS_MOST
    return None if is_settled else (case.known, trial)


def has_settled(case: BudgetCase) -> Budget:
    """Restarts the pods with the budget, or the smaller of two between which it wavers."""
    allowed = case.allowed or 0
    least = min(allowed, case.trial.tokens) if case.trial else allowed
    return ChunkBudget(least, case.context.seen.now, case.key), None


BUDGET_RULES = (
    is_not_ours, may_not_restart, is_unknown, is_good_enough, is_on_trial, has_settled
)  # fmt: skip
"""The rules of a fixed token budget, in order."""


def _tried(case: BudgetCase) -> ChunkTrial:
    """The trial with this proposal, if it is of a new tick and requests ran. A model of nothing new
    proposes the same for ever."""
    now, trial, allowed = case.context.seen.now, case.trial, case.allowed or 0
    if trial is None:
        return ChunkTrial(allowed, 1, 1, now, case.key)
    if now - trial.at_s < TICK_SECONDS or not any(t.max_running for t in case.context.recent_ticks):
        return trial
    is_alike = _are_alike(trial.tokens, allowed)
    tokens, num = (trial.tokens, trial.num + 1) if is_alike else (allowed, 1)
    return ChunkTrial(tokens, num, trial.total + 1, now, case.key)


def _are_alike(tokens: int, other: int) -> bool:
    small, large = sorted((tokens, other))
    return large < k.CHUNK_DIFFERS * small


def _may_replace(known: ChunkBudget, allowed: int, context: Context) -> bool:
    """True if a day has passed, and the targets ask for it: gaps for a smaller budget, first tokens
    for a larger one."""
    if context.seen.now - known.time_s < k.CHUNK_KEPT_S:
        return False
    if allowed < known.tokens:
        return context.verdicts["interTokenLatency"].in_prefill
    return context.late_in_queue == "timeToFirstToken" and context.cause == "prefill"


def running_budget(context: Context) -> int:
    """The largest token budget of the pods that run this epoch."""
    configs = [pod.view.config for pod in context.acked]
    return max((c.max_num_batched_tokens for c in configs if c is not None), default=0)
