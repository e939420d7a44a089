"""What full pods do beside what the step model says of them."""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter

from sluice_worker.contract import TICK_SECONDS, Tick

from . import constants as k
from .evidence import HeardPod, Work
from .model import StepTime


def calibration(model: StepTime | None, pods: Sequence[HeardPod], work: Work) -> float:
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
    return ((pod.end_s(tick), tick) for tick in reversed(pod.ticks) if _is_full(tick))


def _is_full(tick: Tick) -> bool:
    if tick.max_running < k.USED_SHARE * tick.max_num_seqs or not tick.steps:
        return False
    return tick.waiting.total > 0


def _predicted_tokens(model: StepTime, work: Work, tick: Tick) -> float:
    """Tokens that a tick of steps as large as this one's should have given."""
    batch = max(tick.decodes / tick.steps, 1.0)
    service_ms = model.request_ms(batch, work.output_tokens, work.prompt_tokens)
    if service_ms <= 0:
        return 0.0
    return batch * work.output_tokens * TICK_SECONDS * 1000 / service_ms
