"""The step time, predicted: which cap holds the inter-token target, and how long a request
takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from statistics import NormalDist
from typing import TypeGuard

from sluice_core import sketch
from sluice_core.contract import MIN_CHUNK_TOKENS, StepModel

from . import constants as k
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

    def full_ms(self, cap: int) -> float:
        """Mean time of the longest step that is a gap of somebody, at a full cap.

        All decode; or all but one do, beside the smallest prefill chunk of that one.
        """
        beside_chunk = self.mean_ms(cap - 1, MIN_CHUNK_TOKENS) if cap > 1 else 0.0
        return max(self.mean_ms(cap, 0), beside_chunk)

    def fitted_tail_ms(self, cap: int) -> float:
        """The asked quantile of a full cap's longest step, by the records of steps alone."""
        return self.full_ms(cap) * self.stretch + self.stall_ms

    def tail_ms(self, cap: int) -> float:
        """The asked quantile of a full cap's longest step."""
        return self.fitted_tail_ms(cap) * self.correction

    def largest_batch(self, tail_ms: float, ceiling: int) -> int:
        """The largest cap whose tail is at most `tail_ms`: 0..`ceiling`."""
        mean_ms = (tail_ms / self.correction - self.stall_ms) / self.stretch
        decodes = self._decodes_within(mean_ms - self.mean_ms(0, 0), ceiling)
        beside_chunk = self._decodes_within(mean_ms - self.mean_ms(0, MIN_CHUNK_TOKENS), ceiling)
        return min(decodes, beside_chunk + 1, ceiling)

    def _decodes_within(self, spare_ms: float, ceiling: int) -> int:
        per_sequence = self.b + self.c * self.context_tokens
        if spare_ms <= 0:
            return 0
        return ceiling if per_sequence * ceiling <= spare_ms else floor(spare_ms / per_sequence)

    def request_ms(self, concurrency: float, output_steps: float, prompt_tokens: float) -> float:
        """Residence of one request among `concurrency`: its decodes, and everybody's prefills."""
        decode = output_steps * self.mean_ms(concurrency, 0)
        return decode + concurrency * self.d * prompt_tokens

    def most_within(self, due_ms: float, output_steps: float, prompt_tokens: float) -> float:
        """How many run at once such that each ends within `due_ms`; infinite where one more costs
        nothing, under 1 where not even one does."""
        fixed_ms = self.request_ms(0, output_steps, prompt_tokens)
        each_ms = self.request_ms(1, output_steps, prompt_tokens) - fixed_ms
        return (due_ms - fixed_ms) / each_ms if each_ms > 0 else inf

    def prefill_s(self, prompt_tokens: float) -> float:
        """For how long one prompt keeps the prefill to itself."""
        return self.d * prompt_tokens / 1000


def step_time(pods: Sequence[HeardPod], work: Work, quantile: float) -> StepTime | None:
    """The mean of the pods' fitted models, weighted by their records; None before there are enough.

    The tail is the residual's P99, moved to `quantile` as a log-normal would be. On a throttled
    pod it is a stall.
    """
    models = [pod.view.evidence.step_model for pod in pods if pod.view.evidence]
    fitted = [model for model in models if _is_fitted(model)]
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
    return _with_tail(plain, max(1.0, stretch), work)


def _is_fitted(model: StepModel | None) -> TypeGuard[StepModel]:
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


def corrected(
    model: StepTime, pods: Sequence[HeardPod], work: Work, quantile: float, far_ms: float
) -> StepTime:
    """Where the measured quantile of the gaps lies below the model's, that is believed instead.

    Gaps over `far_ms` are left out: they are of slow spells, of which the model knows nothing.
    Where they are most of all, it may be the model of just that time, and nothing is compared.
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
