"""How long a step takes: step_ms = a + b*decodes + c*kv_tokens + d*prefill_tokens. Pure.

Fitted by non-negative least squares on relative errors, over recent records that are bucketed by
their shape, so that a thousand equal steps do not drown the few others. Records age out, or an old
regime would stay for ever; the start-up profile stays as a faint anchor, so that traffic which
shows one shape only cannot make the other coefficients zero.
"""

import itertools
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .contract import StepModel

MAX_AGE_S = 120.0
BUCKET_RECORDS = 64
ANCHOR_WEIGHT = 0.02
"""Of a profile record beside a recent one."""
PREDICTION_MARGIN = 0.85
"""A cap is proposed only where the predicted quantile is within this share of the target."""
MIN_JUDGED = 32
TAIL_QUANTILE = 0.999
MODEL_QUANTILE = 0.99

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step; `at_s` on the clock of `now`."""

    at_s: float
    num_decodes: int
    num_kv_tokens: int
    num_prefill_tokens: int
    step_ms: float


def predict_ms(model: StepModel, decodes: float, kv_tokens: float, prefill_tokens: float) -> float:
    """Mean step time in ms."""
    return model.a + model.b * decodes + model.c * kv_tokens + model.d * prefill_tokens


def predicted_cap(
    model: StepModel, *, itl_ms: float, kv_per_seq: float, chunk_tokens: int, ceiling: int
) -> int:
    """The largest cap whose full batch, beside one chunk of prefill, keeps within the target.

    At least 1: whether even one sequence can hold the target is for the evidence to say.
    """
    room_ms = PREDICTION_MARGIN * itl_ms / max(model.resid_q, 1.0)
    room_ms -= model.a + model.d * chunk_tokens
    per_seq_ms = model.b + model.c * kv_per_seq
    if per_seq_ms <= 0:
        return ceiling if room_ms > 0 else 1
    return int(min(max(room_ms / per_seq_ms, 1), ceiling))


def chunk_limit(
    model: StepModel, tail_ms: float, itl_ms: float, decodes: int, kv_tokens: int
) -> int:
    """Prefill tokens that keep the step's tail quantile within the target; may be negative.

    `tail_ms`: measured beyond predicted time at the quantile to be held. In ms, not as a ratio: a
    hiccup (a throttled CPU, another process) lasts as long in a short step as in a long one.
    """
    room_ms = itl_ms - max(tail_ms, 0.0) - predict_ms(model, decodes, kv_tokens, 0)
    # A chunk's own context counts as well: at most itself, beside what came before it.
    per_token_ms = model.c + model.d
    return int(room_ms / per_token_ms) if per_token_ms > 0 else 1 << 30


class StepTimes:
    """Recent step records and the model fitted on them."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[int, int, int], deque[StepRecord]] = {}
        self._anchor: list[StepRecord] = []
        self.model: StepModel | None = None
        self.tail_ms = 0.0
        """Measured beyond predicted step time at P99.9 of the records."""

    def set_profile(self, records: Seq[StepRecord]) -> None:
        """Start from the steps measured before any traffic."""
        self._anchor = list(records)
        if records:
            self._fit([], self._anchor)

    def add(self, record: StepRecord) -> None:
        """Remember one step, in the place of the oldest of its shape."""
        key = (
            record.num_decodes.bit_length(),
            record.num_kv_tokens.bit_length(),
            record.num_prefill_tokens.bit_length(),
        )
        self._buckets.setdefault(key, deque(maxlen=BUCKET_RECORDS)).append(record)

    def refit(self, now: float) -> StepModel | None:
        """Drop what is too old and fit anew; without recent records the last model stays."""
        for key, bucket in list(self._buckets.items()):
            while bucket and now - bucket[0].at_s > MAX_AGE_S:
                bucket.popleft()
            if not bucket:
                del self._buckets[key]
        recent = list(itertools.chain.from_iterable(self._buckets.values()))
        if recent:
            self._fit(recent, self._anchor)
        return self.model

    def _fit(self, recent: Seq[StepRecord], anchor: Seq[StepRecord]) -> None:
        records = [*recent, *anchor]
        weights = [1.0] * len(recent) + [ANCHOR_WEIGHT] * len(anchor)
        features, step_ms = _arrays(records)
        coefficients = _nnls(features, step_ms, np.array(weights))
        # A quantile of few is no quantile: until there are enough, the profile's count as well.
        judged = len(recent) if len(recent) >= MIN_JUDGED else len(records)
        predicted = np.maximum(features[:judged] @ coefficients, 1e-6)
        ratios = step_ms[:judged] / predicted
        a, b, c, d = (float(value) for value in coefficients)
        quantile = float(np.quantile(ratios, MODEL_QUANTILE))
        self.tail_ms = float(np.quantile(step_ms[:judged] - predicted, TAIL_QUANTILE))
        self.model = StepModel(a=a, b=b, c=c, d=d, n=judged, resid_q=quantile)


def fit_coefficients(records: Seq[StepRecord]) -> tuple[float, float, float, float]:
    """a, b, c and d of all `records`, each with the same weight."""
    features, step_ms = _arrays(records)
    a, b, c, d = _nnls(features, step_ms, np.ones(len(records))).tolist()
    return a, b, c, d


def _arrays(records: Seq[StepRecord]) -> tuple[Matrix, Matrix]:
    rows = [(1, r.num_decodes, r.num_kv_tokens, r.num_prefill_tokens) for r in records]
    step_ms = np.array([max(record.step_ms, 1e-3) for record in records])
    return np.array(rows, dtype=np.float64), step_ms


def _nnls(features: Matrix, step_ms: Matrix, weights: Matrix) -> Matrix:
    """Non-negative weighted least squares of relative errors, by trying every set of columns.

    With four columns there are fifteen sets, each a solve of at most 4 x 4: exact, and no solver.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1.0)
    rows = features / scale / step_ms[:, None]
    gram = rows.T @ (weights[:, None] * rows)
    target = rows.T @ weights
    # The best of all is the best non-negative one where it is that, as it nearly always is.
    free = np.linalg.lstsq(gram, target, rcond=None)[0]
    if (free >= 0).all():
        return np.asarray(free / scale)
    best, best_loss = np.zeros(4), np.inf
    for size in range(1, 5):
        for chosen in itertools.combinations(range(4), size):
            pick = list(chosen)
            part = np.linalg.lstsq(gram[np.ix_(pick, pick)], target[pick], rcond=None)[0]
            if (part < 0).any():
                continue
            # Loss up to a constant: x' G x - 2 h' x.
            loss = float(part @ gram[np.ix_(pick, pick)] @ part - 2 * target[pick] @ part)
            if loss < best_loss - 1e-12:
                best, best_loss = np.zeros(4), loss
                best[pick] = part
    best /= scale
    return best
