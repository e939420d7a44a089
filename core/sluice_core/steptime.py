"""How long a step takes: step_ms = a + b*decodes + c*kv_tokens + d*prefill_tokens. Pure.

Fitted by non-negative least squares on relative errors over recent records. Records are bucketed by
their shape: a thousand equal steps do not drown the few others. They age out, or an old regime
would stay for ever. The start-up profile stays as a faint anchor: traffic of one shape alone would
make the other coefficients zero.

Slow steps come alone (a hiccup: the tail of all steps) or in a row (interference: a noisy
neighbour, a lower clock). Model and tail are fitted on steps without interference. Otherwise a few
slow seconds would leave no room for prefill in the next two minutes. Lasting interference counts
as the pod's speed until it ends. A batch larger than all fitted ones may take as many times longer
as it is larger: this is no interference. A fit on few sequences may find that one costs nothing.
A pod throttled by its CPU quota has no interference: it alternates between running and pausing.
When its pauses counted as interference, each fit made the model faster, until it was faster than
every step.

With CUDA graphs, a step with a prompt chunk is launched operation by operation and others are not.
Then a fifth column holds what a chunk of any size costs. Without it, small chunks seem dear and
large ones dearer, no large one is ever tried, and nothing corrects the fit: on an H200, chunks of
32 tokens doubled each step and a load of 5 requests/s overloaded the worker.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .contract import StepModel
from .latency import MIN_CHUNK_TOKENS, NO_LIMIT, Tail, chunk_limit, quantile

REFIT_S = 1.0
"""Seconds from one fit of the model to the next."""
MAX_AGE_S = 120.0
BUCKET_RECORDS = 64
ANCHOR_WEIGHT = 0.02
"""Weight of a profile record; a recent one has 1."""
MIN_JUDGED = 32
"""Fewest records, or chunks, whose quantiles say anything. On a GPU with five stalls in 40 s,
chunks are 7 % shorter at 8, and 11 % longer at 128; smooth requests vary by 1 point."""
MODEL_QUANTILE = 0.99
STRETCH_QUANTILE = 0.9
MAX_STEP_MS = 5000.0
"""Most ms of a step with a prompt chunk, whatever the targets. Newcomers, aborts and cap changes
wait for its end; after three such times a worker counts as stalled (`health`)."""
LEAST_CHUNK = 32
"""Least prefill tokens of a step whose time comes from them and not from a hiccup."""
INTERFERENCE_STEPS = 5
"""Steps behind the median of measured over predicted time: two hiccups are no interference."""
INTERFERENCE_SHIFT = 0.3
"""A median within this distance of 1 is noise: following it would hide the tail."""
KNOWN_STEPS = 16
"""Steps of one size after which the fit knows the time of that size."""
REGIME_S = 30.0
"""Interference that lasts this long is the pod's normal speed, as in the tuner (`REGIME_TICKS`)."""

AT, MS, SLOWDOWN, WORK = range(4)
"""Columns of a row; the step's work is in those from WORK on."""
DECODES, PREFILL = WORK + 1, WORK + 3
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step; `at_s` on the clock of `now`."""

    at_s: float
    num_decodes: int
    num_kv_tokens: int
    num_prefill_tokens: int
    step_ms: float


class StepTimes:
    """Recent step records and the model fitted on them.

    `slowdown`: current ratio of measured to predicted step time; 1 if they hardly differ.
    """

    def __init__(self, *, has_graphs: bool = False) -> None:
        """has_graphs: steps without prompt chunks are CUDA graphs, others are not."""
        # Rows: at_s, ms, slowdown, 1, decodes, kv_tokens, prefill_tokens, and with graphs 1 where
        # there is prefill; a ring for each shape.
        self._width = WORK + 4 + has_graphs
        self._rows: Matrix = np.empty((0, self._width))
        self._rings: dict[tuple[int, int, int], Iterator[int]] = {}
        self._anchor: Matrix = np.empty((0, self._width))
        # The newest rows, each with its measured over its predicted time.
        self._newest: deque[tuple[int, float]] = deque(maxlen=INTERFERENCE_STEPS)
        self._interference: _Interference | None = None
        self._throttled_at = -np.inf
        self._is_fitted = False
        self._known, self._longest = 0, MIN_CHUNK_TOKENS
        self.model: StepModel | None = None
        self.tail = Tail()
        self.slowdown = 1.0

    def set_profile(self, records: Seq[StepRecord]) -> None:
        """Start from the steps measured before any traffic."""
        self._anchor = np.array([self._row(record) for record in records]).reshape(-1, self._width)
        if records:
            self._fit(self._anchor[:0])
            self._known = _most(int(_sizes(self._anchor).max()))

    def add(self, record: StepRecord) -> None:
        """Remember one step, in the place of the oldest of its shape."""
        shape = (
            record.num_decodes.bit_length(),
            record.num_kv_tokens.bit_length(),
            record.num_prefill_tokens.bit_length(),
        )
        ring = self._rings.get(shape)
        if ring is None:
            first = len(self._rows)
            ring = self._rings[shape] = itertools.cycle(range(first, first + BUCKET_RECORDS))
            self._rows = np.concatenate(
                [self._rows, np.full((BUCKET_RECORDS, self._width), -np.inf)]
            )
        place = next(ring)
        self._rows[place] = self._row(record)
        if self.model is None or record.at_s < self._throttled_at + MAX_AGE_S:
            return
        self._compare(place, record, self.model)

    def _row(self, record: StepRecord) -> list[float]:
        work = (record.num_decodes, record.num_kv_tokens, record.num_prefill_tokens)
        row = [record.at_s, max(record.step_ms, 1e-3), 1.0, 1, *work, record.num_prefill_tokens > 0]
        return row[: self._width]

    def _compare(self, place: int, record: StepRecord, model: StepModel) -> None:
        """Look for interference in the steps around a step: the first slow one counts too."""
        work = record.num_decodes, record.num_kv_tokens, record.num_prefill_tokens
        chunk_ms = self.tail.chunk_ms
        interference = self._interference or _Interference(
            record.at_s, model, chunk_ms, self._known
        )
        ratio = record.step_ms / max(interference.step_ms(*work), 1e-6)
        larger = max(record.num_decodes / max(interference.known, 1), 1.0)
        if interference.is_regime and 1 < ratio <= larger:
            return  # such a step does not show that the interference lasts
        ratio = min(ratio, max(ratio / larger, 1.0))
        self._newest.append((place, ratio))
        if self._is_fitted:
            self._rows[place, SLOWDOWN] = min(
                self.slowdown, max(ratio, 1.0)
            )  # the interference may be over
        if len(self._newest) < INTERFERENCE_STEPS:
            return
        middle = INTERFERENCE_STEPS // 2
        median = sorted(ratio for _, ratio in self._newest)[middle]
        shift = median if abs(median - 1) > INTERFERENCE_SHIFT else 1.0
        if self._is_fitted:  # else the model is still to learn how fast the pod is
            self._rows[self._newest[middle][0], SLOWDOWN] = shift
        if shift <= 1:
            self._interference = None
        elif self._interference is None and self._is_fitted:
            self._interference = interference
        self.slowdown = 1.0 if self._interference and self._interference.is_regime else shift

    def chunk_limit(self, itl_ms: float | None, decodes: int, kv_tokens: int) -> int:
        """As `chunk_limit`, within `MAX_STEP_MS`. Without decodes nothing waits between tokens, so
        only `MAX_STEP_MS` counts. `NO_LIMIT` without a model."""
        if self.model is None:
            return NO_LIMIT
        limit_ms = MAX_STEP_MS if itl_ms is None or not decodes else min(itl_ms, MAX_STEP_MS)
        return chunk_limit(self.model, self.tail, limit_ms, decodes, kv_tokens, self.slowdown)

    @property
    def worthwhile(self) -> int:
        """Tokens that take as long as a chunk costs by itself, but at most twice what was measured.

        No chunk may keep the target. Then few long ones break it less often than many short ones.
        """
        if self.model is None or not self.tail.chunk_ms:
            return 0
        per_token_ms = max(self.model.d, 1e-6)
        return min(int(self.tail.chunk_ms / per_token_ms), 2 * self._longest)

    def price_s(self, itl_ms: float | None, most: int, decodes: int, kv_tokens: int) -> float:
        """Seconds that a prefill token takes beside `decodes` in chunks of up to `most`; 0 without
        a model."""
        if self.model is None:
            return 0.0
        room = min(self.chunk_limit(itl_ms, decodes, kv_tokens), most - decodes)
        chunk = max(room, MIN_CHUNK_TOKENS)
        return self.slowdown * self.step_ms(self.model, decodes, kv_tokens, chunk) / chunk / 1e3

    def step_ms(self, model: StepModel, decodes: int, kv_tokens: int, prefill_tokens: int) -> float:
        """Mean time of a step by `model`, with what a chunk costs by itself."""
        chunk_ms = self.tail.chunk_ms if prefill_tokens else 0.0
        return model.step_ms(decodes, kv_tokens, prefill_tokens) + chunk_ms

    @property
    def is_slow(self) -> bool:
        """True under interference."""
        return self.slowdown > 1

    def refit(self, now: float, *, is_throttled: bool = False) -> StepModel | None:
        """Fit the model to records that are not too old; without any, the last model stays.

        `is_throttled`: the steps since the last call were held back by the CPU quota.
        """
        if is_throttled:
            self._throttled_at = now
            self._forget_interference()
            self.slowdown = 1.0
        recent = self._rows[self._rows[:, AT] >= now - MAX_AGE_S]
        if len(recent):
            self._fit(self._of_now(recent, now))
            self._is_fitted = len(recent) >= MIN_JUDGED
            self._known = _most(int(np.sort(_sizes(recent))[-KNOWN_STEPS:][0]))
            self._longest = max(int(recent[:, PREFILL].max()), MIN_CHUNK_TOKENS)
        return self.model

    def _of_now(self, recent: Matrix, now: float) -> Matrix:
        """Steps as they would be now: without interference, or slowed by it if it lasts."""
        clean, interference = recent.copy(), self._interference
        clean[:, MS] /= np.maximum(clean[:, SLOWDOWN], 1.0)
        if interference is None or now - interference.since_s < REGIME_S:
            return clean
        own = recent[:, AT] >= interference.since_s
        interference.is_regime = interference.is_regime or int(own.sum()) >= MIN_JUDGED
        if not interference.is_regime:
            return clean
        clean[:, MS] *= _quantile(recent[own, SLOWDOWN], 0.5)
        clean[own, MS] = recent[own, MS]
        if own.all():  # nothing remembers anything else
            self._forget_interference()
        return clean

    def _forget_interference(self) -> None:
        self._interference = None
        self._rows[:, SLOWDOWN] = 1.0
        self._newest.clear()

    def _fit(self, recent: Matrix) -> None:
        rows = np.concatenate([recent, self._anchor])
        weights = np.full(len(rows), ANCHOR_WEIGHT)
        weights[: len(recent)] = 1.0
        coefficients = non_negative_fit(rows[:, WORK:], rows[:, MS], weights)
        # Few records give no quantile: until there are enough, the profile's count as well.
        judged = rows[: len(recent)] if len(recent) >= MIN_JUDGED else rows
        predicted = np.maximum(judged[:, WORK:] @ coefficients, 1e-6)
        a, b, c, d, *chunk_ms = coefficients.tolist()
        stretch = _stretch(judged, self._anchor, coefficients)
        predicted += (stretch - 1) * d * judged[:, PREFILL]
        beyond = judged[:, MS] - predicted
        chunks = beyond[judged[:, PREFILL] >= LEAST_CHUNK]
        of_chunks = _ascending(chunks) if len(chunks) >= MIN_JUDGED else ()
        self.tail = Tail(_ascending(beyond), of_chunks, stretch, sum(chunk_ms))
        resid_q = _quantile(judged[:, MS] / predicted, MODEL_QUANTILE)
        self.model = StepModel(a=a, b=b, c=c, d=d, n=len(judged), resid_q=resid_q)


@dataclass(slots=True)
class _Interference:
    """Slow steps in a row, since `since_s`; `before`, `chunk_ms`: the model that they are slower
    than, fitted on steps of up to `known` decodes."""

    since_s: float
    before: StepModel
    chunk_ms: float
    known: int
    is_regime: bool = False

    def step_ms(self, decodes: int, kv_tokens: int, prefill_tokens: int) -> float:
        """Mean time of a step before."""
        chunk_ms = self.chunk_ms if prefill_tokens else 0.0
        return self.before.step_ms(decodes, kv_tokens, prefill_tokens) + chunk_ms


def _stretch(judged: Matrix, anchor: Matrix, coefficients: Matrix) -> float:
    """`Tail.stretch`, of the chunks among `judged`, or of the profile's where those are few.

    Chunks count that take as long as their launch. In shorter ones the launch's noise is larger
    than what their tokens take: if all count, chunks are 17 % shorter. Half or twice the launch
    changes 5 % at most.
    """
    d, chunk_ms = coefficients[3], coefficients[4:].sum()
    if d <= 0:
        return 1.0
    chunks, profiled = (_long_chunks(rows, chunk_ms / d) for rows in (judged, anchor))
    if len(chunks) < MIN_JUDGED and len(profiled):
        chunks = profiled
    if not len(chunks):
        return 1.0
    taken = chunks[:, MS] - chunks[:, WORK:PREFILL] @ coefficients[:3] - chunk_ms
    return max(1.0, _quantile(taken / (d * chunks[:, PREFILL]), STRETCH_QUANTILE))


def _long_chunks(rows: Matrix, worth: float) -> Matrix:
    """Rows with a chunk of at least `worth` tokens."""
    return rows[rows[:, PREFILL] >= max(worth, LEAST_CHUNK)]


def _ascending(values: Matrix) -> tuple[float, ...]:
    return tuple(np.sort(values).tolist())


def _quantile(values: Matrix, share: float) -> float:
    """As `np.quantile`, whose checks cost more than the sorting."""
    return quantile(_ascending(values), share, len(values))


def _sizes(rows: Matrix) -> NDArray[np.int32]:
    """The bit length of each row's decodes."""
    return np.frexp(rows[:, DECODES])[1]


def _most(size: int) -> int:
    """The most decodes of so many bits."""
    return (1 << size) - 1


def non_negative_fit(features: Matrix, step_ms: Matrix, weights: Matrix) -> Matrix:
    """Non-negative weighted least squares of relative errors, by trying every set of columns.

    With four columns there are fifteen sets, each a solve of at most 4 x 4: exact, and no solver.
    features: (records, columns); returns one coefficient for each column.
    """
    scale = np.maximum(np.abs(features).max(axis=0), 1.0)
    rows = features / scale / step_ms[:, None]
    gram = rows.T @ (weights[:, None] * rows)
    target = rows.T @ weights
    # If the unconstrained best is non-negative, as it nearly always is, it is the answer.
    free = np.linalg.lstsq(gram, target, rcond=None)[0]
    if (free >= 0).all():
        return np.asarray(free / scale)
    num = features.shape[1]
    best, best_loss = np.zeros(num), np.inf
    for size in range(1, num + 1):
        for chosen in itertools.combinations(range(num), size):
            pick = list(chosen)
            part = np.linalg.lstsq(gram[np.ix_(pick, pick)], target[pick], rcond=None)[0]
            if (part < 0).any():
                continue
            # Loss up to a constant: x' G x - 2 h' x.
            loss = float(part @ gram[np.ix_(pick, pick)] @ part - 2 * target[pick] @ part)
            if loss < best_loss - 1e-12:
                best, best_loss = np.zeros(num), loss
                best[pick] = part
    best /= scale
    return best
