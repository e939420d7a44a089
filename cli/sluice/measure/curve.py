"""The effect of each cap on the same waves: the curve, its knee, and the best cap. Pure."""

from __future__ import annotations  # only the type checker sees array as generic

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, quantiles
from typing import Any

from sluice_operator.tuner import Targets

from sluice.measure.client import Outcome, exact_quantile_ms
from sluice.measure.targets import is_good, is_smooth

KNEE_SHARE = 0.9
TIE_SHARE = 0.97
RULES = {
    "knee": f"the smallest cap that brings {KNEE_SHARE:.0%} of the best throughput",
    "recommended": "of the caps that hold every target (of all, if none does) the smallest whose "
    f"goodput is at least {TIE_SHARE:.0%} of the best one's, silence between waves included; "
    "without targets, or where no request held them, the knee",
    "static": "a formula, no run: batches of the cap's size in order of arrival, each as long as "
    "its longest, and the time of its steps by the worker's own step model, against the time of "
    "the steps that the continuous run took, by the same model",
}
Length = tuple[int, int]
"""Tokens of a request: prompt, output."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The worker's step model in ms, and the most prompt tokens of one step."""

    a: float
    b: float
    c: float
    d: float
    chunk: int

    def work_ms(self, steps: float, rows: Sequence[Length]) -> float:
        """Time of `steps` that prefill the prompts and decode each row after its first token."""
        decodes = sum(output - 1 for _, output in rows)
        kv = sum((output - 1) * (prompt + output / 2) for prompt, output in rows)
        return (
            self.a * steps
            + self.b * decodes
            + self.c * kv
            + self.d * sum(prompt for prompt, _ in rows)
        )


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave. `seconds`: from the burst to the last answer; `lengths`: of answered requests, in
    order of arrival; `steps`: engine steps meanwhile; `batch`: tokens a step. None: unknown."""

    seconds: float
    lengths: tuple[Length, ...]
    good: int
    smooth: int
    steps: float | None
    batch: float | None

    @property
    def tokens(self) -> int:
        """Tokens generated for requests that were answered in full."""
        return sum(output for _, output in self.lengths)


@dataclass(slots=True)
class CurveTally:
    """All waves at one cap. Seconds; a request without an answer counts as waiting for ever."""

    cap: int
    waves: list[Wave] = field(default_factory=list)
    ttft_s: array[float] = field(default_factory=lambda: array("f"))
    gaps_s: array[float] = field(default_factory=lambda: array("f"))
    e2e_s: array[float] = field(default_factory=lambda: array("f"))
    details: Counter[str] = field(default_factory=Counter)

    def add(
        self,
        outcomes: Sequence[Outcome],
        prompts: Sequence[int],
        seconds: float,
        targets: Targets,
        steps: float | None,
        batch: float | None,
    ) -> Wave:
        """Book one wave; `prompts`: their lengths in tokens."""
        for outcome in outcomes:
            self.ttft_s.append(outcome.ttft_s if outcome.is_ok else math.inf)
            self.e2e_s.append(outcome.total_s if outcome.is_ok else math.inf)
            self.gaps_s.extend(outcome.gaps_s)
        self.details.update(o.detail or o.result for o in outcomes if not o.is_ok)
        answered = [(p, o.num_tokens) for p, o in zip(prompts, outcomes, strict=True) if o.is_ok]
        good = sum(is_good(o, targets) for o in outcomes)
        smooth = sum(is_smooth(o, targets) for o in outcomes)
        wave = Wave(seconds, tuple(answered), good, smooth, steps, batch)
        self.waves.append(wave)
        return wave


def point(
    tally: CurveTally, targets: Targets, costs: StepCosts | None, silence_s: float = 0.0
) -> dict[str, Any]:
    """One cap of the curve, ready for JSON: times in ms, shares 0..1, rates a second.

    Rates count the time in which a wave was being answered. Goodput counts the time from wave to
    wave, at least `silence_s`: a cap that finishes sooner gets no more requests.
    """
    waves, sent = tally.waves, len(tally.ttft_s)
    seconds = sum(wave.seconds for wave in waves)
    answered = sum(len(wave.lengths) for wave in waves)
    good = sum(wave.good for wave in waves)
    batches = [wave.batch for wave in waves if wave.batch is not None]
    over = _over(tally, targets)
    samples = {"ttft_ms": tally.ttft_s, "itl_ms": tally.gaps_s, "e2e_ms": tally.e2e_s}
    return {
        "cap": tally.cap,
        "waves": len(waves),
        "requests": sent,
        "failed": sent - answered,
        "failures": dict(tally.details.most_common(3)),
        **{
            name: {"p50": exact_quantile_ms(s, 0.5), "p99": exact_quantile_ms(s, 0.99)}
            for name, s in samples.items()
        },
        "tokens_per_s": sum(wave.tokens for wave in waves) / seconds,
        "tokens_per_s_quartiles": _quartiles([wave.tokens / wave.seconds for wave in waves]),
        "requests_per_s": answered / seconds,
        "goodput_rps": good / sum(max(wave.seconds, silence_s) for wave in waves),
        "good_share": good / sent,
        "good_share_interval": wilson(good, sent),
        "smooth_share": sum(wave.smooth for wave in waves) / sent,
        "over": over,
        "holds": all(part["holds"] for part in over.values())
        and _few(sent - answered, sent, targets),
        "effective_batch": sum(batches) / len(batches) if batches else None,
        "static": static(tally, costs),
    }


def _few(over: int, n: int, targets: Targets) -> bool:
    return over <= targets.allowed_share * n


def _over(tally: CurveTally, targets: Targets) -> dict[str, Any]:
    """For each target: the samples, those over it, and the verdict on their number."""
    samples = {"ttft": tally.ttft_s, "itl": tally.gaps_s, "e2e": tally.e2e_s}
    limits = {"ttft": targets.ttft_ms, "itl": targets.itl_ms, "e2e": targets.e2e_ms}
    found = {}
    for name, limit in limits.items():
        if limit is not None:
            n, over = len(samples[name]), sum(1000 * s > limit for s in samples[name])
            holds = _few(over, n, targets)
            found[name] = {"target_ms": limit, "n": n, "over": over, "holds": holds}
    return found


def _quartiles(values: list[float]) -> list[float]:
    return quantiles(values, method="inclusive") if len(values) > 1 else values * 3


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a share of `n` independent samples (Wilson 1927); (0, 1) without any."""
    if not n:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share, weight = successes / n, z * z / n
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def knee(points: Sequence[Mapping[str, Any]]) -> int:
    """The cap at the knee, by the rule in `RULES`."""
    best = max(p["tokens_per_s"] for p in points)
    return min(int(p["cap"]) for p in points if p["tokens_per_s"] >= KNEE_SHARE * best)


def recommend(points: Sequence[Mapping[str, Any]], *, has_targets: bool) -> int:
    """The cap to use, by the rule in `RULES`."""
    among = [p for p in points if p["holds"]] or points
    best = max(p["goodput_rps"] for p in among)
    if not has_targets or not best:
        return knee(points)
    return min(int(p["cap"]) for p in among if p["goodput_rps"] >= TIE_SHARE * best)


def static(tally: CurveTally, costs: StepCosts | None) -> dict[str, Any]:
    """Static batches of the cap's size: padded rows, throughput gained (below 0: lost), mean gap.

    The gap is of a full batch without prefill. None if no step is known.
    """
    batches = [batch for wave in tally.waves for batch in _batches(wave.lengths, tally.cap)]
    tokens = sum(output for batch in batches for _, output in batch)
    rows = sum(len(batch) * _longest(batch) for batch in batches)
    steps = [wave.steps for wave in tally.waves]
    waste = 1 - tokens / rows if rows else 0.0
    if costs is None or not rows or None in steps:
        return {"padding_waste": waste, "gain": None, "gap_ms": None}
    ours_ms = sum(costs.work_ms(wave.steps or 0, wave.lengths) for wave in tally.waves)
    static_ms = sum(_static_ms(batch, costs) for batch in batches)
    full = [(prompt + output // 2, 2) for batch in batches for prompt, output in batch]
    gap_ms = costs.a + tally.cap * replace(costs, a=0, d=0).work_ms(0, full) / len(full)
    return {"padding_waste": waste, "gain": ours_ms / static_ms - 1, "gap_ms": gap_ms}


def _batches(lengths: Sequence[Length], size: int) -> Iterator[Sequence[Length]]:
    yield from (lengths[at : at + size] for at in range(0, len(lengths), size))


def _longest(batch: Sequence[Length]) -> int:
    return max(output for _, output in batch)


def _static_ms(batch: Sequence[Length], costs: StepCosts) -> float:
    """All prompts first, whose last step brings the first tokens; then the longest row's steps."""
    longest = _longest(batch)
    prefills = math.ceil(sum(prompt for prompt, _ in batch) / costs.chunk)
    padded = [(prompt, longest) for prompt, _ in batch]
    return costs.work_ms(prefills + longest - 1, padded)
