"""What one pod can do: from the step model, corrected by what full pods were seen to do."""

from sluice_core.contract import TICK_SECONDS
from sluice_core.latency import StepTime

from . import constants as k
from .caps import Bound, sequences_in_memory, sequences_in_time
from .context import Context
from .demand import Capacity
from .evidence import recent


def pod_capacity(context: Context, bound: Bound) -> Capacity | None:
    """Of one pod: from the step model where there is one, else from what was seen (Little).

    `bound`: how far the cap can be raised.
    """
    if not context.work.lengths_known:
        return None
    if context.model is None:
        return _observed_capacity(context)
    concurrency = min(_reachable_concurrency(context, bound), sequences_in_time(context))
    return modelled_capacity(context, context.model, concurrency)


def modelled_capacity(context: Context, model: StepTime, concurrency: float) -> Capacity:
    """What the step model sees one pod do with so many sequences at once."""
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
    """The cap that raises can reach or a lowering would leave, or what the KV memory holds."""
    cap, best = context.seen.cap, context.predicted_cap
    if context.gaps_breached:
        reach = float(min(cap, best) if best else k.LOWER * cap)
    else:
        reach = float(max(cap, bound.cap))
    return max(1.0, in_memory(context, reach))


def in_memory(context: Context, reach: float) -> float:
    """`reach`, or as many sequences as the KV memory of one pod carries."""
    carried = sequences_in_memory(context)
    return reach if carried is None else min(reach, carried)
