"""A batch's status: state, counts of each shard, and conditions. Pure.

Counts never become less: a pod that replaces another one says nothing at first, and an operator
that starts knows no pod. So each shard keeps the most that was told of it. A Job is complete when
each line has its result, also where a drained pod went before anybody read its last word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_core.bounded import count
from sluice_core.contract import BatchReport
from sluice_core.words import clean_all

from ..children.job import BAD_INPUT
from ..cluster.jobs import JobView, ShardEnd
from ..cluster.observed import Object, Pod
from ..model.fit import Fit
from ..reasons import Reason
from ..spec.batch import InferenceBatch
from ..tuner import Condition
from .batch_schema import ENDS, State
from .compose import kept_conditions, stamped
from .usage import digits

_OF_KUEUE = "spec.suspend has come too late: the Job is in a queue, and Kueue alone suspends it"


@dataclass(frozen=True, slots=True)
class BatchSeen:
    """All that a status is made of. `job`: None before there is one; `fit`: of an engine of its
    own; `refused`: why no Job is made; `live`, `ends`: what pods told, by shard."""

    batch: InferenceBatch
    job: JobView | None
    fit: Fit | None
    refused: tuple[Reason, str] | None
    pods: tuple[Pod, ...]
    live: Mapping[int, BatchReport]
    ends: Sequence[ShardEnd]


@dataclass(frozen=True, slots=True)
class _Counts:
    total: int
    completed: int
    failed: int

    @property
    def done(self) -> int:
        return self.completed + self.failed


def is_over(status: Object) -> bool:
    """True if it says so: nothing changes any more."""
    return status.get("state") in ENDS


def build(seen: BatchSeen, previous: Object, now: float) -> dict[str, Any]:
    """The whole status of an object whose spec could be read."""
    results = _results(seen, previous)
    told = [*seen.live.values(), *(end.report for end in seen.ends if end.report)]
    before = count((previous.get("counts") or {}).get("total")) or 0
    total = max([before, *(report.total for report in told)])
    completed, failed = [sum(one[what] for one in results) for what in ("completed", "failed")]
    if seen.job and seen.job.is_complete:
        completed = max(completed, total - failed)
    counts = _Counts(total, completed, failed)
    state = _state(seen, counts)
    rate = 0.0 if state in ENDS else sum(report.rate for report in seen.live.values())
    left = {"timeLeft": round((counts.total - counts.done) / rate)} if rate > 0 else {}
    conditions = {"Accepted": _accepted(seen)}
    if fit := seen.fit:
        fits = {"True": True, "False": False, "Unknown": None}[fit.status]
        conditions["ModelFits"] = Condition(fits, fit.reason, fit.message)
    conditions["Succeeded"] = _succeeded(seen, state, counts)
    status = {
        "observedGeneration": seen.batch.generation,
        "state": state,
        "counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        **({"rate": digits(rate)} if rate > 0 else {}),
        **left,
        "shards": {
            "total": seen.batch.spec.shards,
            "done": seen.job.num_done if seen.job else 0,
            "results": results,
        },
        "conditions": stamped(conditions, previous, seen.batch.generation, now),
    }
    cleaned: dict[str, Any] = clean_all(status)
    return cleaned


def fail(
    status: dict[str, Any], previous: Object, reason: Reason, message: str, now: float
) -> dict[str, Any]:
    """`status` of a pass that could not read or write."""
    conditions = kept_conditions(status)
    conditions["Accepted"] = Condition(False, reason, message)
    conditions.setdefault("Succeeded", Condition(None, reason, ""))
    made = stamped(conditions, previous, status["observedGeneration"], now)
    return {"state": "validating", **status, "conditions": made}


def _results(seen: BatchSeen, previous: Object) -> list[dict[str, int]]:
    """By shard, the most results that were told."""
    kept = (previous.get("shards") or {}).get("results") or ()
    found = []
    for shard in range(seen.batch.spec.shards):
        told = [end.report for end in seen.ends if end.shard == shard and end.report]
        if report := seen.live.get(shard):
            told.append(report)
        one = kept[shard] if shard < len(kept) else {}
        found.append(
            {
                "completed": max([one.get("completed", 0), *(r.completed for r in told)]),
                "failed": max([one.get("failed", 0), *(r.failed for r in told)]),
            }
        )
    return found


def _state(seen: BatchSeen, counts: _Counts) -> State:
    if seen.job and seen.job.is_complete:
        return "completed"
    if seen.job and seen.job.failure:
        return "expired" if seen.job.failure[0] == "DeadlineExceeded" else "failed"
    if not counts.total:
        return "validating"
    return "finalizing" if counts.done >= counts.total else "in_progress"


def _accepted(seen: BatchSeen) -> Condition:
    if seen.refused:
        return Condition(False, *seen.refused)
    is_vain = seen.job and seen.batch.is_queued and seen.batch.spec.suspend
    return Condition(True, Reason.ACCEPTED, _OF_KUEUE if is_vain else "")


def _succeeded(seen: BatchSeen, state: State, counts: _Counts) -> Condition:
    done = f"{counts.done} of {counts.total} done, {counts.failed} failed"
    if state == "completed":
        if counts.failed == counts.total:
            return Condition(False, Reason.ALL_FAILED, f"all {counts.total} failed")
        reason = Reason.SOME_FAILED if counts.failed else Reason.ALL_SUCCEEDED
        return Condition(True, reason, done)
    if state == "expired":
        return Condition(False, Reason.EXPIRED, f"completionWindow is over: {done}")
    if state == "failed":
        return _failed(seen)
    return _under_way(seen)


def _failed(seen: BatchSeen) -> Condition:
    """Why, in the words of the last shard that could not go on."""
    ends = sorted(seen.ends, key=lambda end: (end.ended.exit_code == BAD_INPUT, end.ended.at_s))
    for end in reversed(ends):
        if end.ended.exit_code == BAD_INPUT and end.report:
            return Condition(False, Reason.BAD_INPUT, end.report.message)
        if end.ended.exit_code:
            word = f"{end.report.message}" if end.report else end.ended.sentence
            return Condition(False, Reason.SHARDS_FAILED, f"shard {end.shard}: {word}")
    said = seen.job.failure[1] if seen.job and seen.job.failure else ""
    return Condition(False, Reason.SHARDS_FAILED, said)


def _under_way(seen: BatchSeen) -> Condition:
    if seen.job is None:
        return Condition(None, seen.refused[0] if seen.refused else Reason.STARTING, "")
    if seen.job.is_suspended:
        return Condition(None, Reason.QUEUED if seen.batch.is_queued else Reason.SUSPENDED, "")
    for pod in seen.pods:
        if pod.trouble and not pod.terminating:
            said = f"pod {pod.name}: {pod.trouble.message}"
            return Condition(None, pod.trouble.reason, said)
    return Condition(None, Reason.RUNNING if seen.live else Reason.STARTING, _last(seen))


def _last(seen: BatchSeen) -> str:
    """The last end that was no success."""
    ends = [end for end in seen.ends if end.ended.exit_code]
    last = max(ends, key=lambda end: end.ended.at_s, default=None)
    if last is None:
        return ""
    word = last.report.message if last.report else last.ended.sentence
    return f"before, shard {last.shard}: {word}"
