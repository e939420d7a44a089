"""The score of a run, in the promise's own terms: over all arrivals."""

from itertools import chain
from math import floor, inf
from typing import Any

from sluice_core import sketch
from sluice_core.contract import SMOOTH_SHARE
from sluice_operator.tuner import Targets

from sluice.measure.client import quantile

from .pod import SimulatedEnd
from .world import World


def _first_tokens(world: World, jobs: list[SimulatedEnd]) -> dict[str, Any]:
    """Of admitted requests: those that still wait count with their age."""
    arrivals, target_ms = len(world.trace), world.targets.ttft_ms
    first_s = [(job.first_s if job.first_s < inf else world.now, job.t_s) for job in jobs]
    ttft_ms = [1e3 * (first - arrived) for first, arrived in first_s]
    late = sum(ms > (target_ms or inf) for ms in ttft_ms) + arrivals - len(ttft_ms)
    return {
        "p50_ttft_ms": quantile(ttft_ms, 0.5),
        "p99_ttft_ms": quantile(ttft_ms, 0.99),
        "longest_ttft_ms": max(ttft_ms, default=None),
        "ttft_over_share": late / arrivals if target_ms else None,
    }


def score(world: World) -> dict[str, Any]:
    """Shares are of all arrivals; a request that was refused or never ended counts as missed.

    `goodput_rps` and `tokens_per_s`: good requests and tokens over the time until the last answer.
    `gpu_seconds_per_1k_tokens`: seconds of all pods, cold starts too. First tokens: of admitted
    requests; those that still wait count with their age; None if unknown. `last_cap_change_s`: 0
    without any.
    """
    pods, totals, targets = world.pods + world.gone, world.totals, world.targets
    done, waiting = _outcomes(world)
    arrivals, tokens = len(world.trace), sum(job.num_tokens for job in done)
    whole = _whole(done, targets)
    good, smooth = shares(world)
    last_s = max((job.last_s for job in done), default=world.now)
    return {
        "requests": arrivals,
        "finished": len(done),
        "refused": sum(pod.num_refused for pod in pods) + world.num_lost,
        "good_share": good,
        "smooth_share": smooth,
        "goodput_rps": good * arrivals / last_s if last_s else 0.0,
        "tokens_per_s": tokens / last_s if last_s else 0.0,
        "gpu_seconds_per_1k_tokens": 1000 * world.pod_seconds / tokens if tokens else None,
        "cap_changes": len(world.cap_changes),
        "replica_changes": len(world.replica_changes),
        **_first_tokens(world, done + waiting),
        "p99_itl_ms": sketch.quantile_ms(totals.sketch, 0.99),
        "itl_over_share": totals.num_gaps_over / totals.num_gaps if totals.num_gaps else None,
        "e2e_over_share": 1 - len(whole) / arrivals if targets.e2e_ms else None,
        "tokens": tokens,
        "preemptions": sum(pod.num_preemptions for pod in pods),
        **_caps(world),
        "simulated_s": world.now,
    }


def shares(world: World, before_s: float = inf) -> tuple[float, float]:
    """The good and the smooth share of what arrives before `before_s`; 0 where nothing does."""
    arrivals = sum(request.t_s < before_s for request in world.trace)
    if not arrivals:
        return 0.0, 0.0
    targets, (done, _) = world.targets, _outcomes(world)
    jobs = [job for job in _whole(done, targets) if job.t_s < before_s]
    good, smooth = _good_and_smooth(jobs, targets.ttft_ms or inf, targets.itl_ms or inf)
    return good / arrivals, smooth / arrivals


def _outcomes(world: World) -> tuple[list[SimulatedEnd], list[SimulatedEnd]]:
    """Requests of all pods that ended, and those that are still open."""
    ended, going = zip(*(pod.outcomes() for pod in world.pods + world.gone), strict=True)
    return list(chain.from_iterable(ended)), list(chain.from_iterable(going))


def _whole(done: list[SimulatedEnd], targets: Targets) -> list[SimulatedEnd]:
    """Those that ended in time."""
    return [job for job in done if 1e3 * (job.last_s - job.t_s) <= (targets.e2e_ms or inf)]


def _good_and_smooth(jobs: list[SimulatedEnd], ttft_ms: float, itl_ms: float) -> tuple[int, int]:
    """Numbers of `jobs` whose mean gap, or all but few gaps, are within the targets."""
    in_time = [job for job in jobs if 1e3 * (job.first_s - job.t_s) <= ttft_ms]
    gaps_ms = [(j.last_s - j.first_s) * 1e3 / max(1, j.num_tokens - 1) for j in in_time]
    good = sum(gap_ms <= itl_ms for gap_ms in gaps_ms)
    smooth = sum(j.num_gaps_over <= floor((j.num_tokens - 1) * SMOOTH_SHARE) for j in in_time)
    return good, smooth


def _caps(world: World) -> dict[str, Any]:
    return {
        "first_cap": world.first_cap,
        "last_cap": world.cap,
        "cap_path": world.cap_changes,
        "last_cap_change_s": world.cap_changes[-1][0] if world.cap_changes else 0.0,
    }
