"""Targets, traces and figures of `real_caps`. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from random import Random

from sluice.client import Outcome
from sluice.load import quantile_ms
from sluice.simulate.generate import TRACES, Lengths, Recipe
from sluice.simulate.trace import Request
from sluice.targets import is_good, is_smooth
from sluice_operator.tuner import Targets
from sluice_worker.contract import MIN_CHUNK_TOKENS, TARGET_MARGIN, StepModel
from sluice_worker.steptime import predict_ms

OURS = "ours"
LENGTHS = Lengths(32, 64)
TIME_SCALE = 0.2
"""Of the sources' bursts: one every 6 s instead of 30, and a fifth as large."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one trace. Shares are of all arrivals; a first token that did not come
    waits for ever, None where that is the quantile. Gaps are of the requests that were answered.

    `cpu_s`: of both processes of the worker; `cap_path`: seconds since the first arrival and the
    cap that was set then, the first one at 0; `per_s`: requests/s that the load was scaled to.
    """

    trace: str
    contender: str
    requests: int
    answered: int
    good_share: float
    smooth_share: float
    p50_ttft_ms: float | None
    p99_ttft_ms: float | None
    p50_itl_ms: float | None
    p99_itl_ms: float | None
    tokens_per_s: float
    seconds: float
    cpu_s: float
    cap_changes: int
    cap_path: Sequence[tuple[float, int]]
    per_s: float
    itl_target_ms: float


def itl_target_ms(model: StepModel, cap: int, tail: float) -> float:
    """The least target, in tenths of a millisecond, for which the worker's own rule
    (`steptime.predicted_cap`) has `cap` for the largest that holds it at `LENGTHS`, if steps at
    P99 take `tail` times the mean: with the measured tail, a noisy minute would make it loose."""
    kv_tokens = LENGTHS.prompt + LENGTHS.output / 2
    plain_ms = predict_ms(model, cap, cap * kv_tokens, 0)
    beside_ms = predict_ms(model, cap - 1, (cap - 1) * kv_tokens, MIN_CHUNK_TOKENS)
    longest_ms = tail * max(plain_ms, beside_ms) / TARGET_MARGIN
    return ceil(10 * longest_ms + 1e-6) / 10


def scaled_trace(name: str, per_s: float, seconds: float, seed: int) -> list[Request]:
    """The simulator's trace `name`, of about `seconds` for a pod that does `per_s` requests a
    second. Raises KeyError for another name."""

    def made(num: int) -> list[Request]:
        recipe = Recipe(num, per_s * TIME_SCALE, LENGTHS, Random(seed))
        return [
            Request(TIME_SCALE * one.t_s, one.prompt_tokens, one.max_tokens)
            for one in TRACES[name](recipe)
        ]

    num = ceil(per_s * seconds)
    return made(ceil(num * seconds / made(num)[-1].t_s))


def make_row(
    trace: str,
    contender: str,
    outcomes: Sequence[Outcome | None],
    targets: Targets,
    seconds: float,
    cpu_s: float,
    path: Sequence[tuple[float, int]],
    per_s: float,
) -> Row:
    """What came of a run; an outcome of None was not answered in time."""
    answered = [o for o in outcomes if o is not None and o.is_ok]
    first_s = [o.ttft_s for o in answered] + [inf] * (len(outcomes) - len(answered))
    gaps_s = [gap for o in answered for gap in o.gaps_s]
    return Row(
        trace,
        contender,
        requests=len(outcomes),
        answered=len(answered),
        good_share=sum(is_good(o, targets) for o in answered) / len(outcomes),
        smooth_share=sum(is_smooth(o, targets) for o in answered) / len(outcomes),
        p50_ttft_ms=_known(quantile_ms(first_s, 0.5)),
        p99_ttft_ms=_known(quantile_ms(first_s, 0.99)),
        p50_itl_ms=quantile_ms(gaps_s, 0.5),
        p99_itl_ms=quantile_ms(gaps_s, 0.99),
        tokens_per_s=sum(o.num_tokens for o in answered) / seconds,
        seconds=seconds,
        cpu_s=cpu_s,
        cap_changes=len(path) - 1,
        cap_path=path,
        per_s=per_s,
        itl_target_ms=targets.itl_ms or inf,
    )


def _known(ms: float | None) -> float | None:
    return ms if ms is not None and isfinite(ms) else None


def best_fixed(rows: Sequence[Row], trace: str) -> Row | None:
    """The oracle: the fixed cap that was best in hindsight; None where none was run."""
    fixed = [row for row in rows if row.trace == trace and row.contender != OURS]
    return max(fixed, key=lambda r: (r.smooth_share, r.good_share, -r.cpu_s), default=None)


def table(rows: Sequence[Row]) -> str:
    """All rows as Markdown, each trace's best fixed cap in bold."""
    head = ["trace", "contender", "smooth %", "good %", "answered", "first P50 ms", "P99",
            "gap P50 ms", "P99", "due ms", "tokens/s", "load/s", "CPU-s", "caps"]  # fmt: skip
    lines = [head, ["---"] * len(head), *(_cells(r, r is best_fixed(rows, r.trace)) for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row, is_best: bool) -> list[str]:
    times = (row.p50_ttft_ms, row.p99_ttft_ms, row.p50_itl_ms, row.p99_itl_ms)
    caps = ", ".join(str(cap) for _, cap in row.cap_path)
    return [
        row.trace, f"**{row.contender}**" if is_best else row.contender,
        f"{100 * row.smooth_share:.1f}", f"{100 * row.good_share:.1f}",
        f"{row.answered} of {row.requests}", *("-" if t is None else f"{t:.4g}" for t in times),
        f"{row.itl_target_ms:g}", f"{row.tokens_per_s:.0f}", f"{row.per_s:.2f}",
        f"{row.cpu_s:.1f}", caps,
    ]  # fmt: skip


def findings(rows: Sequence[Row], ceiling: int) -> Iterator[str]:
    """Ours against the best fixed cap and against cap = max, a sentence for each trace."""
    for ours in (row for row in rows if row.contender == OURS):
        best = best_fixed(rows, ours.trace)
        full = [r for r in rows if (r.trace, r.contender) == (ours.trace, f"cap {ceiling}")]
        told = f"{ours.trace}: ours {ours.smooth_share:.1%} smooth"
        if best and best.smooth_share:
            share = ours.smooth_share / best.smooth_share
            told += f", {share:.1%} of {best.contender}, the best fixed one"
        for row in full:
            told += (
                f", {100 * (ours.smooth_share - row.smooth_share):+.1f} points against cap = max"
            )
        yield f"{told}; {ours.cap_changes} changes, the last at {ours.cap_path[-1][0]:.0f} s."
