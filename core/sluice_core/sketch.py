"""Counts of times in buckets whose sum over pods and ticks still has its quantiles. Pure.

Bucket i counts values in (GAMMA**(i-1), GAMMA**i] ms. Sketches of several pods and ticks are added;
percentiles never are (DDSketch, VLDB 2019).
"""

from collections.abc import Iterable, Mapping
from math import ceil, log

from .contract import SKETCH_GAMMA

SMALLEST_MS = 0.01
_LOG_GAMMA = log(SKETCH_GAMMA)


def merge(sketches: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of `sketches`."""
    rest = iter(sketches)
    merged = dict(next(rest, {}))
    get = merged.get
    for sketch in rest:
        for bucket, count in sketch.items():
            merged[bucket] = get(bucket, 0) + count
    return merged


def bucket_of(value_ms: float) -> int:
    """The bucket that a value falls into."""
    return ceil(log(max(value_ms, SMALLEST_MS)) / _LOG_GAMMA)


def bucket_at(sketch: Mapping[int, int], quantile: float) -> int | None:
    """The bucket that holds the `quantile` (0..1) of the values, or None if there are none."""
    rank = quantile * (sum(sketch.values()) - 1)
    if rank < 0:
        return None
    seen = 0
    for bucket in sorted(sketch):
        seen += sketch[bucket]
        if seen > rank:
            return bucket
    return max(sketch)


def quantile_ms(sketch: Mapping[int, int], quantile: float) -> float | None:
    """The `quantile` (0..1) in ms, within 1 %, or None if there are no values."""
    bucket = bucket_at(sketch, quantile)
    if bucket is None:
        return None
    return float(2 * SKETCH_GAMMA**bucket / (1 + SKETCH_GAMMA))


def count_above(sketch: Mapping[int, int], bucket: int) -> int:
    """How many values lie in buckets above `bucket`."""
    return sum([count for index, count in sketch.items() if index > bucket])
