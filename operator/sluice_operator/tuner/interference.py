"""Interference: gaps so long that no reasonable cap would have held them.

A neighbour, a throttled quota or garbage collection slows all steps for seconds. Gaps over target
then say nothing about the cap, and a tuner that lowers it loses the batch as well.
"""

from collections.abc import Sequence
from itertools import islice
from math import floor, inf

from sluice_core import sketch
from sluice_core.contract import Tick
from sluice_core.latency import StepTime

from . import constants as k
from .types import Observation

Slices = Sequence[Sequence[Tick]]


def far_ms(model: StepTime, ran: int, seen: Observation, epoch: Slices) -> float:
    """Gap length from which the cap is not the cause: half of the `ran` would not have held it.

    At the minimum there is no half, so only what the pod itself saw as interference is excused.
    Infinite without a target, and if slowness lasts: it is a regime then, which the cap must
    follow.
    """
    half, target_ms = max(floor(k.HALVE * ran), seen.limits.min_num_seqs), seen.targets.itl_ms
    if target_ms is None:
        return inf
    far = target_ms * model.full_ms(ran) / model.full_ms(half) if half < ran else k.NO_GAP_MS
    return inf if _lasts(far, epoch, seen.targets.allowed_share) else far


def _lasts(far: float, epoch: Slices, allowed: float) -> bool:
    """True if most of the last ticks with traffic had such gaps."""
    with_traffic = (part for part in reversed(epoch) if any(tick.itl.n for tick in part))
    busy, bucket = islice(with_traffic, k.REGIME_WINDOW), far_bucket(far)
    slow = [part for part in busy if num_far(part, bucket) > allowed * sum(t.itl.n for t in part)]
    return len(slow) >= k.REGIME_TICKS


def far_bucket(far: float) -> int | None:
    """The bucket above which gaps are longer than `far` ms, within 2 %; None if none can be."""
    return None if far == inf else sketch.bucket_of(far)


def num_far(ticks: Sequence[Tick], bucket: int | None) -> int:
    """Gaps above `bucket`, see `far_bucket`; in ticks under interference all gaps over target."""
    if bucket is None:
        return 0
    return sum(
        tick.itl.over if _has_interference(tick) else sketch.count_above(tick.itl.sketch, bucket)
        for tick in ticks
        if tick.itl.over
    )


def mostly(ticks: Sequence[Tick]) -> bool:
    """True if the pods themselves saw most of `ticks` as interference."""
    return 2 * sum(map(_has_interference, ticks)) > len(ticks)


def _has_interference(tick: Tick) -> bool:
    """True if the pod itself saw most of the tick's steps under interference.

    Interference keeps batches small, and gaps just over the target are then not due to the cap.
    """
    return tick.slow_steps > 0 and tick.slow_steps >= k.INTERFERENCE_SHARE * tick.steps
