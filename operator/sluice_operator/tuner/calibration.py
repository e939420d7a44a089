"""What full pods do beside what the step model says of them."""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice, pairwise
from operator import itemgetter

from sluice_core.contract import TICK_SECONDS, Tick
from sluice_core.latency import StepTime

from . import constants as k
from .evidence import HeardPod, Workload, is_filled


def calibration(model: StepTime | None, pods: Sequence[HeardPod], work: Workload) -> float:
    """Measured over predicted speed: what HTTP, a CPU quota and a bad fit cost; about 1.

    Of the newest ticks in which a pod was full, however long ago: a pod that is throttled when full
    runs freely when it is not, and would look able to take twice the load.
    """
    if model is None or not work.lengths_known:
        return 1.0
    newest = merge(*map(_full_ticks, reversed(pods)), key=itemgetter(0), reverse=True)
    full = [tick for _, tick in islice(newest, k.FULL_TICKS)]
    if len(full) < k.MIN_FULL_TICKS:
        return 1.0
    predicted = sum(_predicted_tokens(model, work, tick) for tick in full)
    measured = sum(tick.generated_tokens for tick in full)
    lowest, highest = k.CALIBRATION
    return min(max(measured / predicted, lowest), highest) if predicted > 0 else 1.0


def _full_ticks(pod: HeardPod) -> Iterator[tuple[float, Tick]]:
    """(end, tick) of those ticks in which the pod was full, newest first."""
    newest_first = pairwise(reversed(pod.ticks))
    return ((pod.end_s(tick), tick) for tick, before in newest_first if _is_full(tick, before))


def _is_full(tick: Tick, before: Tick) -> bool:
    """Whether it was all the while: some waited when it began, and when it ended."""
    waited = before.waiting.total and tick.waiting.total
    return bool(waited and tick.steps) and is_filled(tick)


def _predicted_tokens(model: StepTime, work: Workload, tick: Tick) -> float:
    """Tokens that a tick in which so many ran should have given. Of those in prefill, which waits
    for room beside the others' next tokens, nobody knows how many there would be."""
    batch = max(tick.running, 1)
    service_ms = model.request_ms(batch, work.output_steps, work.prompt_tokens)
    if service_ms <= 0:
        return 0.0
    return batch * work.output_tokens * TICK_SECONDS * 1000 / service_ms
