"""The tuner's input, its memory and its answers.

All values are frozen. Times are Unix seconds (`*_s`), targets milliseconds (`*_ms`), shares 0..1.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, TypeVar

from msgspec import Struct
from sluice_core.contract import Evidence, Overload, RuntimeConfig, TargetName

from ..reasons import Foreign, Reason
from .constants import MAX_KINDS, MIN_BUDGET, MIN_RAISE

Verdict = Literal["Breach", "Headroom", "Hold", "NoTraffic"]
Cause = Literal["cap", "kv", "prefill", "outside", "none"]
LimitedBy = Literal["VRAM", "User", "InterTokenLatency", "EndToEnd", "Minimum"]
Case = TypeVar("Case")
Choice = TypeVar("Choice")


def first(rules: Iterable[Callable[[Case], Choice | None]], case: Case) -> Choice:
    """Returns what the first of `rules` that applies decides; the last one always applies. A rule
    is a function: docs/slo.md prints its name and the first sentence of its docstring."""
    return next(choice for rule in rules if (choice := rule(case)) is not None)


@dataclass(frozen=True, slots=True)
class Targets:
    """`spec.slo`. `percentile`: "99", "99.9", ...; a target that is None was not asked for."""

    percentile: str
    ttft_ms: float | None
    itl_ms: float | None
    e2e_ms: float | None
    window_s: float = 600.0
    overload: Overload = "Queue"
    mode: Literal["Enforce", "Advisory"] = "Enforce"

    @property
    def allowed_share(self) -> float:
        """The share of samples that may be over: 0.01 for P99."""
        return float(1 - Decimal(self.percentile) / 100)

    def by_name(self) -> dict[TargetName, float]:
        """The targets that were asked for, in ms."""
        all_targets: dict[TargetName, float | None] = {
            "timeToFirstToken": self.ttft_ms,
            "interTokenLatency": self.itl_ms,
            "endToEnd": self.e2e_ms,
        }
        return {name: ms for name, ms in all_targets.items() if ms is not None}


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """The token budgets that an engine takes at its start. `may_roll`: the tuner may choose one,
    which restarts the pods. `key`: the model and the device that one is kept for."""

    least: int = MIN_BUDGET
    most: int = 65_536
    may_roll: bool = False
    key: str = ""


@dataclass(frozen=True, slots=True)
class CapLimits:
    """The limits of the tuner. `replicas_external`: somebody else writes `spec.replicas`.

    `chunk`: None if the token budget of a step is not ours to set. `is_fixed`: the cap is the size
    of a static batch.
    """

    ceiling: int
    min_num_seqs: int
    min_replicas: int
    max_replicas: int
    replicas_external: bool = False
    scale_up_window_s: float = 0.0
    scale_down_window_s: float = 300.0
    ceiling_by: Literal["VRAM", "User"] = "VRAM"
    chunk: ChunkLimits | None = None
    is_fixed: bool = False

    def bound_cap(self, cap: int) -> int:
        """`cap` within the minimum (or the ceiling, if that is less) and the ceiling."""
        return min(max(cap, min(self.min_num_seqs, self.ceiling)), self.ceiling)

    def bound_replicas(self, replicas: int) -> int:
        """`replicas` within the bounds of the spec."""
        return min(max(replicas, self.min_replicas), self.max_replicas)


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod. `evidence`: all ticks held of it; `config`: its last runtime configuration.

    `started_s`: when its container started. `seen_s`: when its evidence was last read; then the
    pod's clock may be off. Without it a pod is silent when its newest tick is old.
    """

    name: str
    ready: bool
    terminating: bool
    evidence: Evidence | None
    config: RuntimeConfig | None
    started_s: float | None
    seen_s: float | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything observed at `now`. `cap`, `epoch`: as persisted; `replicas`: as requested."""

    now: float
    targets: Targets
    limits: CapLimits
    cap: int
    epoch: int
    replicas: int
    pods: tuple[PodView, ...]


class BreachedCap(Struct, frozen=True):
    """A cap whose inter-token target broke. Not retried for 10 min * 2**times at these lengths.

    `tail_ms`: the step model's tail at that cap then; 0 without one.
    """

    cap: int
    time_s: float
    times: int
    mean_tokens: float
    tail_ms: float = 0.0


class LoadedCap(Struct, frozen=True):
    """A raised cap: below it a pod could not serve `per_s` arrivals. The cap stays there for 10 min
    * 2**times while requests are no shorter; their length is 0 if it was not recorded.

    `tail_ms`: the step model's tail at that cap then; 0 without one.
    """

    cap: int
    time_s: float
    times: int
    per_s: float
    mean_tokens: float = 0.0
    tail_ms: float = 0.0


class ChunkBudget(Struct, frozen=True):
    """The token budget of a step that the pods' engines start with, since `time_s`."""

    tokens: int
    time_s: float
    key: str


class ChunkTrial(Struct, frozen=True):
    """A budget that is proposed, until it has settled. `num`: ticks in a row that proposed about
    `tokens`; `total`: all ticks that proposed another budget than the pods'; `at_s`: the last."""

    tokens: int
    num: int
    total: int
    at_s: float
    key: str


class CapChange(Struct, frozen=True):
    """The last change of the cap. `epoch` is the one that this change opened."""

    time_s: float
    from_cap: int
    to_cap: int
    epoch: int
    reason: str


class ReplicaChange(Struct, frozen=True):
    """A change of the replicas. `settled_s`: when all of them were ready, None until then."""

    time_s: float
    from_replicas: int
    to_replicas: int
    reason: str
    arrivals_per_s: float
    drain_s: float = 0.0
    settled_s: float | None = None


class Past(Struct, frozen=True):
    """All that cannot be recomputed from the ticks; the caller keeps it in the ConfigMap as JSON.

    `targets_since_s`: when the targets were last edited; older ticks were counted against others.
    `scale_out_since_s`, `scale_in_since_s`: since when the demand asks for more or fewer replicas.
    `scale_in_to`: the most that it asked for since the latter.
    """

    targets: str = ""
    targets_since_s: float = 0.0
    breached_caps: tuple[BreachedCap, ...] = ()
    last_change: CapChange | None = None
    scale_history: tuple[ReplicaChange, ...] = ()
    scale_out_since_s: float | None = None
    scale_in_since_s: float | None = None
    scale_in_to: int = 0
    cold_start_s: float | None = None
    loaded_cap: LoadedCap | None = None
    chunk_budget: ChunkBudget | None = None
    chunk_trial: ChunkTrial | None = None

    @property
    def last_scale(self) -> ReplicaChange | None:
        """The last change of the replicas."""
        return self.scale_history[-1] if self.scale_history else None


@dataclass(frozen=True, slots=True)
class TargetVerdict:
    """One target, judged.

    `n`, `over`, `over_share`: the promise, over all arrivals of the window; it holds up to
    `allowed_share`. `quantile_ms`: the asked percentile of the window from the merged sketches;
    `bound_ms`: its upper bound (`verdicts.bound_ms`).
    `epoch_n`, `epoch_over`, `verdict`: the evidence of this epoch. `samples_needed`: until headroom
    is shown if none more is over; 0 once it is shown. `verifiable`: False if that would take more
    than an hour at the present traffic. `epoch_far`: gaps of interference among `epoch_over`, which
    a lower cap would not have held either. `far_at_cap`: those among them that came at the cap.
    `cap_breached`: the verdict is Breach also without them. `in_prefill`: they are no interference,
    but met the prompt of another request in a chunk that does not follow the target.
    """

    target: TargetName
    target_ms: float
    n: int
    over: int
    allowed_share: float
    over_share: float
    quantile_ms: float | None
    verdict: Verdict
    epoch_n: int
    epoch_over: int
    samples_needed: int
    verifiable: bool
    epoch_far: int = 0
    far_at_cap: int = 0
    cap_breached: bool = False
    in_prefill: bool = False
    bound_ms: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFailures:
    """Requests that the engines failed. `ended`: in the window, those that finished and `num` that
    failed, `by` cause. `pod`: of several, the only one that failed any, or "".
    `allowed_share`: up to which they may fail. `is_all`: nothing has finished of late, and enough
    has failed to tell that nothing is served.
    """

    ended: int
    by: Mapping[str, int]
    allowed_share: float
    pod: str = ""
    is_all: bool = False

    @property
    def num(self) -> int:
        return sum(self.by.values())

    @property
    def share(self) -> float:
        """Of those that ended."""
        return self.num / self.ended if self.ended else 0.0

    @property
    def are_many(self) -> bool:
        """More than may fail."""
        return self.share > self.allowed_share

    @property
    def sentence(self) -> str:
        """How many failed, how, and where; the most frequent kinds first."""
        kinds = sorted(self.by.items(), key=lambda item: (-item[1], item[0]))[:MAX_KINDS]
        told = ", ".join(f"{kind} ({num})" for kind, num in kinds)
        where = f"; all of them in pod {self.pod}" if self.pod else ""
        failed = f"{self.num} of {self.ended} requests failed"
        return f"{failed}: {told}{where}" if told else failed


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition's answer: None is Unknown."""

    holds: bool | None
    reason: Reason | Foreign
    message: str


@dataclass(frozen=True, slots=True)
class Move:
    """The next value, and why. Holding is a move to the same value."""

    to: int
    reason: Reason | Foreign
    message: str


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest cap that a raise may reach now, and what limits it."""

    cap: int
    reason: Reason
    message: str

    def is_worth_it(self, cap: int) -> bool:
        """True if going there from `cap` is worth a new epoch, whose evidence starts from zero."""
        return self.cap > cap and self.cap >= MIN_RAISE * cap


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision and its reasons. `cap`, `replicas`: the next values (in Advisory mode the
    present ones, within the limits).

    `cap_move`, `replicas_move`: the moves of the control law, in every mode. `desired_replicas`:
    the number that the demand alone needs. `cap_reason`, `replicas_reason`: empty when that side
    holds. `proposed_chunk`: the token budget of a step that the target allows, None if it is
    unknown or follows the target. `effective_batch`: mean decodes in a step. `limited_by`: why the
    cap cannot grow, None without a reason.
    """

    cap: int
    replicas: int
    cap_move: Move
    replicas_move: Move
    cap_reason: Reason | Foreign | Literal[""]
    replicas_reason: Reason | Foreign | Literal[""]
    cause: Cause
    verdicts: Mapping[TargetName, TargetVerdict]
    slo_met: Condition
    slo_feasible: Condition
    metrics: Condition
    succeed: Condition
    failures: EngineFailures
    predicted_cap: int | None
    limited_by: LimitedBy | None
    desired_replicas: int
    pending_replicas: int
    silent_pods: tuple[str, ...]
    noisy_pods: tuple[str, ...]
    effective_batch: float
    arrivals_per_s: float
    good_share: float | None
    smooth_share: float | None
    proposed_chunk: int | None = None
