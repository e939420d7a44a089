"""What came of a run, in the promise's own terms: over all arrivals."""

from math import floor, inf
from typing import Any

from sluice_core import sketch
from sluice_core.contract import SMOOTH_SHARE

from sluice.measure.client import quantile

from .scraped import Outcome
from .world import World


def score(world: World) -> dict[str, Any]:
    """Shares are of all arrivals; a request that was refused or never ended counts as missed.

    `goodput_rps`: good requests over the time until the last answer. `gpu_seconds_per_1k_tokens`:
    seconds of all pods, cold starts too, for a thousand generated tokens. `p99_ttft_ms`: of all
    arrivals that were let in, those still waiting with their age; None if that is unknown;
    `longest_ttft_ms`: of the same.
    `last_cap_change_s`: 0 without any.
    """
    pods, totals = world.pods + world.gone, world.totals
    outcomes = [pod.outcomes() for pod in pods]
    done = [outcome for ended, _ in outcomes for outcome in ended]
    arrivals = len(world.trace)
    limit, itl_ms = world.targets.ttft_ms or inf, world.targets.itl_ms or inf
    e2e_ms = world.targets.e2e_ms or inf
    ended_in_time = [job for job in done if 1e3 * (job.last_s - job.t_s) <= e2e_ms]
    in_time = [job for job in ended_in_time if 1e3 * (job.first_s - job.t_s) <= limit]
    good = sum(_mean_gap_ms(job) <= itl_ms for job in in_time)
    smooth = sum(j.num_gaps_over <= floor((j.num_tokens - 1) * SMOOTH_SHARE) for j in in_time)
    tokens = sum(job.num_tokens for job in done)
    last_s = max((job.last_s for job in done), default=world.now)
    ttft_ms = [
        1e3 * ((job.first_s if job.first_s < inf else world.now) - job.t_s)
        for both in outcomes
        for part in both
        for job in part
    ]
    late = sum(ms > limit for ms in ttft_ms) + arrivals - len(ttft_ms)
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
        "p99_ttft_ms": quantile(ttft_ms, 0.99),
        "longest_ttft_ms": max(ttft_ms, default=None),
        "p99_itl_ms": sketch.quantile_ms(totals.sketch, 0.99),
        "ttft_over_share": late / arrivals if world.targets.ttft_ms else None,
        "itl_over_share": totals.num_gaps_over / totals.num_gaps if totals.num_gaps else None,
        "e2e_over_share": 1 - len(ended_in_time) / arrivals if world.targets.e2e_ms else None,
        "tokens": tokens,
        "preemptions": sum(pod.num_preemptions for pod in pods),
        "first_cap": world.first_cap,
        "last_cap": world.cap,
        "cap_path": world.cap_changes,
        "last_cap_change_s": world.cap_changes[-1][0] if world.cap_changes else 0.0,
        "simulated_s": world.now,
    }


def _mean_gap_ms(job: Outcome) -> float:
    if job.num_tokens < 2:
        return 0.0
    return (job.last_s - job.first_s) * 1e3 / (job.num_tokens - 1)
