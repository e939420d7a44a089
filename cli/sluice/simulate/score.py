"""What came of a run, in the promise's own terms: over all arrivals."""

from math import floor, inf
from typing import Any

from sluice_operator.tuner import sketch
from sluice_worker.contract import SMOOTH_SHARE

from .job import Job
from .world import World


def score(world: World) -> dict[str, Any]:
    """Shares are of all arrivals; a request that was refused or never ended counts as missed.

    `goodput_rps`: good requests over the time until the last answer. `gpu_seconds_per_1k_tokens`:
    seconds of all pods, cold starts too, for a thousand generated tokens. `p99_ttft_ms`: of all
    arrivals that were let in, those still waiting with their age; None if that is unknown.
    `last_cap_change_s`: 0 without any.
    """
    pods = world.pods + world.gone
    done = [job for pod in pods for job in pod.done]
    arrivals = len(world.trace)
    targets = world.targets
    good = sum(_is_good(world, job) for job in done)
    smooth = sum(_is_smooth(world, job) for job in done)
    tokens = sum(job.generated for job in done)
    last_s = max((job.flight.last_s for job in done), default=world.now)
    ttft_ms = _first_tokens_ms(world)
    limit = targets.ttft_ms or inf
    late = sum(ms > limit for ms in ttft_ms) + arrivals - len(ttft_ms)
    gap_ms = sketch.quantile_ms(world.gap_sketch, 0.99)
    return {
        "requests": arrivals,
        "finished": len(done),
        "refused": sum(pod.num_refused for pod in pods) + world.num_lost,
        "good_share": good / arrivals,
        "smooth_share": smooth / arrivals,
        "goodput_rps": good / last_s if last_s else 0.0,
        "gpu_seconds_per_1k_tokens": 1000 * world.pod_seconds / tokens if tokens else None,
        "cap_changes": len(world.cap_changes),
        "replica_changes": len(world.replica_changes),
        "p99_ttft_ms": _quantile(ttft_ms, 0.99),
        "p99_itl_ms": gap_ms,
        "ttft_over_share": late / arrivals if targets.ttft_ms else None,
        "itl_over_share": world.num_gaps_over / world.num_gaps if world.num_gaps else None,
        "tokens": tokens,
        "preemptions": sum(pod.num_preemptions for pod in pods),
        "first_cap": world.first_cap,
        "last_cap": world.cap,
        "cap_path": world.cap_changes,
        "last_cap_change_s": world.cap_changes[-1][0] if world.cap_changes else 0.0,
        "simulated_s": world.now,
    }


def _first_tokens_ms(world: World) -> list[float]:
    times = []
    for pod in world.pods + world.gone:
        for job in [*pod.done, *pod.open_jobs]:
            first_s = job.flight.first_s
            times.append(1e3 * ((world.now if first_s is None else first_s) - job.request.t_s))
    return times


def _held_first(world: World, job: Job) -> bool:
    first_s, limit = job.flight.first_s, world.targets.ttft_ms or inf
    return first_s is not None and 1e3 * (first_s - job.request.t_s) <= limit


def _is_good(world: World, job: Job) -> bool:
    return _held_first(world, job) and job.flight.mean_gap_ms <= (world.targets.itl_ms or inf)


def _is_smooth(world: World, job: Job) -> bool:
    allowed = floor((job.flight.num_tokens - 1) * SMOOTH_SHARE)
    return _held_first(world, job) and job.flight.num_gaps_over <= allowed


def _quantile(values: list[float], quantile: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed."""
    if not values:
        return None
    rank = min(len(values) - 1, max(0, -int(-quantile * len(values) // 1) - 1))
    return sorted(values)[rank]
