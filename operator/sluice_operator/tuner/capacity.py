"""What one pod can do: from the step model, corrected by what full pods were seen to do."""

from sluice_core.contract import TICK_SECONDS
from sluice_core.latency import StepTime

from . import constants as k
from .caps import Bound, sequences_in_memory, sequences_in_time
from .case import Case
from .demand import Capacity
from .evidence import recent


def pod_capacity(case: Case, bound: Bound) -> Capacity | None:
    """Of one pod: from the step model where there is one, else from what was seen (Little).

    `bound`: how far the cap can be raised.
    """
    if not case.work.lengths_known:
        return None
    if case.model is None:
        return _observed_capacity(case)
    concurrency = min(_reachable_concurrency(case, bound), sequences_in_time(case))
    return modelled_capacity(case, case.model, concurrency)


def modelled_capacity(case: Case, model: StepTime, concurrency: float) -> Capacity:
    """What the step model sees one pod do with so many sequences at once."""
    service_ms = model.request_ms(concurrency, case.work.output_steps, case.work.prompt_tokens)
    service_s = max(service_ms / 1000, k.MIN_SERVICE_S)
    return Capacity(concurrency, service_s / case.calibration)


def _observed_capacity(case: Case) -> Capacity | None:
    ticks = recent(case.pods)
    finished_per_tick = sum(tick.finished for tick in ticks) / len(ticks) if ticks else 0.0
    running = sum(tick.running for tick in ticks) / len(ticks) if ticks else 0.0
    if not finished_per_tick or not running:
        return None
    service_s = running * TICK_SECONDS / finished_per_tick
    concurrency = in_memory(case, float(case.seen.cap))
    if case.cause == "kv":
        concurrency = min(concurrency, running)
    service_s = max(service_s, k.MIN_SERVICE_S)
    return Capacity(max(concurrency, 1.0), service_s, is_modelled=False)


def _reachable_concurrency(case: Case, bound: Bound) -> float:
    """The cap that raises can reach or a lowering would leave, or what the KV memory holds."""
    cap, best = case.seen.cap, case.predicted_cap
    if case.gaps_breached:
        reach = float(min(cap, best) if best else k.LOWER * cap)
    else:
        reach = float(max(cap, bound.cap))
    return max(1.0, in_memory(case, reach))


def in_memory(case: Case, reach: float) -> float:
    """`reach`, or as many sequences as the KV memory of one pod carries."""
    carried = sequences_in_memory(case)
    return reach if carried is None else min(reach, carried)
