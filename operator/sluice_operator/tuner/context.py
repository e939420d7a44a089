"""Everything that one decision rests on, computed once from the observation."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from sluice_core.contract import TICK_SECONDS, TargetName, Tick
from sluice_core.latency import TARGET_MARGIN, StepTime

from ..reasons import Reason
from . import constants as k
from .evidence import (
    Accepts,
    Fleet,
    HeardPod,
    Workload,
    acknowledged,
    describe_work,
    misses_by_cause,
    recent,
    slices,
    survey,
)
from .interference import far_ms
from .model import calibration, corrected, step_time
from .tick_sums import TickWindow
from .types import (
    Bound,
    Cause,
    Condition,
    EngineFailures,
    Move,
    Observation,
    Past,
    TargetVerdict,
    Verdict,
)
from .verdicts import READERS, is_breached, judge, read_failures

FIRST_TOKENS = READERS["timeToFirstToken"]


@dataclass(frozen=True, slots=True)
class Context:
    """The facts of one decision.

    `pods`: heard and not noisy. `acked`: those of them that run this epoch. `epoch`: their ticks
    that are evidence. `window`: all ticks of the promise. `predicted_cap`: the largest cap whose
    step holds the inter-token target, at most the ceiling; None without a model or a target.
    `has_fixed_chunk`: all pods say that their prefill chunks are fixed. `calibration`: measured
    over predicted speed of full pods, 1 if unknown. `late_in_queue`: the target that breaks in the
    queue: the first token, or the end while some wait. `cause`: what most of the late waited for,
    `none` if the newest were not late.
    """

    past: Past
    seen: Observation
    fleet: Fleet
    pods: tuple[HeardPod, ...]
    acked: tuple[HeardPod, ...]
    accepts: Accepts
    noisy: tuple[str, ...]
    window: TickWindow
    epoch: TickWindow
    verdicts: dict[TargetName, TargetVerdict]
    failures: EngineFailures
    work: Workload
    model: StepTime | None
    has_fixed_chunk: bool
    predicted_cap: int | None
    calibration: float
    late_in_queue: TargetName | None
    misses_by: dict[Cause, int]
    cause: Cause

    def verdict(self, name: TargetName) -> Verdict | None:
        """The verdict on a target, or None where it was not asked for."""
        judged = self.verdicts.get(name)
        return judged.verdict if judged else None

    @property
    def recent_ticks(self) -> list[Tick]:
        """The evidence of the last half minute."""
        return self.epoch.newest_ticks(k.RECENT_TICKS)

    def newest(self, num: int) -> list[Sequence[Tick]]:
        """The last `num` ticks of each pod that runs this epoch, if all of them are evidence."""
        found = [self.accepts.newest(pod, num) for pod in self.acked]
        return [ticks for ticks in found if len(ticks) == num]

    @property
    def by_deadline(self) -> bool:
        """True if all heard pods serve requests that can be in time before late ones."""
        configs = [pod.view.config for pod in self.fleet.heard]
        return all(c is not None and c.scheduling_policy == "deadline" for c in configs)

    @property
    def gaps_breached(self) -> bool:
        """True if not interference alone breaches the inter-token target."""
        judged = self.verdicts.get("interTokenLatency")
        return judged is not None and judged.cap_breached

    @property
    def is_cold(self) -> bool:
        """True while a pod starts, and for a short while after."""
        started = [pod.started_s for pod in self.seen.pods if not pod.terminating]
        young = any(at is not None and self.seen.now - at < k.YOUNG_S for at in started)
        return young or self.fleet.num_ready < self.seen.replicas

    def numbers(self, name: TargetName) -> str:
        """The evidence on a target as one clause for an event."""
        judged = self.verdicts[name]
        share = judged.epoch_over / judged.epoch_n if judged.epoch_n else 0.0
        return (
            f"epoch {self.seen.epoch}: {name} over {judged.target_ms:g} ms in {judged.epoch_over} "
            f"of {judged.epoch_n} ({share:.2%}, allowed {judged.allowed_share:.2%}), "
            f"verdict {judged.verdict}"
        )


def build_context(past: Past, seen: Observation) -> Context:
    """Select, merge, test and model what `seen` holds."""
    fleet = survey(seen)
    accepts = Accepts(_regime_since_s(past), seen.epoch, _used_since_s(past, seen))
    all_acked = acknowledged(fleet.heard, seen.epoch)
    noisy = _noisy_pods(all_acked, accepts, seen)
    pods = tuple(pod for pod in fleet.heard if pod.view.name not in noisy)
    acked = tuple(pod for pod in all_acked if pod.view.name not in noisy)
    since_s = max(seen.now - seen.targets.window_s, past.targets_since_s)
    promised = fleet.heard + fleet.leaving + tuple(pod for pod in fleet.unheard if pod.ticks)
    window = TickWindow(slices(promised, Accepts(since_s)))
    epoch = TickWindow(slices(acked, accepts))
    work = describe_work(pods)
    model, far = _model(pods, work, seen, epoch)
    decodes_hold = _decodes_hold(model, seen, epoch)
    verdicts = judge(seen.targets, window, epoch, far, decodes_hold=decodes_hold)
    late = _late_in_queue(verdicts, work)
    misses = misses_by_cause(epoch.newest_having(FIRST_TOKENS.seen, k.RECENT_TICKS))
    return Context(
        past=past,
        seen=seen,
        fleet=fleet,
        pods=pods,
        acked=acked,
        accepts=accepts,
        noisy=noisy,
        window=window,
        epoch=epoch,
        verdicts=verdicts,
        failures=read_failures(window, promised, since_s, seen.targets),
        work=work,
        model=model,
        has_fixed_chunk=_has_fixed_chunk(acked),
        predicted_cap=_predicted_cap(model, seen),
        calibration=calibration(model, pods, work),
        late_in_queue=late,
        misses_by=misses,
        cause=_main_cause(late, misses, work),
    )


def _model(
    pods: Sequence[HeardPod], work: Workload, seen: Observation, epoch: TickWindow
) -> tuple[StepTime | None, float]:
    """The step model corrected by measured gaps, and the ms from which a gap is interference."""
    quantile = 1 - seen.targets.allowed_share
    fitted = step_time(pods, work, quantile)
    if fitted is None:
        return None, inf
    ran = effective_cap(seen.cap, epoch.newest_ticks(k.RECENT_TICKS))
    far = far_ms(fitted, ran, seen, epoch.parts)
    return corrected(fitted, pods, work, quantile, far), far


def _has_fixed_chunk(pods: Sequence[HeardPod]) -> bool:
    configs = [pod.view.config for pod in pods]
    return bool(configs) and all(
        config is not None and config.chunk_is == "fixed" for config in configs
    )


def _decodes_hold(model: StepTime | None, seen: Observation, epoch: TickWindow) -> bool:
    """True if the step model predicts that the decodes that ran hold the target alone."""
    if model is None or seen.targets.itl_ms is None:
        return False
    ran = effective_cap(seen.cap, epoch.newest_ticks(k.RECENT_TICKS))
    return model.mean_ms(ran, 0) * model.stretch + model.stall_ms <= seen.targets.itl_ms


@dataclass(frozen=True)
class Case:
    """What the rules of cap and replicas look at. `present`: the cap or the replicas now; `bound`:
    how far the cap can be raised."""

    context: Context
    present: int
    metrics: Condition
    feasible: Condition
    bound: Bound


def nothing_to_go_by(case: Case) -> Move | None:
    """Changes nothing while too few pods report, or no request ends well."""
    if not case.metrics.holds:
        return Move(case.present, Reason.METRICS_UNAVAILABLE, case.metrics.message)
    message = f"{case.context.failures.sentence}; none ends well now"
    is_all = case.context.failures.is_all
    return Move(case.present, Reason.REQUESTS_FAIL, message) if is_all else None


def effective_cap(cap: int, newest: Sequence[Tick]) -> int:
    """The concurrency that really ran: a higher cap is not what breached."""
    ran = max((tick.max_running for tick in newest), default=cap)
    return max(1, min(cap, ran))


def _regime_since_s(past: Past) -> float:
    """Evidence starts anew when the targets or the number of serving pods changed."""
    settled = [change.settled_s for change in past.scale_history if change.settled_s is not None]
    return max([past.targets_since_s, *settled])


def _used_since_s(past: Past, seen: Observation) -> float:
    """When ticks start to count although no admission above the old cap has settled a raise."""
    last = past.last_change
    if last is None or last.epoch != seen.epoch or last.to_cap < last.from_cap:
        return inf
    return last.time_s + k.RECENT_TICKS * TICK_SECONDS


def _noisy_pods(pods: Sequence[HeardPod], accepts: Accepts, seen: Observation) -> tuple[str, ...]:
    """Pods that alone breach the inter-token target while the others do not; at most half.

    Only that target: late first tokens come from how the load is spread, not from the node.
    """
    if len(pods) < 2 or seen.targets.itl_ms is None:
        return ()
    breached = partial(is_breached, "interTokenLatency", targets=seen.targets)
    slow = [pod for pod in pods if breached(slices([pod], accepts))]
    rest = [pod for pod in pods if pod not in slow]
    if not slow or 2 * len(slow) > len(pods) or breached(slices(rest, accepts)):
        return ()
    if _is_only_busier(slow, rest):
        return ()
    return tuple(pod.view.name for pod in slow)


def _is_only_busier(slow: Sequence[HeardPod], rest: Sequence[HeardPod]) -> bool:
    """True if `slow` have larger batches than `rest`, in steps such as theirs would be. Then the
    load is uneven (clients that keep a connection), and the others would breach as well."""
    work = describe_work(slow)
    if describe_work(rest).decodes >= k.BUSY_ALIKE * work.decodes:
        return False
    theirs, ticks = step_time(rest, work, quantile=0.5), recent(slow)
    steps = sum(tick.steps for tick in ticks)
    if theirs is None or not steps:
        return True
    step_ms = 1000 * sum(tick.busy_s for tick in ticks) / steps
    return step_ms <= k.SLOW_NODE * theirs.mean_ms(work.decodes, work.prefill_tokens)


def _predicted_cap(model: StepTime | None, seen: Observation) -> int | None:
    if model is None or seen.targets.itl_ms is None:
        return None
    return model.largest_batch(TARGET_MARGIN * seen.targets.itl_ms, seen.limits.ceiling)


def _late_in_queue(verdicts: dict[TargetName, TargetVerdict], work: Workload) -> TargetName | None:
    breached = {name for name, judged in verdicts.items() if judged.verdict == "Breach"}
    if "timeToFirstToken" in breached:
        return "timeToFirstToken"
    return "endToEnd" if "endToEnd" in breached and work.waiting_cap + work.waiting_kv else None


def _main_cause(late: TargetName | None, misses: dict[Cause, int], work: Workload) -> Cause:
    """The largest cause. A request without a booked cause was refused or never started, so it
    waited in the queue. So did one that ends too late with a first token in time."""
    waits_for: Cause = "kv" if work.waiting_kv > work.waiting_cap else "cap"
    if late == "endToEnd":
        return waits_for
    causes: tuple[Cause, ...] = ("cap", "kv", "prefill", "outside", "none")
    largest = max(causes, key=lambda cause: misses[cause])
    if not misses[largest]:
        return "none"
    return waits_for if largest == "none" else largest
