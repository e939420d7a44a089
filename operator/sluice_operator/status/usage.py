"""Work, lengths and misses of the serving pods in the window, and the cost of a step. Pure."""

from collections.abc import Sequence
from math import inf
from typing import Any

from sluice_core.contract import TICK_SECONDS, Evidence, Lengths, Tick

from ..tuner.evidence import misses_by_cause, pooled


def work(
    evidence: Sequence[Evidence], window_s: float, same_targets_s: float = inf
) -> dict[str, Any]:
    """Part of `status.load`; empty without work in the window, so that idle pods change nothing.

    The window is the newest `window_s` of each pod's ticks. Misses count only in ticks that began
    within `same_targets_s`, the age of these targets. Seconds are whole tens and busy whole
    percents. Otherwise a window that fills would write the status every two seconds.
    """
    kept = max(1, round(window_s / TICK_SECONDS))
    ticks = _newest(evidence, kept)
    if not any(tick.steps or tick.arrivals for tick in ticks):
        return {}
    seconds = len(ticks) * TICK_SECONDS
    # The newest tick is up to a tick old.
    judged = int(min(same_targets_s / TICK_SECONDS - 1, kept))
    misses = misses_by_cause(_newest(evidence, judged))
    return {
        "tokens": sum(tick.generated_tokens for tick in ticks),
        "promptTokens": sum(tick.prefill_tokens for tick in ticks),
        "finished": sum(tick.finished for tick in ticks),
        "podSeconds": max(10, round(seconds / 10) * 10),
        "busyPercent": f"{100 * sum(tick.busy_s for tick in ticks) / seconds:.0f}",
        "misses": {("other" if cause == "none" else cause): n for cause, n in misses.items()},
        **_lengths(pooled(evidence)),
    }


def _newest(evidence: Sequence[Evidence], num: int) -> list[Tick]:
    return [tick for pod in evidence for tick in pod.ticks[-num:]] if num > 0 else []


def _lengths(known: Lengths) -> dict[str, Any]:
    if not known.n:
        return {}
    return {"lengths": {"mean": digits(known.mean), "sigma": digits(known.sigma)}}


def step_times(evidence: Sequence[Evidence]) -> dict[str, str]:
    """`status.batching.step`: the pods' fitted models, weighted by their records."""
    models = [pod.step_model for pod in evidence if pod.step_model and pod.step_model.n]
    total = sum(model.n for model in models)
    parts = {"fixedMs": "a", "sequenceMs": "b", "kvTokenMs": "c", "promptTokenMs": "d"}
    if not total:
        return {}
    return {
        name: digits(sum(getattr(model, part) * model.n for model in models) / total)
        for name, part in parts.items()
    }


def digits(value: float) -> str:
    """A number as text with three significant digits."""
    return f"{float(f'{value:.3g}'):g}"
