"""Predicted step times: the cap and the token budget that hold the inter-token target, and the
duration of a request."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice, pairwise
from math import ceil, floor, inf, log2
from operator import itemgetter
from statistics import NormalDist
from typing import TypeGuard

from sluice_core import sketch
from sluice_core.contract import TICK_SECONDS, StepModel, Tick
from sluice_core.latency import TARGET_MARGIN, StepLaw, StepTime

from . import constants as k
from .evidence import HeardPod, Workload, is_filled, recent
from .types import ChunkLimits, Targets


def step_time(pods: Sequence[HeardPod], work: Workload, quantile: float) -> StepTime | None:
    """The mean of the pods' fitted models, weighted by their records; None before there are enough.

    The tail is the residual's P99, moved to `quantile` as a log-normal would be. On a throttled
    pod it is a stall.
    """
    models = [pod.view.evidence.step_model for pod in pods if pod.view.evidence]
    fitted = [model for model in models if _is_fitted(model)]
    if not fitted:
        return None
    stretch = _mean(fitted, "resid_q") ** _tail_power(quantile)
    mean = StepLaw(*(_mean(fitted, name) for name in "abcd"))
    return _with_tail(StepTime(mean.at_context(work.context_tokens)), max(1.0, stretch), work)


def _is_fitted(model: StepModel | None) -> TypeGuard[StepModel]:
    return model is not None and model.n >= k.MIN_MODEL_RECORDS and model.a + model.b > 0


def _mean(models: Sequence[StepModel], field: str) -> float:
    total = sum(model.n for model in models)
    return float(sum(getattr(model, field) * model.n for model in models) / total)


def _tail_power(quantile: float) -> float:
    """log(residual at `quantile`) / log(residual at P99) of a log-normal."""
    normal = NormalDist()
    return max(0.0, normal.inv_cdf(quantile) / normal.inv_cdf(0.99))


def _with_tail(plain: StepTime, stretch: float, work: Workload) -> StepTime:
    if work.throttled_share <= k.THROTTLED_ADDITIVE:
        return replace(plain, stretch=stretch)
    typical_ms = plain.mean_ms(work.decodes, work.prefill_tokens)
    return replace(plain, stall_ms=(stretch - 1) * typical_ms)


def corrected(
    model: StepTime, pods: Sequence[HeardPod], work: Workload, quantile: float, far_ms: float
) -> StepTime:
    """Corrects the model if the measured quantile of the gaps lies below the predicted one.

    Gaps over `far_ms` are left out: they come from interference, which the model does not know. If
    most gaps are, the model may be fitted to just that time, and nothing is compared.
    """
    measured = sketch.merge(tick.itl.sketch for tick in recent(pods))
    far = sketch.bucket_of(far_ms) if far_ms < inf else inf
    gaps = {bucket: count for bucket, count in measured.items() if bucket <= far}
    num = sum(gaps.values())
    measured_ms = sketch.quantile_ms(gaps, quantile)
    enough = k.MIN_BEYOND / (1 - quantile)
    if measured_ms is None or num < max(enough, sum(measured.values()) / 2):
        return model
    predicted_ms = model.mean_ms(work.decodes, work.prefill_tokens) * model.stretch + model.stall_ms
    return replace(model, correction=min(1.0, max(measured_ms / predicted_ms, k.MIN_CORRECTION)))


def calibration(model: StepTime | None, pods: Sequence[HeardPod], work: Workload) -> float:
    """Measured over predicted speed: what HTTP, a CPU quota and a bad fit cost; about 1.

    It uses the newest ticks in which a pod was full, however long ago. A pod that is throttled only
    when full would otherwise seem able to take twice the load.
    """
    if model is None or not work.lengths_known:
        return 1.0
    newest = merge(*map(_full_ticks, reversed(pods)), key=itemgetter(0), reverse=True)
    full = [tick for _, tick in islice(newest, k.FULL_TICKS)]
    if len(full) < k.MIN_FULL_TICKS:
        return 1.0
    lowest, highest = k.CALIBRATION
    if work.is_encoding:
        predicted_ms = sum(t.steps * model.law.a + t.prefill_tokens * model.law.d for t in full)
        measured_ms = 1000 * TICK_SECONDS * len(full)
        return min(max(predicted_ms / measured_ms, lowest), highest)
    predicted = sum(_predicted_tokens(model, work, tick) for tick in full)
    measured = sum(tick.generated_tokens for tick in full)
    return min(max(measured / predicted, lowest), highest) if predicted > 0 else 1.0


def _full_ticks(pod: HeardPod) -> Iterator[tuple[float, Tick]]:
    """(end, tick) of the ticks in which the pod was full, newest first."""
    newest_first = pairwise(reversed(pod.ticks))
    return ((pod.end_s(tick), tick) for tick, before in newest_first if _is_full(tick, before))


def _is_full(tick: Tick, before: Tick) -> bool:
    """True if it was full throughout: requests waited when the tick began and when it ended."""
    waited = before.waiting.total and tick.waiting.total
    return bool(waited and tick.steps) and is_filled(tick)


def _predicted_tokens(model: StepTime, work: Workload, tick: Tick) -> float:
    """Tokens that a tick with so many running should have given. Nobody knows how many would be in
    prefill, which waits for room beside the others' next tokens."""
    batch = max(tick.running, 1)
    service_ms = model.request_ms(batch, work.output_steps, work.prompt_tokens)
    if service_ms <= 0:
        return 0.0
    return batch * work.output_tokens * TICK_SECONDS * 1000 / service_ms


def allowed_chunk(law: StepLaw, targets: Targets, cap: int, limits: ChunkLimits) -> int | None:
    """The largest budget whose step beside `cap` decodes holds the inter-token target with the
    usual margin, within `limits`, to two binary digits. None without a target, or if a prompt
    token costs nothing. `law`: a result of `StepLaw.at_context`."""
    if targets.itl_ms is None:
        return None
    room_ms = TARGET_MARGIN * targets.itl_ms - law.step_ms(cap, 0, 0)
    tokens = room_ms / law.d if law.d > 0 else inf
    return None if tokens == inf else max(limits.least, min(_rounded(tokens), limits.most))


def needed_chunk(law: StepLaw, tokens_per_ms: float, decodes: float, limits: ChunkLimits) -> int:
    """The least budget that computes prompts as fast as `tokens_per_ms` arrive beside `decodes`,
    within `limits`, rounded up to two binary digits. Steps of c prompt tokens take F + d c ms, so
    that c must be r F / (1 - r d) for r a ms."""
    busy = tokens_per_ms * law.d
    if busy >= 1:
        return limits.most
    chunk = k.CHUNK_SPARE * tokens_per_ms * law.step_ms(decodes, 0, 0) / (1 - busy)
    tokens = min(max(chunk + decodes, limits.least), limits.most)
    power: int = 1 << ceil(log2(tokens))
    return min(3 * power // 4 if 3 * power >= 4 * tokens else power, limits.most)


def _rounded(tokens: float) -> int:
    """`tokens` rounded down to 2**n or 3 * 2**n, so that a new fit seldom gives a new value."""
    if tokens < 2:
        return 0
    half: int = 1 << (floor(log2(tokens)) - 1)
    return floor(tokens / half) * half
