"""Targets, traces and figures of `real_caps`. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from random import Random
from statistics import mean

from sluice.client import Outcome
from sluice.load import quantile_ms
from sluice.simulate.generate import TRACES, Lengths, Recipe
from sluice.simulate.trace import Request
from sluice.targets import is_good, is_smooth
from sluice_operator.tuner import Targets
from sluice_worker.contract import StepModel
from sluice_worker.scheduler import MIN_CHUNK_TOKENS
from sluice_worker.steptime import PREDICTION_MARGIN, predict_ms

OURS = "ours"
LENGTHS = Lengths(64, 48)
TIME_SCALE = 0.2
"""Of the sources' bursts: one every 6 s instead of 30, and a fifth as large."""
Path = Sequence[tuple[float, int]]
"""Caps and the seconds since the first arrival at which each was set."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one trace. Shares are of all arrivals; None: the time is beyond measure, as
    more of the requests than that were not answered. `cpu_s`: of both processes of the worker."""

    trace: str
    round: int
    contender: str
    requests: int
    answered: int
    good_share: float
    smooth_share: float
    p50_ttft_ms: float | None
    p99_ttft_ms: float | None
    p50_itl_ms: float | None
    p99_itl_ms: float | None
    itl_over_share: float | None
    tokens_per_s: float
    seconds: float
    cpu_s: float
    first_cap: int
    cap_changes: int
    cap_path: Path


def itl_target_ms(model: StepModel, cap: int, lengths: Lengths = LENGTHS) -> float:
    """The step of `cap` sequences, one of them with the least chunk of its prompt, over the margin
    that the worker itself leaves when it predicts a cap; in tenths of a millisecond."""
    context = lengths.prompt + lengths.output / 2
    step_ms = predict_ms(model, cap - 1, (cap - 1) * context, MIN_CHUNK_TOKENS)
    return ceil(10 * step_ms / PREDICTION_MARGIN) / 10


def scaled_trace(name: str, per_s: float, seconds: float, seed: int) -> list[Request]:
    """The trace `name` of the simulator, of about `seconds` on a pod that does `per_s` requests a
    second. Raises KeyError for another name."""

    def made(num: int) -> list[Request]:
        recipe = Recipe(max(num, 1), per_s * TIME_SCALE, LENGTHS, Random(seed))
        return list(TRACES[name](recipe))

    num = ceil(per_s * seconds)
    num = ceil(num * seconds / (TIME_SCALE * made(num)[-1].t_s))
    return [Request(TIME_SCALE * one.t_s, one.prompt_tokens, one.max_tokens) for one in made(num)]


def make_row(
    where: tuple[str, int, str],
    outcomes: Sequence[Outcome | None],
    targets: Targets,
    seconds: float,
    cpu_s: float,
    path: Path,
) -> Row:
    """`where`: trace, round, contender; an outcome of None was not answered in time; `path`: the
    first cap and what followed."""
    answered = [o for o in outcomes if o is not None and o.is_ok]
    first_s = [o.ttft_s for o in answered] + [inf] * (len(outcomes) - len(answered))
    gaps_s = [gap for o in answered for gap in o.gaps_s]
    over = sum(1000 * gap > (targets.itl_ms or inf) for gap in gaps_s)
    return Row(
        *where,
        requests=len(outcomes),
        answered=len(answered),
        good_share=sum(is_good(o, targets) for o in answered) / len(outcomes),
        smooth_share=sum(is_smooth(o, targets) for o in answered) / len(outcomes),
        p50_ttft_ms=_known(quantile_ms(first_s, 0.5)),
        p99_ttft_ms=_known(quantile_ms(first_s, 0.99)),
        p50_itl_ms=quantile_ms(gaps_s, 0.5),
        p99_itl_ms=quantile_ms(gaps_s, 0.99),
        itl_over_share=over / len(gaps_s) if gaps_s else None,
        tokens_per_s=sum(o.num_tokens for o in answered) / seconds,
        seconds=seconds,
        cpu_s=cpu_s,
        first_cap=path[0][1],
        cap_changes=len(path) - 1,
        cap_path=path,
    )


def _known(ms: float | None) -> float | None:
    return ms if ms is not None and isfinite(ms) else None


def table(rows: Sequence[Row]) -> str:
    """All rows as Markdown, each trace's best fixed cap in bold."""
    head = ["trace", "contender", "smooth %", "good %", "answered", "first P50 ms", "P99 ms",
            "gap P50 ms", "P99 ms", "tokens/s", "CPU-s", "caps"]  # fmt: skip
    best = {id(best_fixed(rows, row.trace, row.round)) for row in rows}
    cells = [_cells(row, bold=id(row) in best) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *cells])


def _cells(row: Row, *, bold: bool) -> list[str]:
    name = f"**{row.contender}**" if bold else row.contender
    times = (row.p50_ttft_ms, row.p99_ttft_ms, row.p50_itl_ms, row.p99_itl_ms)
    return [
        row.trace, name, f"{100 * row.smooth_share:.1f}", f"{100 * row.good_share:.1f}",
        f"{row.answered} of {row.requests}", *("-" if t is None else f"{t:.4g}" for t in times),
        f"{row.tokens_per_s:.0f}", f"{row.cpu_s:.1f}", ", ".join(str(cap) for _, cap in row.cap_path),
    ]  # fmt: skip


def best_fixed(rows: Sequence[Row], trace: str, round_: int) -> Row | None:
    """The oracle: the fixed cap that was best in hindsight; None where none was run."""
    fixed = [r for r in rows if (r.trace, r.round) == (trace, round_) and r.contender != OURS]
    return max(fixed, key=lambda r: (r.smooth_share, r.good_share, -r.cpu_s), default=None)


def findings(rows: Sequence[Row], ceiling: int) -> Iterator[str]:
    """Ours against the best fixed cap and against cap = max, a sentence for each trace."""
    for trace in dict.fromkeys(row.trace for row in rows):
        pairs = [
            (row, best)
            for row in rows
            if row.trace == trace
            and row.contender == OURS
            and (best := best_fixed(rows, trace, row.round))
        ]
        if not pairs:
            continue
        ours = mean(row.smooth_share for row, _ in pairs)
        oracle = mean(best.smooth_share for _, best in pairs)
        reach = f"{ours / oracle:.1%} of it" if oracle else "and so nothing to reach"
        named = ", ".join(best.contender for _, best in pairs)
        told = f"{trace}: {ours:.1%} smooth; best fixed ({named}) {oracle:.1%}: {reach}"
        full = [r.smooth_share for r in rows if (r.trace, r.contender) == (trace, f"cap {ceiling}")]
        if full:
            told += f"; {100 * (ours - mean(full)):+.1f} points against cap {ceiling}"
        last_s = max(row.cap_path[-1][0] for row, _ in pairs)
        changes = max(row.cap_changes for row, _ in pairs)
        yield f"{told}; at most {changes} changes, the last after {last_s:.0f} s."
