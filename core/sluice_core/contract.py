"""The wire contract between operator and worker: what the admin port speaks.

Both sides read and write these types and nothing else: there is one place where a field is named.
Decoding is strict: NaN, infinities, negative counts, wrong types and missing fields are refused by
`msgspec` with the path of the field. Times are seconds (`*_s`) or milliseconds (`*_ms`).
"""

from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from .bounded import Count, NonNegative, Positive, Seconds, Share
from .latency import StepLaw

T = TypeVar("T")
Overload = Literal["Queue", "Shed"]
SchedulingPolicy = Literal["deadline", "fcfs", "priority"]
"""The order of waiting requests, see `ordering`."""

CapIs = Literal["live", "gate"]
GapsFrom = Literal["tokens", "chunks"]
ChunkIs = Literal["live", "fixed"]
TargetName = Literal["timeToFirstToken", "interTokenLatency", "endToEnd"]  # in `spec.slo`
TARGETS: tuple[TargetName, ...] = get_args(TargetName)


def policy_in_force(asked: SchedulingPolicy | None, ttft_ms: float | None) -> SchedulingPolicy:
    """The policy that was asked for; None: by deadline where there is a first-token target."""
    return asked or ("fcfs" if ttft_ms is None else "deadline")


Name = Annotated[str, Meta(max_length=64, pattern=r"\A[ -~]*\Z")]
"""Printable ASCII, as a status shows it."""
BootId = Name
Sketch = Annotated[
    dict[Annotated[int, Meta(ge=-2000, le=2000)], Count],
    Meta(max_length=1024),
]
"""Bucket index i -> number of values in (GAMMA**(i-1), GAMMA**i] ms; some 900 make a day.

The operator holds the sketches of all pods, so their size is bounded."""
ByClass = Annotated[dict[Name, Count], Meta(max_length=64)]
Failures = Annotated[
    dict[Annotated[str, Meta(max_length=16, pattern=r"^[a-z0-9]+\Z")], Count], Meta(max_length=64)
]
"""Requests that the engine failed: `cut` if the answer had begun and has no end, `died` if the
connection broke in front of it, else the status that it was answered; `other` for unknown ones."""
MAX_MS = 86_400_000.0
"""Nobody waits for more than a day."""
Milliseconds = Annotated[float, Meta(gt=0, le=MAX_MS)]

TICK_SECONDS = 2.0
"""Length of one closed evidence tick."""
TICK_RING = 900
"""Closed ticks that a worker keeps: half an hour."""
SKETCH_GAMMA = 1.02
"""Ratio of neighbouring sketch buckets: a quantile read back is within 1 % (DDSketch)."""
AT_CAP_SHARE = 0.9
"""A step is at the cap where at least this share of it runs."""
SMOOTH_SHARE = 0.01
"""Share of its own gaps that may be over in a request that a reader calls smooth."""


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """Targets in milliseconds; None means that there is no such target."""

    ttft_ms: Milliseconds | None = None
    itl_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class RuntimePatch(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of PATCH /v1/runtime_config. Fields left out keep their value.

    Answers: 200 with the effective `RuntimeConfig`; 409 if `epoch` is older than the one in force;
    422 if `cap` is over the ceiling. The same patch again is 200 and changes nothing. New
    targets need no new epoch, as evidence is not booked under them; new limits do: at the epoch in
    force they are 409.
    """

    epoch: Count
    cap: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    slo: Slo | None = None
    overload: Overload | None = None
    scheduling_policy: SchedulingPolicy | None = None
    hold_share: Share | None = None


class Waiting(Struct, frozen=True):
    """Requests that wait, by what they wait for."""

    cap: Count = 0
    kv: Count = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.cap + self.kv


class Hung(Struct, frozen=True):
    """An engine process that is there and makes no progress, so that its worker is not ready.

    `since_s`: Unix time of its last progress. `reason`: a sentence that stays the same meanwhile.
    """

    since_s: Seconds
    reason: Annotated[str, Meta(max_length=256)]


class RuntimeConfig(Struct, frozen=True, omit_defaults=True):
    """The whole effective configuration: answer of GET and PATCH /v1/runtime_config.

    `cap_is`: gate if the cap is held before an engine that runs more. `gaps_from`: what the
    inter-token gaps are measured on. `chunk_is`: fixed if the engine's prefill chunks,
    `max_num_batched_tokens`, do not follow the targets. `hold_share`: as in `wire.EngineLimits`;
    None in an older pod, which would refuse a patch with it.
    """

    epoch: Count
    cap: Positive
    max_num_batched_tokens: Positive
    slo: Slo
    overload: Overload
    ceiling: Positive
    running: Count
    waiting: Waiting
    boot_id: BootId
    hung: Hung | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    cap_is: CapIs = "live"
    gaps_from: GapsFrom = "tokens"
    chunk_is: ChunkIs = "live"
    hold_share: Share | None = None


class Causes(Struct, frozen=True):
    """Misses of the first-token target, each booked once, to the largest part of its time.

    `outside`: outside the engine, as tokenising, HTTP and a start under way.
    """

    cap: Count = 0
    kv: Count = 0
    prefill: Count = 0
    outside: Count = 0


class FirstTokens(Struct, frozen=True):
    """First-token counts of one tick, over all arrivals whose fate was decided in it.

    A request counts once. It is over if it is refused, timed out, or cancelled after the target,
    or when it passes the target while it waits. A request refused or dropped for its own deadline
    is not counted if the target would have been met.
    """

    n: Count = 0
    over: Count = 0
    by: Causes = Causes()
    sketch: Sketch = {}


class TokenGaps(Struct, frozen=True):
    """Inter-token gaps of one tick, over all tokens after a request's first.

    `n_at_cap` and `over_at_cap` count only gaps of steps at the cap (`AT_CAP_SHARE`).
    `over_after_over`: gaps over target that directly follow one over target in the same request.
    `n_in_prefill` and `over_in_prefill`: gaps that other requests' first tokens made. Where the law
    sizes steps, those of steps that it made long (`StepReport.is_long`). Else those in which
    another request's prompt was computed, from its admission to its first token.
    """

    n: Count = 0
    over: Count = 0
    over_after_over: Count = 0
    n_at_cap: Count = 0
    over_at_cap: Count = 0
    sketch: Sketch = {}
    n_in_prefill: Count = 0
    over_in_prefill: Count = 0


class Requests(Struct, frozen=True):
    """End-to-end counts of one tick. With a target they cover all arrivals whose fate was decided
    in it (as `FirstTokens`), else finished requests. `sketch` always covers finished requests."""

    n: Count = 0
    over: Count = 0
    sketch: Sketch = {}


class Tick(Struct, frozen=True):
    """The record of one closed tick of `TICK_SECONDS`.

    `t_s`: wall-clock end of the tick (Unix time). `epoch`: in force at its end. `settled`: False if
    the epoch changed in the tick, or more still run than a lowered cap allows.
    `running`, `waiting`: at its end; `max_running`: the largest number in one of its steps.
    `good`, `smooth`: finished requests in time for first token and whole; good: mean gap in time;
    smooth: at most 1 % of gaps over. `prefill_tokens`: prompt tokens computed (not cached ones).
    `finished` and `generated_tokens` make the mean output length. `throttled_s`: CPU quota
    throttling of the cgroup. `slow_steps`: of `steps`, those under interference of the pod
    (`StepTimes.slowdown`). `failed`: requests that count against no target, as they tell nothing of
    speed, unless they were late before.
    """

    seq: Count
    t_s: Seconds
    epoch: Count
    boot_id: BootId
    settled: bool
    cap: Positive
    arrivals: Count
    refused: Count
    finished: Count
    good: Count
    smooth: Count
    ttft: FirstTokens
    itl: TokenGaps
    e2e: Requests
    steps: Count
    decodes: Count
    prefill_tokens: Count
    generated_tokens: Count
    busy_s: Seconds
    throttled_s: Seconds
    running: Count
    max_running: Count
    waiting: Waiting
    slow_steps: Count = 0
    failed: Failures = {}


class StepModel(StepLaw, frozen=True):
    """The law of a pod's steps, fitted by non-negative least squares.

    `n`: records behind it. `resid_q`: measured over predicted step time, at P99 of the records. A
    chunk counts as slower where its tokens take longer (`latency.Tail.stretch`).
    """

    n: Count
    resid_q: NonNegative


class Lengths(Struct, frozen=True):
    """Lengths of finished requests, prompt plus output, in tokens."""

    mean: NonNegative
    sigma: NonNegative
    n: Count


class MemoryReport(Struct, frozen=True):
    """Bytes by class: planned by the formula before anything is loaded, measured at start, and
    corrected by measured bytes and the kernels' needs. The KV cache is made by the last.

    Measured weights are their tensors; corrected ones, on a GPU, all that torch holds for them."""

    planned: ByClass
    measured: ByClass
    kv_tokens: Count
    corrected: ByClass = {}


class Evidence(Struct, frozen=True):
    """Answer of GET /v1/evidence?after=SEQ: closed ticks with seq > SEQ, oldest first."""

    boot_id: BootId
    started_s: Seconds
    ticks: Annotated[list[Tick], Meta(max_length=TICK_RING)]
    lengths: Lengths
    memory: MemoryReport
    step_model: StepModel | None = None


class BatchReport(Struct, frozen=True):
    """How far one run of `sluice batch` is: on its report port, and as its last word.

    `total`: requests of the whole input; the others are of this run's shard, with those of earlier
    runs. `rate`: requests a second of this run. `message`: why it has ended.
    """

    total: Count = 0
    pending: Count = 0
    completed: Count = 0
    failed: Count = 0
    rate: NonNegative = 0.0
    message: str = ""


def decode(body: bytes, kind: type[T]) -> T:
    """Parse JSON bytes as `kind`; raises msgspec.ValidationError or msgspec.DecodeError."""
    return msgspec.json.decode(body, type=kind)


encode = msgspec.json.encode
