"""The step time, predicted: which cap holds the inter-token target, and how long a request
takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from statistics import NormalDist

from sluice_worker.contract import StepModel

from . import constants as k
from . import sketch
from .evidence import HeardPod, Work, recent


@dataclass(frozen=True, slots=True)
class StepTime:
    """step_ms = a + b * decodes + c * kv_tokens + d * prefill_tokens, with its tail.

    `stretch`: the asked quantile over the mean; `stall_ms`: what the tail adds whatever the batch.
    One of the two is neutral. `correction`: at most 1, where measured gaps prove the tail too long.
    """

    a: float
    b: float
    c: float
    d: float
    context_tokens: float
    stretch: float = 1.0
    stall_ms: float = 0.0
    correction: float = 1.0

    def mean_ms(self, decodes: float, prefill_tokens: float) -> float:
        """Mean time of a step."""
        per_sequence = self.b + self.c * self.context_tokens
        return self.a + per_sequence * decodes + self.d * prefill_tokens

    def tail_ms(self, decodes: float, prefill_tokens: float | None = None) -> float:
        """The asked quantile of a step; by default with the smallest prefill chunk.

        One sequence alone decodes beside nobody's prefill: with a cap of 1 the next is not admitted
        before it ends.
        """
        if prefill_tokens is None:
            prefill_tokens = k.MIN_CHUNK_TOKENS if decodes > 1 else 0
        mean = self.mean_ms(decodes, prefill_tokens)
        return (mean * self.stretch + self.stall_ms) * self.correction

    def largest_batch(self, tail_ms: float, ceiling: int) -> int:
        """The most decodes whose step's tail is at most `tail_ms`: 0..`ceiling`."""
        spare = (tail_ms / self.correction - self.stall_ms) / self.stretch
        spare -= self.mean_ms(0, k.MIN_CHUNK_TOKENS)
        per_sequence = self.b + self.c * self.context_tokens
        if 0 <= per_sequence * ceiling <= spare:
            return ceiling
        batch = floor(spare / per_sequence) if spare > 0 else 0
        return batch if batch > 1 else int(self.tail_ms(1) <= tail_ms)

    def request_ms(self, concurrency: float, output_tokens: float, prompt_tokens: float) -> float:
        """Residence of one request among `concurrency`: its decodes, and everybody's prefills."""
        decode = output_tokens * self.mean_ms(concurrency, 0)
        return decode + concurrency * self.d * prompt_tokens


def step_time(pods: Sequence[HeardPod], work: Work, quantile: float) -> StepTime | None:
    """The mean of the pods' fitted models, weighted by their records; None before there are enough.

    The tail is the residual's P99, moved to `quantile` as a log-normal would be. On a throttled
    pod it is a stall. Where the measured quantile of the gaps lies below, that is believed
    instead.
    """
    models = [
        pod.view.evidence.step_model
        for pod in pods
        if pod.view.evidence and _is_fitted(pod.view.evidence.step_model)
    ]
    fitted = [model for model in models if model is not None]
    if not fitted:
        return None
    stretch = _mean(fitted, "resid_q") ** _tail_power(quantile)
    plain = StepTime(
        a=_mean(fitted, "a"),
        b=_mean(fitted, "b"),
        c=_mean(fitted, "c"),
        d=_mean(fitted, "d"),
        context_tokens=work.context_tokens,
    )
    return _corrected(_with_tail(plain, max(1.0, stretch), work), pods, work, quantile)


def _is_fitted(model: StepModel | None) -> bool:
    return model is not None and model.n >= k.MIN_MODEL_RECORDS and model.a + model.b > 0


def _mean(models: Sequence[StepModel], field: str) -> float:
    total = sum(model.n for model in models)
    return float(sum(getattr(model, field) * model.n for model in models) / total)


def _tail_power(quantile: float) -> float:
    """log(residual at `quantile`) / log(residual at P99) of a log-normal."""
    normal = NormalDist()
    return max(0.0, normal.inv_cdf(quantile) / normal.inv_cdf(0.99))


def _with_tail(plain: StepTime, stretch: float, work: Work) -> StepTime:
    if work.throttled_share <= k.THROTTLED_ADDITIVE:
        return replace(plain, stretch=stretch)
    typical_ms = plain.mean_ms(work.decodes, work.prefill_tokens)
    return replace(plain, stall_ms=(stretch - 1) * typical_ms)


def _corrected(model: StepTime, pods: Sequence[HeardPod], work: Work, quantile: float) -> StepTime:
    gaps = sketch.merge(tick.itl.sketch for tick in recent(pods))
    measured_ms = sketch.quantile_ms(gaps, quantile)
    if measured_ms is None or sum(gaps.values()) < k.MIN_GAPS:
        return model
    predicted_ms = model.tail_ms(work.decodes, work.prefill_tokens)
    return replace(model, correction=min(1.0, max(measured_ms / predicted_ms, k.MIN_CORRECTION)))
