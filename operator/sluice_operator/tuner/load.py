"""The least cap that does what arrives, where no more pods will come: there the gaps pay."""

from math import ceil

from . import constants as k
from .capacity import calibration, in_memory
from .case import Case
from .demand import Demand, Load
from .types import Condition, LoadedCap


def read_load(case: Case, demand: Demand, feasible: Condition) -> Load:
    """Nothing is asked while pods may still be added, or where whoever waits for too long is
    refused."""
    seen, limits, known = case.seen, case.seen.limits, case.past.loaded_cap
    are_all = limits.replicas_external or seen.replicas >= limits.max_replicas
    may_wait = seen.targets.ttft_ms is None and seen.targets.e2e_ms is None
    enough = _enough(case, demand)
    if may_wait or seen.targets.overload == "Shed" or not (are_all or feasible.holds is False):
        return Load(enough=enough)
    waiting_per_s = case.work.waiting_cap / seen.targets.window_s
    needed = _needed(case, demand.arrivals.mean_per_s + waiting_per_s)
    keep = needed if known is not None else 0
    if known is not None and _still_holds(known, case, demand):
        keep = max(needed, min(known.cap, limits.ceiling))
    return Load(needed if _is_starved(case, demand) else 0, keep, enough)


def _is_starved(case: Case, demand: Demand) -> bool:
    """Whether far more arrives than the cap lets the pods do: of a burst, a slow spell or chance
    the queue is gone again."""
    if case.late_in_queue is None or case.cause != "cap":
        return False
    arrives = _of_one(case, demand.arrivals.surely_per_s)
    return arrives > k.OVERLOADED * _does_per_s(case) and _queues_on(case)


def _does_per_s(case: Case) -> float:
    """What the step model sees one pod do at the present cap; 0 where nobody knows."""
    model, work, cap = case.model, case.work, case.seen.cap
    if model is None:
        return 0.0
    request_ms = model.request_ms(cap, work.output_tokens, work.prompt_tokens)
    return 1000 * cap * calibration(model, case) / request_ms


def _queues_on(case: Case) -> bool:
    spans = [pod.present[-k.STARVED_TICKS :] for pod in case.pods]
    queued = [sum(tick.waiting.cap > 0 for tick in span) for span in spans]
    return min(queued, default=0) >= k.USED_SHARE * k.STARVED_TICKS


def _enough(case: Case, demand: Demand) -> int:
    """The least cap with a tenth to spare for what arrives; the ceiling where none has."""
    if case.seen.targets.e2e_ms is None:
        return 0
    needed = _needed(case, k.OVERLOADED * demand.arrivals.mean_per_s)
    return needed or case.seen.limits.ceiling


def _needed(case: Case, all_per_s: float) -> int:
    """The least cap at which the pods do so many requests; 0 where none would do, or nobody
    knows."""
    model, work, seen = case.model, case.work, case.seen
    if model is None or not work.lengths_known:
        return 0
    per_s = _of_one(case, all_per_s) / calibration(model, case)
    lengths = work.output_tokens, work.prompt_tokens
    fixed_s = model.request_ms(0, *lengths) / 1000
    each_s = model.request_ms(1, *lengths) / 1000 - fixed_s
    spare = 1 - per_s * each_s  # of n at once each takes fixed_s + n * each_s
    if spare <= 0 or per_s * fixed_s > spare * in_memory(case, seen.limits.ceiling):
        return 0
    return ceil(per_s * fixed_s / spare)


def _of_one(case: Case, per_s: float) -> float:
    """One pod's part of what arrives at all."""
    return per_s / max(1, len(case.pods))


def _still_holds(known: LoadedCap, case: Case, demand: Demand) -> bool:
    """Whether it is not long ago, and not far less arrives at a pod than then."""
    per_s = _of_one(case, demand.arrivals.mean_per_s)
    return not _is_over(known, case) and per_s >= k.LOAD_FELL * known.per_s


def _is_over(known: LoadedCap, case: Case) -> bool:
    return case.seen.now - known.time_s >= k.REMEMBER_S * (1 << known.times)


def remember_load(case: Case, demand: Demand, cap: int) -> LoadedCap:
    """What to remember of a raise to `cap` for the load alone: for longer at each repetition."""
    known, times = case.past.loaded_cap, 0
    if known is not None:
        times = min(known.times + _is_over(known, case), k.MAX_DOUBLINGS)
    return LoadedCap(cap, case.seen.now, times, _of_one(case, demand.arrivals.mean_per_s))
